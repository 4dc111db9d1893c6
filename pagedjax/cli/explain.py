"""`pagedjax demo --explain`: one request's life in the block manager, step by step, without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedjax.cache import PagedManager, TokenChain

if TYPE_CHECKING:
    from rich.console import Console

BLOCK_SIZE = 4
NUM_BLOCKS = 8
FIRST = ["the", "old", "lamp", "burns", "all", "night", "above", "the", "sea", "and"]
SECOND = ["the", "old", "lamp", "burns", "all", "night", "above", "the", "sea", "of", "glass", "far", "below"]
ANSWER = ["the", "tall", "white", "tower"]
EARLIER, REQUEST = 1, 2  # sequence ids


class Story:
    """Runs the manager and prints what changed after each call.

    Args:
        console: Where to print.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.manager = PagedManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        self.words: dict[str, int] = {}
        self.now = 0.0

    def tell(self) -> None:
        """The whole story: an earlier request leaves blocks behind, the next one finds and reuses them."""
        self._say(
            "Start",
            f"{self.manager.num_usable} usable blocks, {BLOCK_SIZE} tokens each; one word is one token.",
        )
        self._state()
        self._earlier_request()
        chain = TokenChain(self._ids(SECOND), block_size=BLOCK_SIZE)
        self._hash(chain)
        self._look_up(chain)
        self._allocate(chain)
        self._commit(REQUEST, len(SECOND))
        self._say(
            "Fill and index",
            "The step has written the prompt's KV: full blocks get their hash, others can hit them.",
        )
        self._state()
        self._decode(chain)
        self.manager.release(REQUEST)
        self._say(
            "Free",
            "References drop to zero. Blocks without a hash go to the front of the queue; cached ones wait "
            "at its back, the tail of the sequence first, so that a prefix outlives what follows it.",
        )
        self._state()
        self.console.print(
            f"\nNext time the same conversation comes with more to say, {self.manager.peek(self._longer(chain))} of "
            f"its tokens are hits: prompt and answer alike."
        )

    def _earlier_request(self) -> None:
        chain = TokenChain(self._ids(FIRST), block_size=BLOCK_SIZE)
        self.manager.begin(EARLIER, chain)
        self.manager.reserve(EARLIER, len(FIRST))
        self._commit(EARLIER, len(FIRST))
        self.manager.release(EARLIER)
        self._say(
            "Before",
            f'An earlier request, "{" ".join(FIRST)}" ({len(FIRST)} tokens), has come and gone. Its full blocks '
            "are cached and may be evicted; its last, partial block has no hash and is blank again.",
        )
        self._state()

    def _hash(self, chain: TokenChain) -> None:
        self._say(
            "Hash",
            f'The request: "{" ".join(SECOND)}" ({len(SECOND)} tokens). Each full block\'s digest covers its '
            "tokens and the digest before it, so an equal digest means an equal prefix.",
        )
        for i in range(chain.num_full_blocks):
            words = " ".join(SECOND[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE])
            self.console.print(f"  {chain.digest(i).hex()[:12]}  {words}")

    def _look_up(self, chain: TokenChain) -> None:
        hit = self.manager.begin(REQUEST, chain)
        blocks = hit.num_tokens // BLOCK_SIZE
        self._say(
            "Look up, stop at the first miss",
            f"{blocks} blocks match, {hit.num_tokens} tokens need no "
            f"computing; the next does not ({hit.reason.value}). "
            "Looking changes nothing.",
        )
        self._state()

    def _allocate(self, chain: TokenChain) -> None:
        rest = len(chain) - self.manager.peek(chain)
        self.manager.reserve(REQUEST, rest)
        self._say(
            "Allocate",
            "First the hits are touched (they leave the queue, nobody can evict them now), then blank "
            f"blocks are taken from the front for the other {rest} tokens.",
        )
        self._state()

    def _decode(self, chain: TokenChain) -> None:
        for token in self._ids(ANSWER):
            chain.append(token)
            self.manager.reserve(REQUEST, 1)
            self._commit(REQUEST, len(chain))
        self._say(
            "Decode",
            f'"{" ".join(ANSWER)}": each token takes a slot; a new block only every {BLOCK_SIZE} tokens. '
            "Generated blocks are indexed like prompt blocks.",
        )
        self._state()

    def _longer(self, chain: TokenChain) -> TokenChain:
        longer = chain.fork()
        longer.extend(self._ids(["is", "old"]))
        return longer

    def _commit(self, seq: int, num_computed: int) -> None:
        self.now += 1.0
        self.manager.commit(seq, num_computed, self.now)

    def _ids(self, words: list[str]) -> list[int]:
        return [self.words.setdefault(word, len(self.words)) for word in words]

    def _say(self, title: str, text: str) -> None:
        self.console.print(f"\n[bold]{title}.[/] {text}")

    def _state(self) -> None:
        snapshot = self.manager.snapshot()
        books, tables = snapshot["groups"][0], snapshot["tables"]
        refs = "  ".join(f"{block}:{books['ref'].get(block, 0)}" for block in range(1, NUM_BLOCKS))
        self.console.print(f"  table       {tables[REQUEST][0] if REQUEST in tables else '-'}")
        self.console.print(f"  references  {refs}")
        self.console.print(
            f"  free queue  {books['free_queue'] or '-'}   cached {sorted(books['keys']) or '-'}"
        )
