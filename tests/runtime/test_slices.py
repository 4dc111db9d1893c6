"""Slices of a step beside their rule, token by token, and scores put together again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pagedjax.cache import CopyPlan
from pagedjax.engine import Row, StepPlan, TokenScores
from pagedjax.runtime.slices import cut, join_scores


def _plan(rng: np.random.Generator, size: int) -> StepPlan[Any]:
    """Rows of one token and longer ones, some in the middle of a prompt, some with more samples than a slice draws."""
    rows = []
    for number in range(rng.integers(1, 9)):
        tokens = int(rng.choice([1, 1, 2, size - 1, size, size + 1, 3 * size + 2]))
        samples = int(rng.choice([0, 1, 1, 2, size + 1, 2 * size + 3]))
        own = tuple(SimpleNamespace(name=f"{number}.{i}") for i in range(samples))
        rows.append(Row(SimpleNamespace(name=number), int(rng.integers(0, 40)), max(1, tokens), own))
    tables = tuple(rng.integers(1, 99, (len(rows), width)).astype(np.int32) for width in (5, 3))
    return StepPlan(7, tuple(rows), tables, CopyPlan())


@pytest.mark.parametrize("size", [2, 5, 32])
def test_every_token_is_fed_once_in_order_and_every_sample_drawn_from_its_rows_last(size: int) -> None:
    for seed in range(40):
        plan = _plan(np.random.default_rng(seed), size)
        slices = cut(plan, size)
        fed: dict[int, list[int]] = {}
        drawn = []
        for at, one in enumerate(slices):
            assert 0 < one.plan.num_tokens <= size and one.plan.num_samples <= size
            last = at == len(slices) - 1
            assert last or one.plan.num_tokens == size or one.plan.num_samples == size  # as full as can be
            assert one.plan.step == plan.step and not one.plan.copies.batches
            for piece, number in enumerate(one.rows):
                row, own = one.plan.rows[piece], plan.rows[number]
                assert row.seq is own.seq
                for whole, part in zip(plan.tables, one.plan.tables, strict=True):
                    assert np.array_equal(part[piece], whole[number])
                positions = list(range(row.start, row.start + row.num_tokens))
                if row.samples:
                    assert positions[-1] == own.start + own.num_tokens - 1
                drawn += list(row.samples)
                known = fed.setdefault(number, [])
                known += [p for p in positions if not known or p > known[-1]]
                assert positions[0] >= known[-1] or set(positions) <= set(known)
        assert drawn == [sample for row in plan.rows for sample in row.samples]
        for number, row in enumerate(plan.rows):
            assert fed[number] == list(range(row.start, row.start + row.num_tokens))


def test_scores_of_pieces_are_those_of_their_rows_in_order() -> None:
    for seed in range(40):
        plan = _plan(np.random.default_rng(seed), 5)
        scored = {n for n in range(len(plan.rows)) if n % 2 == seed % 2}
        parts, expected = [], {}
        for one in cut(plan, 5):
            scores = {}
            for piece, number in enumerate(one.rows):
                if number not in scored:
                    continue
                row = one.plan.rows[piece]
                told = np.arange(row.start, row.start + row.num_tokens)
                scores[piece] = TokenScores(told / 8, told, told[:, None] + [0, 1], told[:, None] / 4)
                expected.setdefault(number, []).extend(told.tolist())
            parts.append((one, scores))
        found = join_scores(parts)
        assert found.keys() == expected.keys()
        for number, told in expected.items():
            assert found[number].ranks.tolist() == told
            assert found[number].logprobs.tolist() == [t / 8 for t in told]
            assert found[number].top_ids.tolist() == [[t, t + 1] for t in told]
            assert found[number].top_logprobs.tolist() == [[t / 4] for t in told]
