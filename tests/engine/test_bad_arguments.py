"""Arguments of the wrong kind or out of range: a ValueError at the door, and the engine goes on."""

import math

import numpy as np
import pytest

from pagedjax.cache import ExtraKeys, PagedManager, TokenChain
from pagedjax.engine.request import SamplingParams


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_tokens", [0, "3", 1.5, None, True, math.nan, 2**31]),
        ("n", [0, "a", 1.5, None]),
        ("top_k", [-1, 1.5, "a", 10**12]),
        ("seed", [-1, 1.5, "a", 2**32, True]),
        ("best_of", [0, 1.5, "a"]),
        ("beam_width", [-1, 1.5, True]),
        ("min_tokens", [-1, 1.5, None]),
        ("logprobs", [-1, 1.5, "a"]),
        ("prompt_logprobs", [-1, 1.5, "a"]),
        ("temperature", [math.nan, math.inf, 1e300, -1, "x", None]),
        ("top_p", [0, math.nan, "a"]),
        ("min_p", [-1, math.nan, None]),
        ("repetition_penalty", [0, math.nan, "a"]),
        ("presence_penalty", [math.nan, "a"]),
        ("length_penalty", [math.inf, None]),
        ("ignore_eos", ["no", 2, None]),
        ("early_stopping", ["x", None]),
        ("stop", ["", ["a", ""], [1], 3, [None]]),
        ("stop_token_ids", [[-1], ["a"], 5, [1.5], [2**31], range(1000)]),
        ("logit_bias", [{-1: 2}, {"a": 1}, {1: math.nan}, [1, 2], {1: "x"}, {1.5: 1}]),
    ],
)
def test_sampling_parameters_name_what_is_wrong(name, values):
    for value in values:
        with pytest.raises(ValueError, match=name):
            SamplingParams(**{name: value})


def test_sampling_parameters_take_what_others_write():
    """numpy's numbers, lists, and None for "none of them"."""
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        stop=None,
        stop_token_ids=[np.int32(2)],
        logit_bias=None,
    )
    assert (params.stop, params.stop_token_ids, params.logit_bias) == ((), (2,), {})
    assert SamplingParams(stop="x").stop == SamplingParams(stop=(c for c in "x")).stop == ("x",)


@pytest.mark.parametrize(
    "prompt",
    [
        [],
        "abc",
        ["a"],
        [1.5],
        [math.nan],
        [True],
        [[1, 2], [3, 4]],
        [[1], [2, 3]],
        [-1],
        [2**40],
        None,
        {1, 2},
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused_and_the_engine_goes_on(make_engine, run_all, greedy, judge, prompt):
    engine = make_engine()
    first = engine.add([1, 2, 3], greedy(4))
    with pytest.raises(ValueError, match="prompt"):
        engine.add(prompt, greedy(4))
    assert list(run_all(engine)[first].outputs[0].token_ids) == judge([1, 2, 3], 4)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"sampling": None}, "must be SamplingParams"),
        ({"sampling": {"n": 1}}, "must be SamplingParams"),
        ({"extra": "tenant"}, "must be ExtraKeys"),
        ({"priority": "high"}, "priority='high'"),
    ],
)
def test_bad_options_of_add_leave_nothing_queued(make_engine, options, part):
    engine = make_engine()
    with pytest.raises(ValueError, match=part):
        engine.add([1, 2, 3], **options)
    assert not engine.has_work and not engine._requests and not engine._outputs._streams


@pytest.mark.parametrize("salt", [3, "", b"x", "\ud800"], ids=ascii)
def test_extra_keys_are_text(salt):
    with pytest.raises(ValueError):
        ExtraKeys(salt=salt)


def test_a_fork_must_go_on_from_its_parent():
    """Else blocks would be found under digests of tokens that they do not hold."""
    manager = PagedManager(num_blocks=8, block_size=4)
    manager.begin(0, TokenChain(range(6), block_size=4))
    manager.reserve(0, 6)
    manager.commit(0, 6, 0.0)
    for tokens, salt in (([0, 1, 2, 3, 9, 5, 6], None), (range(6), "other")):
        with pytest.raises(ValueError, match="fork the parent's chain"):
            manager.fork(0, 1, TokenChain(tokens, block_size=4, extra=ExtraKeys(salt=salt)))
    manager.fork(0, 1, TokenChain(range(9), block_size=4))
    manager.check_invariants()


def test_a_chain_that_comes_along_is_the_prompts_or_refused(make_engine, run_all, greedy):
    prompt, other = list(range(20)), ExtraKeys(salt="s")
    given, made = make_engine(), make_engine()
    size = made.manager.block_size
    given.add(
        prompt, greedy(4), extra=other, chain=TokenChain(np.array(prompt), block_size=size, extra=other)
    )
    made.add(prompt, greedy(4), extra=other)
    assert [o.outputs[0].token_ids for o in run_all(given).values()] == [
        o.outputs[0].token_ids for o in run_all(made).values()
    ]
    for chain, message in (
        (TokenChain(prompt[1:], block_size=size), "chain of tokens=19: must be 20"),
        (TokenChain(prompt, block_size=2 * size), f"chain of block_size={2 * size}: must be {size}"),
        (TokenChain(prompt, block_size=size, hash="xxh3_128"), "chain of hash=xxh3_128: must be sha256"),
        (TokenChain(prompt, block_size=size, extra=other), "chain of extra="),
    ):
        with pytest.raises(ValueError, match=message):
            given.add(prompt, greedy(4), chain=chain)
    assert not given.has_work
