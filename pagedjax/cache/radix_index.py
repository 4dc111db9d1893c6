"""RadixIndex: a radix tree over tokens, split on block boundaries, as in SGLang's RadixAttention."""

from __future__ import annotations

from pagedjax.cache.hashing import TokenChain, pack_tokens
from pagedjax.cache.prefix import Index, common_prefix_tokens
from pagedjax.cache.protocol import InvariantError
from pagedjax.cache.siblings import Siblings

_NO_EDGES = Siblings()  # of every node that has no child; never changed


class _Node:
    """A run of consecutive blocks without a branch between them.

    Attributes:
        parent: None for the root of a namespace.
        run: Tokens of the blocks, i32le; may be longer than the blocks that are left.
        blocks: Block ids; 0 marks a hole (a block that went although something continues it).
        start: Position of the first block in its chain.
        children: First block's edge (its tokens and item fields) to the node.
        edges: The keys of `children`.
    """

    __slots__ = ("blocks", "children", "edge", "edges", "parent", "run", "start")

    def __init__(
        self, parent: _Node | None, edge: bytes, run: bytearray, blocks: list[int], start: int
    ) -> None:
        self.parent = parent
        self.edge = edge
        self.run = run
        self.blocks = blocks
        self.start = start
        self.children: dict[bytes, _Node] = {}
        self.edges = _NO_EDGES

    def add(self, child: _Node) -> None:
        child.parent = self
        self.children[child.edge] = child
        if self.edges is _NO_EDGES:
            self.edges = Siblings()
        self.edges.add(child.edge)

    def drop(self, child: _Node) -> None:
        del self.children[child.edge]
        self.edges.remove(child.edge)


