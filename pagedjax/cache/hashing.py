"""Block identity: chained hashes over canonical bytes, with typed extra keys.

Block i of a sequence is named by

    digest(i) = H( digest(i-1) ‖ n_tokens u32le ‖ tokens i32le ‖ extra fields )

with a documented root in place of digest(-1), so every process and machine agrees. docs/hashing.md is the
full specification, with vectors from which it can be re-implemented.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

ROOT_LABEL = b"pagedjax block hash 1:"
CBOR_SEED = "vllm-none-hash"
# Tags of the extra fields, in the order they are written. New fields get new tags at the end.
_ADAPTER, _ADAPTER_PATH, _ITEM, _SALT, _WEIGHTS = range(1, 6)


@dataclass(frozen=True)
class MediaItem:
    """A multimodal input whose placeholder tokens stand in the sequence.

    Attributes:
        digest: Names its content.
        start: Position of its first placeholder token.
        length: Number of placeholder tokens.
    """

    digest: bytes
    start: int
    length: int

    def __post_init__(self) -> None:
        if not self.digest:
            raise ValueError("item digest=b'': must name the content; hash the item's bytes")
        if self.start < 0 or self.length < 1:
            raise ValueError(
                f"item start={self.start}, length={self.length}: must be at least 0 and 1; "
                "give the positions of its placeholder tokens"
            )


@dataclass(frozen=True)
class ExtraKeys:
    """What decides a block's KV beside its tokens; sequences share blocks only under equal keys.

    Attributes:
        adapter: Adapter (LoRA) id; in every block.
        salt: Cache salt: separates tenants; in the first block only, the chain carries it on.
        items: Multimodal items; in the blocks they overlap.
        adapter_path: Where the adapter was loaded from; with an adapter only, in every block.
        weight_version: Version of the base weights; in the first block only.

    Raises:
        ValueError: No string, an empty one (leave the field out instead), or a path without an adapter.

    Example:
        >>> ExtraKeys(salt="tenant-1") == ExtraKeys(adapter="tenant-1")
        False
    """

    adapter: str | None = None
    salt: str | None = None
    items: tuple[MediaItem, ...] = ()
    adapter_path: str | None = None
    weight_version: str | None = None

    def __post_init__(self) -> None:
        for name in ("adapter", "salt", "adapter_path", "weight_version"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name}={value!r}: must be a string, or None to have none")
            if value == "":
                raise ValueError(f"{name}='': must not be empty; leave it out (None) to have none")
            _text(0, value)  # what has no UTF-8 has no bytes to hash
        if self.adapter_path is not None and self.adapter is None:
            raise ValueError(f"adapter_path={self.adapter_path!r}: needs an adapter; give adapter as well")
        object.__setattr__(self, "items", tuple(sorted(self.items, key=lambda item: item.start)))

    @property
    def constant(self) -> bytes:
        """Fields that every block carries, encoded."""
        return _text(_ADAPTER, self.adapter) + _text(_ADAPTER_PATH, self.adapter_path)

    def in_block(self, index: int, block_size: int) -> bytes:
        """The encoded extra fields of one block; b"" where it has none."""
        out = self.constant
        for item in self.overlapping(index, block_size):
            payload = struct.pack("<q", item.start - index * block_size) + item.digest
            out += struct.pack("<BI", _ITEM, len(payload)) + payload
        if index == 0:
            out += _text(_SALT, self.salt) + _text(_WEIGHTS, self.weight_version)
        return out

    def overlapping(self, index: int, block_size: int) -> list[MediaItem]:
        """Items with a token in the block, in order of their start."""
        lo, hi = index * block_size, (index + 1) * block_size
        return [item for item in self.items if item.start < hi and item.start + item.length > lo]

    @property
    def namespace(self) -> bytes:
        """Encoded fields that separate whole sequences; b"" for the common namespace."""
        return self.constant + _text(_SALT, self.salt) + _text(_WEIGHTS, self.weight_version)


def _text(tag: int, value: str | None) -> bytes:
    if value is None:
        return b""
    payload = value.encode()
    return struct.pack("<BI", tag, len(payload)) + payload


NO_EXTRA = ExtraKeys()


class HashScheme(Protocol):
    """A way to name blocks. Implementations are immutable and shared by chains.

    A scheme may say `collision_proof = True`: equal digests then mean equal prefixes.

    Attributes:
        name: As in `TokenChain(hash=...)`.
        root: Stands for the parent of a first block.
    """

    @property
    def name(self) -> str: ...

    @property
    def root(self) -> bytes: ...

    def extend(
        self, parent: bytes, first: int, packed: bytes, block_size: int, extra: ExtraKeys
    ) -> list[bytes]:
        """Digests of consecutive full blocks.

        Args:
            parent: Digest of block `first - 1`, or the root.
            first: Index of the first block to hash.
            packed: Its tokens and those of the blocks after it, i32le.
            block_size: Tokens per block.
            extra: The sequence's extra keys.
        """
        ...


@dataclass(frozen=True)
class CanonicalHash:
    """`function` over the canonical bytes.

    Attributes:
        name: "sha256", "xxh3_128", or a name of one's own.
        function: Bytes to digest; anything deterministic.
        seed: Changing it changes every digest.
    """

    name: str
    function: Callable[[bytes], bytes]
    seed: str = ""
    root: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", self.function(ROOT_LABEL + self.seed.encode()))

    @property
    def collision_proof(self) -> bool:
        """Nobody finds two prefixes of one digest: true of SHA-256."""
        return self.function is _sha256

    def extend(
        self, parent: bytes, first: int, packed: bytes, block_size: int, extra: ExtraKeys
    ) -> list[bytes]:
        size = 4 * block_size
        if self.function is _sha256 and extra is NO_EXTRA:
            return _extend_sha256(parent, packed, block_size)
        function = self.function
        head = struct.pack("<I", block_size)
        digests = []
        for index in range(first, first + len(packed) // size):
            at = (index - first) * size
            parent = function(parent + head + packed[at : at + size] + extra.in_block(index, block_size))
            digests.append(parent)
        return digests


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _extend_sha256(parent: bytes, packed: bytes, block_size: int) -> list[bytes]:
    """The common case, without extra fields: this loop is most of the host's work on a cold prompt."""
    sha256 = hashlib.sha256
    stride = 4 * block_size + 4
    tokens = np.frombuffer(packed, dtype="<i4").reshape(-1, block_size)
    # The token count is written in front of each block's tokens, so that a block is one slice.
    framed = np.empty((len(tokens), block_size + 1), dtype="<i4")
    framed[:, 0] = block_size
    framed[:, 1:] = tokens
    data = framed.tobytes()
    return [parent := sha256(parent + data[at : at + stride]).digest() for at in range(0, len(data), stride)]


