"""The host plan: slots, work items, tiles, and what it refuses."""

import sys

import jax
import numpy as np
import pytest

from pagedjax.kernels import plan_ragged

BUCKETS = dict(num_tokens_bucket=32, num_seqs_bucket=8, decode_bucket=4)


def test_slots_follow_tables():
    tables = np.array([[7, 3, 5], [2, 9, 4]], np.int32)
    ragged = plan_ragged([1, 4], [9, 6], tables, block_size=4, **BUCKETS)
    # Row 0 writes position 8: block 5, offset 0. Row 1 writes 2..5: block 2 offsets 2, 3; block 9 offsets 0, 1.
    assert ragged.slot_mapping[:5].tolist() == [20, 10, 11, 36, 37]
    assert (ragged.slot_mapping[5:] == -1).all()
    assert ragged.query_start_loc.tolist() == [0, 1, 5, 5, 5, 5, 5, 5, 5]
    assert ragged.seq_lens.tolist() == [9, 6, 0, 0, 0, 0, 0, 0]
    assert (ragged.num_seqs, ragged.num_decodes) == (2, 1)


def naive_items(lens, window, chunk):
    items = []
    for row, n in enumerate(lens):
        first = 0 if window is None else max(0, n - window)
        items += [(row, s) for s in range(0, n, chunk) if s + chunk > first]
    return items


@pytest.mark.parametrize("window", [None, 1, 7, 64])
def test_decode_items_are_the_naive_ones(window):
    rng = np.random.default_rng(0)
    for _ in range(50):
        n = int(rng.integers(1, 9))
        lens = rng.integers(0, 65, n)
        tables = np.zeros((n, 16), np.int32)
        ragged = plan_ragged(
            np.ones(n, int), lens, tables, block_size=4, num_tokens_bucket=8, num_seqs_bucket=8,
            decode_bucket=8, windows=(window,), chunk_tokens=8,
        )  # fmt: skip
        work = ragged.decode_list(window)
        got = list(zip(work.row[: work.num_items].tolist(), work.start[: work.num_items].tolist()))
        assert got == naive_items(lens.tolist(), window, 8)
        assert len(work.row) == 8 * 8


def test_tiles_cover_every_token_of_long_rows_once():
    rng = np.random.default_rng(0)
    for _ in range(50):
        qlens = [1] * int(rng.integers(0, 4)) + rng.integers(2, 12, int(rng.integers(1, 4))).tolist()
        tables = np.zeros((len(qlens), 8), np.int32)
        ragged = plan_ragged(
            qlens, [q + 3 for q in qlens], tables, block_size=4, num_tokens_bucket=64, num_seqs_bucket=8,
            decode_bucket=4, tile_queries=5,
        )  # fmt: skip
        covered = []
        for row, start in zip(ragged.tile_row[: ragged.num_tiles], ragged.tile_start[: ragged.num_tiles]):
            covered += range(start, min(start + 5, ragged.query_start_loc[row + 1]))
        assert covered == list(range(qlens.count(1), sum(qlens)))


def test_shapes_depend_on_buckets_alone():
    a = plan_ragged([1, 5], [9, 6], np.zeros((2, 6), np.int32), block_size=4, **BUCKETS)
    b = plan_ragged([], [], np.zeros((0, 6), np.int32), block_size=4, **BUCKETS)
    c = plan_ragged([31], [31], np.zeros((1, 8), np.int32), block_size=4, **BUCKETS)
    shapes = [(jax.tree.structure(r), [x.shape for x in jax.tree.leaves(r)]) for r in (a, b, c)]
    assert shapes[0] == shapes[1]
    assert shapes[0] != shapes[2]  # a wider table is another program


def test_parts_without_room_are_left_out():
    decode = plan_ragged(
        [1],
        [9],
        np.zeros((1, 6), np.int32),
        block_size=4,
        num_tokens_bucket=4,
        num_seqs_bucket=4,
        decode_bucket=4,
    )
    assert decode.tile_queries == 0 and len(decode.tile_row) == 0
    prefill = plan_ragged(
        [4],
        [9],
        np.zeros((1, 6), np.int32),
        block_size=4,
        num_tokens_bucket=4,
        num_seqs_bucket=4,
        decode_bucket=0,
    )
    assert len(prefill.decode_list(None).row) == 0 and prefill.tile_queries == 4


@pytest.mark.parametrize(
    "qlens, lens, width, change, message",
    [
        ([3, 1], [3, 1], 4, {}, "rows of one token must come first"),
        ([0], [3], 4, {}, "must be at least 1; leave rows without tokens out"),
        ([1], [17], 4, {}, r"seq_lens=\[17\]: must be between 0 and 4 blocks \* 4"),
        ([1], [1], 4, {"block_size": 24}, "block_size=24"),
        ([1] * 5, [1] * 5, 4, {}, "decode_bucket=4: must be at least the 5 rows"),
        ([2] * 9, [2] * 9, 4, {}, "num_seqs_bucket=8: must hold 9 rows"),
        ([40], [40], 10, {}, "num_tokens_bucket=32: must hold 40 tokens"),
        ([2], [2], 4, {"num_tokens_bucket": 4}, "leaves no room for rows of several"),
        ([1, 1], [1], 4, {}, r"seq_lens.shape=\(1,\)"),
    ],
)
def test_refusals(qlens, lens, width, change, message):
    tables = np.zeros((len(qlens), width), np.int32)
    with pytest.raises(ValueError, match=message):
        plan_ragged(qlens, lens, tables, **{"block_size": 4, **BUCKETS, **change})


@pytest.mark.parametrize("query_len", [1, 3])
def test_planning_makes_as_many_calls_for_many_rows_as_for_few(query_len):
    """The host's share of a step is numpy over all rows at once: no call for each row, block or item."""

    def calls(rows: int, num_blocks: int) -> int:
        lens, tables = np.full(rows, 16 * num_blocks, np.int32), np.ones((rows, 64), np.int32)
        seen = []
        sys.setprofile(lambda frame, event, arg: seen.append(event))
        try:
            plan_ragged(
                np.full(rows, query_len, np.int32), lens, tables, block_size=16, num_tokens_bucket=8192,
                num_seqs_bucket=1024, decode_bucket=1024,
            )  # fmt: skip
        finally:
            sys.setprofile(None)
        return sum(event in ("call", "c_call") for event in seen)

    assert 0 < calls(1000, 64) < 2 * calls(32, 8)
