"""Random histories over every kind of manager, each step judged by the naive model (`World` in conftest)."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagedjax.cache import INDEXES, POLICIES, KVGroup
from pagedjax.cache.policies import Belady

GROUPS = {
    "one": None,
    "window": (KVGroup(window=5),),
    "two": (KVGroup(), KVGroup(num_blocks=10, window=6)),
    "three": (KVGroup(window=3), KVGroup(), KVGroup(window=8)),
}
AXES = {
    "index": [*INDEXES, "verified"],
    "policy": sorted(POLICIES),
    "dedup": [False, True],
    "partial": [0, 1],
    "groups": list(GROUPS),
    "host_blocks": [0, 4],
    "block_size": [1, 2, 4],
}


def _options(row):
    options = dict(row, groups=GROUPS[row["groups"]])
    if row["policy"] == "belady":
        options["policy"] = lambda n: Belady(n, {})
    if row["index"] == "verified":
        options |= dict(index="hash", verify_tokens=True)
    if row["index"] == "table":
        options |= dict(host_blocks=0, partial=0)
    return options


def _sample(count, seed):
    """Rows that hold every pair of axis values, as far as `count` random ones plus a greedy cover do."""
    rng = random.Random(seed)
    uncovered = {
        (a, x, b, y)
        for a, b in itertools.combinations(AXES, 2)
        for x, y in itertools.product(AXES[a], AXES[b])
    }

    def pairs(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(AXES, 2)}

    rows = []
    while uncovered and len(rows) < count:
        tries = [{axis: rng.choice(values) for axis, values in AXES.items()} for _ in range(60)]
        best = max(tries, key=lambda row: len(pairs(row) & uncovered))
        uncovered -= pairs(best)
        rows.append(best)
    return rows


def _name(row):
    return "-".join(str(value) for value in row.values())


ROWS = _sample(80, seed=6)


@pytest.mark.parametrize("row", ROWS, ids=_name)
def test_random_history(world, row):
    rng = random.Random(_name(row))
    w = world(**_options(row))
    for _ in range(150):
        w.act(rng.randrange)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(row=st.sampled_from(ROWS), tape=st.lists(st.integers(0, 2**16), min_size=20, max_size=400))
def test_history_of_any_shape(world, row, tape):
    """The tape decides every choice, so a failure shrinks to a short history."""
    numbers = iter(tape)
    w = world(**_options(row))
    try:
        while True:
            w.act(lambda n: next(numbers) % n)
    except StopIteration:
        pass


@pytest.mark.full
def test_long_run(world):
    """200,000 operations over all rows: `make test-full`, some five minutes."""
    done = 0
    for seed in itertools.count():
        for row in ROWS:
            rng = random.Random(f"{seed} {_name(row)}")
            w = world(**_options(row))
            for _ in range(300):
                w.act(rng.randrange)
            done += 300
            if done >= 200_000:
                return