@dataclass(frozen=True)
class CborHash:
    """Byte-compatible with vLLM's `sha256_cbor`: sha256 of canonical CBOR [parent, [tokens], extra].

    `extra` is null or a list of ["lora", name, path], ["mm", digest in hex, offset in the block],
    ["weights", version] and, in the first block, ["cache_salt", salt]. The root is the sha256 of the
    CBOR of the seed text.

    Raises:
        ModuleNotFoundError: cbor2 is not installed; the message names the extra that brings it.
    """

    seed: str = CBOR_SEED
    name: str = "sha256_cbor"
    collision_proof: bool = True
    root: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", _sha256(_cbor2().dumps(self.seed, canonical=True)))

    def extend(
        self, parent: bytes, first: int, packed: bytes, block_size: int, extra: ExtraKeys
    ) -> list[bytes]:
        dumps, sha256 = _cbor2().dumps, hashlib.sha256
        tokens = np.frombuffer(packed, dtype="<i4").tolist()
        digests = []
        for at in range(0, len(tokens), block_size):
            keys = _cbor_extra(extra, first + at // block_size, block_size)
            parent = sha256(dumps([parent, tokens[at : at + block_size], keys], canonical=True)).digest()
            digests.append(parent)
        return digests


def _cbor_extra(extra: ExtraKeys, index: int, block_size: int) -> list[list[str | int]] | None:
    if extra is NO_EXTRA:
        return None
    keys: list[list[str | int]] = []
    if extra.adapter is not None:
        keys.append(["lora", extra.adapter, extra.adapter_path or ""])
    for item in extra.overlapping(index, block_size):
        keys.append(["mm", item.digest.hex(), item.start - index * block_size])
    if index == 0:
        if extra.weight_version is not None:
            keys.append(["weights", extra.weight_version])
        if extra.salt is not None:
            keys.append(["cache_salt", extra.salt])
    return keys or None


def _cbor2():  # type: ignore[no-untyped-def]
    try:
        import cbor2
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "hash=sha256_cbor: needs cbor2, which is not installed; pip install 'pagedjax[hash]'"
        ) from None
    return cbor2