class RadixIndex(Index):
    """Finds shared prefixes by walking tokens; holds one copy of each content.

    A run of blocks without a branch is one node, compared in one piece. Nodes are split where two chains
    part, always between blocks (block size 1: at any token). A block that overlaps a multimodal item is a
    node of its own, told apart by the item's fields. Each namespace has its own root.

    With `leaf_only` a block goes only when nothing continues it, so the tree has no holes; the blocks a
    sequence holds protect the path to them, since it references them all. Without it (window groups) holes
    are kept while something below them is registered.

    Args:
        num_blocks: Blocks of the pool, the null block included.
        block_size: Tokens per block.

    Source: Zheng et al., NeurIPS 2024 (SGLang).
    """

    leaf_only = True
    exclusive = True
    verifies = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._size = 4 * block_size
        self._roots: dict[bytes, _Node] = {}
        self._node_of: list[_Node | None] = [None] * num_blocks

    # -------------------------------------------------------------- walk

    def _root(self, chain: TokenChain) -> _Node | None:
        return self._roots.get(chain.extra.namespace)

    def _item_fields(self, chain: TokenChain, index: int) -> bytes:
        """What tells the block apart beside its tokens, within its namespace."""
        if not chain.extra.items or not chain.extra.overlapping(index, self._block_size):
            return b""
        return chain.extra.in_block(index, self._block_size)

    def _next_item(self, chain: TokenChain, index: int, count: int) -> int:
        """The first block from `index` on that overlaps an item; `count` if none does."""
        if not chain.extra.items:
            return count
        return next((i for i in range(index, count) if self._item_fields(chain, i)), count)

    def _walk(self, chain: TokenChain, count: int) -> tuple[_Node | None, int, int]:
        """Follow the chain's first `count` blocks; (last node, blocks matched in it, blocks matched)."""
        node = self._root(chain)
        if node is None:
            return None, 0, 0
        size = self._size
        packed = chain.packed(count)
        at = 0
        inside = 0
        while at < count:
            fields = self._item_fields(chain, at)
            child = node.children.get(bytes(packed[at * size : (at + 1) * size]) + fields)
            if child is None:
                break
            node = child
            room = 1 if fields else self._next_item(chain, at, count) - at
            inside = self._match_run(node, packed, at, min(len(node.blocks), room))
            at += inside
            if inside < len(node.blocks):
                break
        return node, inside, at

    def _match_run(self, node: _Node, packed: bytes | bytearray, at: int, count: int) -> int:
        """Leading blocks of the node's run, at most `count`, that equal the chain's from block `at`."""
        size = self._size
        run = node.run
        if run[: count * size] == packed[at * size : (at + count) * size]:
            return count
        low, high = 0, count
        while high - low > 1:
            middle = (low + high) // 2
            if run[low * size : middle * size] == packed[(at + low) * size : (at + middle) * size]:
                low = middle
            else:
                high = middle
        return low

    def _path(self, node: _Node | None, inside: int) -> list[int]:
        parts: list[list[int]] = []
        while node is not None:
            parts.append(node.blocks[:inside] if not parts else node.blocks)
            node = node.parent
        return [b for part in reversed(parts) for b in part]

    # ------------------------------------------------------------ look up

    def lookup(self, chain: TokenChain, max_tokens: int) -> tuple[list[int], int]:
        blocks = self._path(*self._walk(chain, max_tokens // self._block_size)[:2])
        if 0 in blocks:
            del blocks[blocks.index(0) :]
        return blocks, len(blocks) * self._block_size

    def resident(self, chain: TokenChain, num_blocks: int) -> list[int]:
        blocks = self._path(*self._walk(chain, num_blocks)[:2])
        return blocks + [0] * (num_blocks - len(blocks))

    def below(self, chain: TokenChain, num_blocks: int, max_tokens: int) -> tuple[int, int]:
        size = self._block_size
        max_tokens = min(max_tokens, size)
        if max_tokens <= 0 or self._item_fields(chain, num_blocks):
            return 0, 0
        node, inside, matched = self._walk(chain, num_blocks)
        if node is None or matched < num_blocks:
            return 0, 0
        at = num_blocks * size
        wanted = pack_tokens(chain.tokens[at : at + max_tokens])
        if inside < len(node.blocks):
            found = [(node.blocks[inside], bytes(node.run[inside * self._size : (inside + 1) * self._size]))]
        else:
            found = [(node.children[e].blocks[0], e) for e in self._nearest(node, wanted)]
        best = max(((common_prefix_tokens(e, wanted), b) for b, e in found if b), default=(0, 0))
        return (best[1], best[0]) if best[0] else (0, 0)

    def _nearest(self, node: _Node, wanted: bytes) -> list[bytes]:
        """The sorted edges on either side of `wanted`: one shares most with it.

        Edges to holes do not count, nor those longer than a block's tokens: they carry item fields, their
        tokens do not tell their content.
        """
        near = []
        for side in (node.edges.before(wanted), node.edges.after(wanted)):
            for edge in side:
                if len(edge) == self._size and node.children[edge].blocks[0]:
                    near.append(edge)
                    break
        return near

    def foreign(self, chain: TokenChain) -> bool:
        if chain.num_full_blocks == 0:
            return False
        edge = bytes(chain.packed(1)[: self._size])
        own = self._root(chain)
        return any(edge in root.children for root in self._roots.values() if root is not own)

    def copies(self, key: bytes) -> int:
        return 1  # asked of registered contents only, and of those it holds one

    # ------------------------------------------------------------ register

    def register(
        self, chain: TokenChain, first: int, blocks: list[int], previous: int, *, dedup: bool
    ) -> tuple[list[int], int]:
        end = first + len(blocks)
        node, inside, matched = self._place(chain, first, end, previous)
        known, twins = blocks, 0
        if matched > first:
            known, twins = self._merge(first, matched, node, inside, blocks)
        if matched < first and self.leaf_only:
            raise InvariantError(f"block {blocks[0]}: would continue {previous}, which is not in the tree")
        if matched < end:
            holes = [0] * max(first - matched, 0)
            self._grow(chain, node, inside, matched, holes + blocks[max(matched - first, 0) :])
        return known, twins

    def _place(self, chain: TokenChain, first: int, end: int, previous: int) -> tuple[_Node, int, int]:
        """Where block `first` belongs, and what of [first, end) is there already."""
        held = self._node_of[previous] if previous else None
        # The common case: the block before ours is the tail of a leaf.
        if held is not None and held.blocks[-1] == previous and not held.children:
            return held, len(held.blocks), first
        node, inside, matched = self._walk(chain, end)
        if node is None:
            node = self._roots.setdefault(chain.extra.namespace, _Node(None, b"", bytearray(), [], 0))
        return node, inside, matched

    def _merge(
        self, first: int, matched: int, node: _Node, inside: int, blocks: list[int]
    ) -> tuple[list[int], int]:
        """Blocks [first, matched) are in the tree: name them; fill holes with ours."""
        known = list(blocks)
        twins = 0
        path = self._path(node, inside)
        for i in range(first, matched):
            there, own = path[i], blocks[i - first]
            if there == 0:
                self._fill(node, i, own)
            elif there != own:
                known[i - first] = there
                twins += 1
        return known, twins

    def _fill(self, node: _Node | None, position: int, block: int) -> None:
        while node is not None and node.start > position:
            node = node.parent
        assert node is not None
        node.blocks[position - node.start] = block
        self._node_of[block] = node

    def _grow(self, chain: TokenChain, node: _Node, inside: int, at: int, blocks: list[int]) -> None:
        """Add blocks below the place (node, inside), splitting the node if it goes on differently."""
        size = self._size
        if inside < len(node.blocks):
            self._split(node, inside)
        packed = chain.packed(at + len(blocks))
        end = at + len(blocks)
        while at < end:
            fields = self._item_fields(chain, at)
            stop = at + 1 if fields else self._next_item(chain, at, end)
            run = packed[at * size : stop * size]
            part = blocks[: stop - at]
            blocks = blocks[stop - at :]
            extends = not fields and node.parent is not None and not node.children
            if extends and len(node.edge) == size:
                del node.run[len(node.blocks) * size :]
                node.run += run
                node.blocks += part
            else:
                child = _Node(node, bytes(run[:size]) + fields, bytearray(run), part, at)
                node.add(child)
                node = child
            for b in part:
                if b:
                    self._node_of[b] = node
            at = stop

    def _split(self, node: _Node, inside: int) -> None:
        """Cut a node in two; the lower part becomes its child."""
        size = self._size
        run, blocks = node.run[inside * size :], node.blocks[inside:]
        lower = _Node(node, bytes(run[:size]), run, blocks, node.start + inside)
        lower.children, lower.edges = node.children, node.edges
        for child in lower.children.values():
            child.parent = lower
        node.children, node.edges = {}, _NO_EDGES
        node.run, node.blocks = node.run[: inside * size], node.blocks[:inside]
        node.add(lower)
        for b in blocks:
            if b:
                self._node_of[b] = lower

    # -------------------------------------------------------------- forget

    def forget(self, blocks: list[int], keys: list[bytes]) -> None:
        for b in blocks:
            node = self._node_of[b]
            if node is None:
                raise InvariantError(f"block {b}: is not in the tree")
            self._node_of[b] = None
            if node.blocks[-1] == b and not node.children:
                node.blocks.pop()
                self._trim(node)
            elif self.leaf_only:
                raise InvariantError(f"block {b}: something continues it, it must not go")
            else:
                node.blocks[node.blocks.index(b)] = 0

    def _trim(self, node: _Node) -> None:
        """Holes at a leaf's tail go; an empty leaf goes, and then maybe its parent's tail."""
        while True:
            while node.blocks and node.blocks[-1] == 0:
                node.blocks.pop()
            parent = node.parent
            if node.blocks or node.children:
                return
            if parent is None:
                self._roots = {name: root for name, root in self._roots.items() if root is not node}
                return
            parent.drop(node)
            if parent.children:
                return
            node = parent

    def is_leaf(self, block: int) -> bool:
        node = self._node_of[block]
        return node is None or (node.blocks[-1] == block and not node.children)

    def leading_leaves(self, blocks: list[int]) -> int:
        """How many of the blocks, in this order, may go because nothing continues them by then."""
        gone: dict[_Node, int] = {}  # node -> blocks at its tail that are gone
        childless: dict[_Node, int] = {}  # node -> children that are gone whole
        for count, b in enumerate(blocks):
            node = self._node_of[b]
            assert node is not None
            cut = gone.get(node, 0)
            if node.blocks[-1 - cut] != b or len(node.children) != childless.get(node, 0):
                return count
            gone[node] = cut + 1
            if cut + 1 == len(node.blocks) and node.parent is not None:
                childless[node.parent] = childless.get(node.parent, 0) + 1
        return len(blocks)

    def depth(self, block: int) -> int:
        node = self._node_of[block]
        return 0 if node is None else node.start + node.blocks.index(block)

    def check(self, keys: list[bytes | None]) -> None:
        found: set[int] = set()
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if list(node.edges) != sorted(node.children) or len(node.run) < len(node.blocks) * self._size:
                raise InvariantError(
                    f"node at block {node.start}: its edges or its tokens are not its blocks'"
                )
            for child in node.children.values():
                if child.parent is not node or child.start != node.start + len(node.blocks):
                    raise InvariantError(f"node at block {child.start}: is not where its parent ends")
            if node.parent is not None and not (node.blocks and (node.blocks[-1] or node.children)):
                raise InvariantError(f"node at block {node.start}: is empty or ends in a hole")
            for b in node.blocks:
                if b and (b in found or self._node_of[b] is not node):
                    raise InvariantError(f"block {b}: is in the tree twice or points elsewhere")
                if not b and self.leaf_only:
                    raise InvariantError(f"node at block {node.start}: has a hole")
            found.update(b for b in node.blocks if b)
            stack += node.children.values()
        named = {b for b, key in enumerate(keys) if key is not None}
        if found != named:
            raise InvariantError(f"blocks in the tree {sorted(found)} are not the named ones {sorted(named)}")
