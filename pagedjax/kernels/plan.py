"""The kernel plan: one step's ragged batch and its work list, built once on the host in numpy.

Raggedness, windows and splitting of long rows are decided here, so that the kernels stay short: they
walk flat lists of equal items and never meet an idle step. Nothing here touches a device array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagedjax.cache.rules import check_block_size
from pagedjax.kernels.cascade import MAX_LEVELS, MIN_GROUP_ROWS, PrefixGroup, find_groups
from pagedjax.kernels.layout import DecodeList, RaggedBatch
from pagedjax.kernels.tuning import PACKAGED, Tuning

# Where nobody says; an engine takes them from the tuning table.
CHUNK_TOKENS = 256
TILE_QUERIES = 128
_INT32 = 2**31


def plan_ragged(
    query_lens: np.ndarray | Sequence[int],
    seq_lens: np.ndarray | Sequence[int],
    block_tables: np.ndarray,
    *,
    block_size: int,
    num_tokens_bucket: int,
    num_seqs_bucket: int,
    decode_bucket: int,
    windows: Sequence[int | None] = (None,),
    chunk_tokens: int = CHUNK_TOKENS,
    tile_queries: int = TILE_QUERIES,
    max_groups: int = 0,
    min_group_rows: int = MIN_GROUP_ROWS,
    max_group_levels: int = MAX_LEVELS,
    groups: Sequence[PrefixGroup] | None = None,
    apart: bool = False,
    tuning: Tuning = PACKAGED,
) -> RaggedBatch:
    """Plans one step.

    Args:
        query_lens: i32[n], tokens of each row this step, at least 1. Rows of one token come first.
        seq_lens: i32[n], KV length of each row including this step's tokens; 0 attends nothing.
        block_tables: i32[n or S, M]; what stands behind a row's last block is never read.
        block_size: B, tokens per block.
        num_tokens_bucket: T of the compiled program.
        num_seqs_bucket: S of the compiled program.
        decode_bucket: Sd, most rows of one token; 0 compiles no decode part. Where it equals T no
            tile part is compiled.
        windows: Attention windows of the model's layers; None (all keys) is always planned.
        chunk_tokens: Keys per decode item, a power of two.
        tile_queries: Most tokens per prefill tile, at least 1; short buckets get shorter tiles.
        max_groups: Wg, most shared-prefix groups of decode rows that are worked at once; 0 compiles no
            such part. Layers with a window never use it.
        min_group_rows: Rows from which a group pays.
        max_group_levels: How deep groups may lie within one another, at least 1.
        groups: Groups of the decode rows that were found already, at most `max_groups`; None: found here.
        apart: No row's result may depend on the other rows, to the last bit; for rows of one token, without groups.
        tuning: The user's own sizes of kernels' pieces, which go with the plan into every layer.

    Returns:
        Fresh arrays that hold no reference to the arguments.

    Raises:
        ValueError: The rows do not fit the buckets, are out of order, a table is too narrow, a row writes to a block
            id that no pool has, or a size is out of its range.
    """
    check_block_size(block_size)
    _check_sizes(windows, chunk_tokens, tile_queries, max_groups, min_group_rows, max_group_levels)
    qlens = _int32("query_lens", query_lens)
    lens = _int32("seq_lens", seq_lens)
    tables = np.asarray(block_tables)
    n, num_tokens = len(qlens), int(qlens.sum())
    num_decodes = int(np.count_nonzero(qlens == 1))
    T, S, Sd, M = num_tokens_bucket, num_seqs_bucket, decode_bucket, tables.shape[1]
    _check_rows(qlens, lens, tables, num_decodes, block_size)
    _check_buckets(n, num_tokens, num_decodes, T, S, Sd)

    full_tables = np.zeros((S, M), np.int32)
    full_tables[:n] = tables[:n]
    full_lens = np.zeros(S, np.int32)
    full_lens[:n] = lens
    starts = np.full(S + 1, num_tokens, np.int32)
    starts[0] = 0
    np.cumsum(qlens, out=starts[1 : n + 1])

    if num_tokens == n:
        rows, pos = np.arange(n, dtype=np.int32), lens - 1
    else:
        rows = np.repeat(np.arange(n, dtype=np.int32), qlens)
        pos = np.arange(num_tokens, dtype=np.int32) + (lens - qlens - starts[:n])[rows]
    slots = np.full(T, -1, np.int32)
    block = full_tables[rows, pos // block_size]
    written = pos >= 0
    # As one comparison: a negative id is a large unsigned one. An id whose slot leaves int32 would wrap to another's.
    if (written & (block.view(np.uint32) >= _INT32 // block_size)).any():
        bad = block[written & (block.view(np.uint32) >= _INT32 // block_size)][0]
        raise ValueError(
            f"block_tables: a row writes to block id {bad}: must be between 0 and {_INT32 // block_size - 1}, "
            "whose slots fit int32"
        )
    slots[:num_tokens] = np.where(written, block * block_size + pos % block_size, -1)

    if groups is None:
        decodes = full_tables[:num_decodes], lens[:num_decodes]
        groups = (
            find_groups(
                *decodes, block_size, chunk_tokens, max_groups, min_group_rows, max_levels=max_group_levels
            )
            if max_groups
            else []
        )
    if len(groups) > max_groups:
        raise ValueError(f"groups: {len(groups)} given, must be at most max_groups={max_groups}")
    if apart and (Sd != T or max_groups):
        raise ValueError(
            f"apart: decode_bucket={Sd}, max_groups={max_groups}: must be num_tokens_bucket={T} and 0, as tiles and "
            "groups work several queries at once"
        )
    chunks_per_row = -(-M * block_size // chunk_tokens)
    lists = tuple(
        _decode_list(
            lens[:num_decodes],
            w,
            chunk_tokens,
            Sd,
            Sd * chunks_per_row,
            max_groups,
            groups if w is None else [],
            apart,
        )
        for w in dict.fromkeys((None, *windows))
    )
    tile_queries = 0 if Sd == T else min(tile_queries, T)
    tile_row, tile_start, num_tiles = _tiles(qlens, starts, num_decodes, T, S, tile_queries)
    return RaggedBatch(
        slot_mapping=slots,
        block_tables=full_tables,
        seq_lens=full_lens,
        query_start_loc=starts,
        num_seqs=np.array(n, np.int32),
        num_decodes=np.array(num_decodes, np.int32),
        decode_lists=lists,
        tile_row=tile_row,
        tile_start=tile_start,
        num_tiles=num_tiles,
        decode_bucket=Sd,
        chunk_tokens=chunk_tokens,
        tile_queries=tile_queries,
        block_size=block_size,
        apart=apart,
        tuning=tuning,
    )


def _decode_list(
    lens: np.ndarray,
    window: int | None,
    chunk_tokens: int,
    Sd: int,
    size: int,
    max_groups: int,
    groups: Sequence[PrefixGroup],
    apart: bool,
) -> DecodeList:
    """Chunks of every row, row by row, less those behind the window and those that a group works.

    Apart: chunk by chunk, an item for every row of the bucket, so that neighbouring items are never one row's. Those
    that have no key of their row left, or none in its window, see nothing.
    """
    n = len(lens)
    skip = np.zeros(Sd, np.int32)
    group_rows = np.full((max_groups if window is None else 0, Sd), Sd, np.int32)
    group_first, group_chunks = np.zeros((2, len(group_rows)), np.int32)
    if window is not None:
        skip[:n] = np.maximum(lens - window, 0) // chunk_tokens
    # The larger before the smaller within it, which begins where that one ends.
    for index, group in enumerate(sorted(groups, key=lambda group: group.num_chunks)):
        before = skip[group.rows]
        if (before != before[0]).any() or group.num_chunks <= before[0]:
            raise ValueError(
                f"groups: rows {group.rows.tolist()} have {before.tolist()} chunks worked by other groups, and share "
                f"{group.num_chunks}: groups must be disjoint, or one within the other and deeper"
            )
        group_rows[index, : len(group.rows)] = group.rows
        group_first[index], group_chunks[index] = before[0], group.num_chunks
        skip[group.rows] = group.num_chunks
    first = skip[:n]
    counts = -(-lens // chunk_tokens) - first
    total = int(counts.sum())
    row = np.zeros(size, np.int32)
    start = np.zeros(size, np.int32)
    if apart:
        most = int((first + counts).max(initial=0))
        total = most * Sd
        row[:total] = np.tile(np.arange(Sd, dtype=np.int32), most)
        start[:total] = np.repeat(np.arange(most, dtype=np.int32) * chunk_tokens, Sd)
    elif total == n and counts.all():
        row[:total] = np.arange(total)
        start[:total] = first * chunk_tokens
    else:
        row[:total] = np.repeat(np.arange(n, dtype=np.int32), counts)
        begins = np.cumsum(counts) - counts - first
        start[:total] = (np.arange(total) - np.repeat(begins, counts)) * chunk_tokens
    num_items, num_groups = np.array(total, np.int32), np.array(len(groups), np.int32)
    return DecodeList(row, start, num_items, skip, group_rows, group_first, group_chunks, num_groups, window)


def _tiles(
    qlens: np.ndarray, starts: np.ndarray, num_decodes: int, T: int, S: int, tile: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of several tokens cut into tiles, in token order."""
    size = T // tile + min(S, T // 2) if tile else 0
    row = np.zeros(size, np.int32)
    start = np.zeros(size, np.int32)
    total = 0
    if len(qlens) > num_decodes:
        counts = -(-qlens[num_decodes:] // tile)
        total = int(counts.sum())
        local = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        row[:total] = local + num_decodes
        within = np.arange(total, dtype=np.int32) - (np.cumsum(counts) - counts)[local]
        start[:total] = starts[row[:total]] + within * tile
    return row, start, np.array(total, np.int32)


def _check_rows(
    qlens: np.ndarray, lens: np.ndarray, tables: np.ndarray, num_decodes: int, block_size: int
) -> None:
    n = len(qlens)
    if qlens.shape != lens.shape or qlens.ndim != 1:
        raise ValueError(f"seq_lens.shape={lens.shape}: must equal query_lens.shape={qlens.shape}, i32[n]")
    if tables.ndim != 2 or tables.shape[0] < n or tables.dtype.kind not in "iu":
        raise ValueError(
            f"block_tables={tables.dtype}{list(tables.shape)}: must be integers [at least {n} rows, M]"
        )
    if n == 0:
        return
    if int(qlens.min()) < 1:
        raise ValueError(f"query_lens={qlens.tolist()}: must be at least 1; leave rows without tokens out")
    if num_decodes < n and (qlens[:num_decodes] != 1).any():
        raise ValueError(f"query_lens={qlens.tolist()}: rows of one token must come first; sort the rows")
    if ((lens < qlens) & (lens != 0)).any():
        raise ValueError(
            f"seq_lens={lens.tolist()}: must count this step's tokens, query_lens={qlens.tolist()}; 0 attends nothing"
        )
    if int(lens.min()) < 0 or int(lens.max()) > tables.shape[1] * block_size:
        raise ValueError(
            f"seq_lens={lens.tolist()}: must be between 0 and {tables.shape[1]} blocks * {block_size} "
            "tokens; widen block_tables"
        )


def _check_sizes(
    windows: Sequence[int | None],
    chunk_tokens: int,
    tile_queries: int,
    max_groups: int,
    min_group_rows: int,
    max_group_levels: int,
) -> None:
    if chunk_tokens < 1 or chunk_tokens & (chunk_tokens - 1):
        raise ValueError(f"chunk_tokens={chunk_tokens}: must be a power of two; try {CHUNK_TOKENS}")
    if tile_queries < 1:
        raise ValueError(f"tile_queries={tile_queries}: must be at least 1; try {TILE_QUERIES}")
    if max_groups < 0 or min_group_rows < 2:
        raise ValueError(
            f"max_groups={max_groups}, min_group_rows={min_group_rows}: must be at least 0 and 2"
        )
    if max_group_levels < 1:
        raise ValueError(f"max_group_levels={max_group_levels}: must be at least 1")
    for window in windows:
        if window is not None and window < 1:
            raise ValueError(f"windows={tuple(windows)}: must be at least 1 (the query's own key) or None")


def _int32(name: str, values: np.ndarray | Sequence[int]) -> np.ndarray:
    """A fresh i32 array; what is no integer, or would wrap, is refused."""
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iu":
        raise ValueError(f"{name}: must be integers, got {given.dtype}")
    if given.size and given.dtype.itemsize > 4 and int(np.abs(given).max()) >= _INT32:
        raise ValueError(f"{name}: must fit int32, got {given.tolist()}")
    return given.astype(np.int32)


def _check_buckets(n: int, num_tokens: int, num_decodes: int, T: int, S: int, Sd: int) -> None:
    if n > S:
        raise ValueError(f"num_seqs_bucket={S}: must hold {n} rows")
    if num_tokens > T:
        raise ValueError(f"num_tokens_bucket={T}: must hold {num_tokens} tokens")
    if not num_decodes <= Sd <= min(S, T):
        raise ValueError(
            f"decode_bucket={Sd}: must be at least the {num_decodes} rows of one token and at most "
            f"num_seqs_bucket={S} and num_tokens_bucket={T}"
        )
    if Sd == T and num_tokens > num_decodes:
        raise ValueError(
            f"decode_bucket={Sd}: equals num_tokens_bucket, which leaves no room for rows of several "
            "tokens; raise num_tokens_bucket"
        )