def _xxh3_128(data: bytes) -> bytes:
    import xxhash

    return xxhash.xxh3_128_digest(data)


def _make_xxh3() -> CanonicalHash:
    try:
        return CanonicalHash("xxh3_128", _xxh3_128)
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "hash=xxh3_128: needs xxhash, which is not installed; pip install 'pagedjax[hash]'"
        ) from None


_SHA256 = CanonicalHash("sha256", _sha256)

HASHES: dict[str, Callable[[], HashScheme]] = {
    "sha256": lambda: _SHA256,
    "sha256_cbor": CborHash,
    "xxh3_128": _make_xxh3,
}


def hash_scheme(hash: str | HashScheme) -> HashScheme:
    """The scheme of a name; a scheme is given back as it is.

    Raises:
        ValueError: Unknown name.
        ModuleNotFoundError: The scheme's library is not installed.
    """
    if not isinstance(hash, str):
        return hash
    if hash not in HASHES:
        raise ValueError(f"hash={hash}: must be one of {', '.join(HASHES)}; try sha256")
    return HASHES[hash]()


def group_key(digest: bytes, group: int) -> bytes:
    """Name of a block's content in one KV group, as outside indexers see it: digest ‖ group u32be."""
    return digest + group.to_bytes(4, "big")


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as i32le bytes.

    Raises:
        ValueError: A token does not fit 32 signed bits, or is no integer.
    """
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)
    except struct.error as error:
        raise ValueError(
            f"tokens: must be integers of 32 signed bits ({error}); check the tokenizer"
        ) from None


def _numbers(tokens: np.ndarray) -> list[int]:
    """An array as Python's numbers; where equal ones follow each other, as in traces that name blocks, one object."""
    starts = np.flatnonzero(tokens[1:] != tokens[:-1]) + 1
    if 8 * len(starts) > len(tokens) - 8:
        return list(tokens.tolist())
    edges = [0, *starts.tolist(), len(tokens)]
    out: list[int] = []
    for first, last in pairwise(edges):
        out += [int(tokens[first])] * (last - first)
    return out


class TokenChain:
    """Append-only tokens with the digests of their full blocks, each computed once, when first asked for.

    Args:
        tokens: Token ids of 32 signed bits; an array of i32 is hashed soonest and must not be changed.
        block_size: Tokens per block.
        hash: Name of a scheme or a `HashScheme`.
        extra: What else decides the KV.

    Example:
        >>> chain = TokenChain(range(6), block_size=4)
        >>> chain.num_full_blocks, len(chain.digest(0))
        (1, 32)
    """

    __slots__ = ("_array", "_digests", "_packed", "_proof", "block_size", "extra", "scheme", "tokens")

    def __init__(
        self,
        tokens: Iterable[int],
        *,
        block_size: int,
        hash: str | HashScheme = "sha256",
        extra: ExtraKeys = NO_EXTRA,
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size={block_size}: must be at least 1; try 16")
        if not isinstance(extra, ExtraKeys):
            raise ValueError(f"extra={extra!r}: must be ExtraKeys; try ExtraKeys(salt=...)")
        self._array: np.ndarray | None = None  # the first tokens, until they are hashed
        if isinstance(tokens, np.ndarray):
            self.tokens: list[int] = _numbers(tokens)
            if tokens.dtype == np.int32:
                self._array = tokens
        else:
            self.tokens = list(tokens)
        self.block_size = block_size
        self.scheme = hash_scheme(hash)
        # One object for "none", so that the hashes can tell the common case by identity.
        self.extra = NO_EXTRA if extra is NO_EXTRA or extra == NO_EXTRA else extra
        self._digests: list[bytes] = []
        self._packed = bytearray()
        self._proof: TokenChain | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        self.tokens.append(token)

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens.extend(tokens)

    @property
    def num_full_blocks(self) -> int:
        return len(self.tokens) // self.block_size

    def digests(self, num_blocks: int) -> list[bytes]:
        """Digests of at least the first `num_blocks` full blocks; the live list, not to be changed.

        Raises:
            ValueError: Fewer full blocks than asked for, or tokens that are no 32-bit integers.
        """
        known = len(self._digests)
        if known < num_blocks:
            full = self.num_full_blocks
            if num_blocks > full:
                raise ValueError(
                    f"block {num_blocks - 1}: the chain has {full} full blocks; append tokens first"
                )
            packed = self._pack(known * self.block_size, full * self.block_size)
            size = self.block_size
            parent = self._digests[-1] if known else self.scheme.root
            self._digests += self.scheme.extend(parent, known, packed, size, self.extra)
            self._packed += packed
        return self._digests

    def _pack(self, first: int, end: int) -> bytes:
        array, self._array = self._array, None
        if array is not None and first == 0 and end <= len(array):
            return array[:end].astype("<i4", copy=False).tobytes()
        whole = first == 0 and end == len(self.tokens)
        return pack_tokens(self.tokens if whole else self.tokens[first:end])

    def digest(self, index: int) -> bytes:
        """Name of full block `index`.

        Raises:
            ValueError: The block is not full yet, or the index is negative.
        """
        if index < 0:
            raise ValueError(f"block {index}: must not be negative; blocks count from 0")
        return self.digests(index + 1)[index]

    def proof(self, num_blocks: int) -> list[bytes]:
        """As `digests`, by a collision-proof scheme: the chain's own where it is one, else SHA-256."""
        if getattr(self.scheme, "collision_proof", False):
            return self.digests(num_blocks)
        if self._proof is None:
            self._proof = TokenChain((), block_size=self.block_size, extra=self.extra)
            self._proof.tokens = self.tokens  # the same list: it grows with this chain
        return self._proof.digests(num_blocks)

    def packed(self, num_blocks: int) -> bytearray:
        """Tokens of at least the first `num_blocks` full blocks as i32le bytes; live, not to be changed."""
        self.digests(num_blocks)
        return self._packed

    @classmethod
    def hashed(cls, tokens: np.ndarray, digests: Sequence[bytes], *, block_size: int) -> TokenChain:
        """A chain whose digests somebody has computed before; they are believed.

        Args:
            tokens: i32[n].
            digests: Of its first full blocks, by SHA-256 and without extra keys.
            block_size: Tokens per block.
        """
        chain = cls(tokens, block_size=block_size)
        if digests:
            chain._packed += chain._pack(0, len(digests) * block_size)
            chain._digests += digests
        return chain

    def fork(self) -> TokenChain:
        """An independent chain with the same tokens so far."""
        other = TokenChain.__new__(TokenChain)
        other.tokens = self.tokens.copy()
        other._array = self._array
        other.block_size = self.block_size
        other.scheme = self.scheme
        other.extra = self.extra
        other._digests = self._digests.copy()
        other._packed = self._packed.copy()
        other._proof = None
        return other
