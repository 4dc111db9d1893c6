"""What can never run is refused at the door: limits of a step that contradict each other, requests beyond them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from pagedjax.cache import Hints, KVCacheManager
from pagedjax.cache.hashing import ExtraKeys, TokenChain
from pagedjax.config import Config, SchedulerConfig
from pagedjax.engine.beam import check_width
from pagedjax.engine.request import MAX_END_IDS, SamplingParams, check_token_ids


def expected_output(sampling: SamplingParams, num_output_tokens: int = 0) -> Hints:
    """What is known of a request's length, for managers that reserve ahead."""
    left = sampling.max_tokens - num_output_tokens
    known = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
    return Hints(max_tokens=left, expected_tokens=left if known else None)


def chunk_tokens(config: SchedulerConfig) -> int:
    """Most tokens of one sequence in a step. Without chunked prefill a prompt is one chunk, as long as a step."""
    return (config.chunk_tokens or config.token_budget) if config.chunked_prefill else config.token_budget


class Overlap(NamedTuple):
    """What `runtime.overlap` came to, and why."""

    on: bool
    why: str


def choose_overlap(config: Config, device: str) -> Overlap:
    """Whether steps are planned while one runs.

    Args:
        config: All settings.
        device: "cpu", "gpu" or "tpu", where steps are computed.

    Raises:
        ValueError: It is asked for, and another setting rules it out.
    """
    asked = config.runtime.overlap
    if asked == "off":
        return Overlap(False, "off, as runtime.overlap says")
    if config.cache.reservation:
        if asked == "on":
            raise ValueError(
                f"runtime.overlap=on: a reservation (cache.reservation={config.cache.reservation}) may move while a "
                "step writes into it; set overlap to auto or off"
            )
        return Overlap(False, "off: a reservation may move while a step writes into it")
    if config.runtime.deterministic:  # with "on" refused by the settings themselves
        return Overlap(False, "off: a deterministic step is several calls")
    if asked == "on":
        return Overlap(True, "on, as runtime.overlap says")
    if device == "cpu":
        return Overlap(False, "off: steps are computed on the cores that plan them")
    return Overlap(True, f"on: the {device.upper()} computes while the host plans")


def check_num_steps(config: Config) -> None:
    """Refuse several steps a dispatch where room ahead is not a number of blocks.

    Raises:
        ValueError: Names both settings.
    """
    if config.runtime.num_steps > 1 and config.cache.reservation:
        raise ValueError(
            f"runtime.num_steps={config.runtime.num_steps}: a reservation (cache.reservation="
            f"{config.cache.reservation}) grows by moving, and there is no telling whether it can; set num_steps to 1"
        )


def check_limits(
    config: SchedulerConfig, manager: KVCacheManager, max_model_len: int, block_bytes: tuple[int, ...]
) -> None:
    """Refuse limits that contradict each other; warn of blocks that never fill.

    Raises:
        ValueError: Names both, or says that preemption asks for a host that is not there.
    """
    if config.token_budget < config.max_num_seqs:
        raise ValueError(
            f"token_budget={config.token_budget}: must be at least max_num_seqs={config.max_num_seqs}, or "
            "decoding sequences would stall; raise the budget or lower max_num_seqs"
        )
    if config.chunk_tokens > config.token_budget:
        raise ValueError(
            f"chunk_tokens={config.chunk_tokens}: must not exceed token_budget={config.token_budget}; "
            "lower the chunk or raise the budget"
        )
    if max_model_len < 1:
        raise ValueError(f"max_model_len={max_model_len}: must be at least 1")
    if config.preemption != "recompute" and not manager.host_blocks:
        raise ValueError(
            f"scheduler.preemption={config.preemption}: needs host blocks to swap to; set cache.host_blocks or "
            "preemption=recompute"
        )
    if config.preemption == "auto" and not block_bytes:
        raise ValueError(
            "scheduler.preemption=auto: this runner's blocks have no bytes to weigh; try swap or recompute"
        )
    if manager.block_size > max_model_len:
        warnings.warn(
            f"block_size={manager.block_size} exceeds max_model_len={max_model_len}: no block ever fills, so "
            "nothing is cached; lower cache.block_size",
            stacklevel=4,
        )


def check_request(
    config: SchedulerConfig,
    manager: KVCacheManager,
    max_model_len: int,
    num_prompt_tokens: int,
    sampling: SamplingParams,
) -> None:
    """Refuse a request that can never run, before it takes a place in the queue.

    A prompt that fits is accepted even where prompt + max_tokens would not: it then ends with
    `FinishReason.CAPACITY` (pool) or `LENGTH` (model) at the last token there is room for. Under a reservation
    rule all that the rule reserves has to fit an empty pool.

    Args:
        num_prompt_tokens: Of the prompt.
        sampling: How it is to be continued.

    Raises:
        ValueError: Names what is needed and what there is.
    """
    if num_prompt_tokens < 1:
        raise ValueError("prompt: holds no token; give at least one")
    if num_prompt_tokens >= max_model_len:
        raise ValueError(
            f"prompt of {num_prompt_tokens} tokens: must be shorter than max_model_len={max_model_len}, "
            "to leave room for one new token; shorten it or raise model.max_model_len"
        )
    step_tokens = chunk_tokens(config) if config.chunked_prefill else num_prompt_tokens
    needed, usable = manager.demand(num_prompt_tokens, step_tokens, expected_output(sampling))
    if needed > usable:
        raise ValueError(
            f"prompt of {num_prompt_tokens} tokens: needs {needed} blocks, the pool has "
            f"{usable} usable; shorten it or raise cache.num_blocks"
        )
    n = sampling.num_sequences
    if n > config.max_num_seqs:
        raise ValueError(
            f"n={n}: must not exceed max_num_seqs={config.max_num_seqs}, the samples of a request "
            "(or beam_width, best_of) run together; lower it or raise scheduler.max_num_seqs"
        )
    if not config.chunked_prefill and num_prompt_tokens > config.token_budget:
        raise ValueError(
            f"prompt of {num_prompt_tokens} tokens: must fit token_budget={config.token_budget} where "
            "chunked_prefill is off; turn it on or raise the budget"
        )


def check_input(
    prompt_token_ids: Sequence[int] | np.ndarray,
    sampling: SamplingParams,
    vocab_size: int | None,
    *,
    has_text: bool,
) -> None:
    """Raise where a request is no request: wrong types, ids beyond the vocabulary, stop strings without text."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling={sampling!r}: must be SamplingParams; try SamplingParams(max_tokens=16)")
    check_token_ids(prompt_token_ids, vocab_size)
    for token in sampling.logit_bias:
        if token >= (vocab_size or token + 1):
            raise ValueError(f"logit_bias[{token}]: must be in [0, {vocab_size}), the model's vocabulary")
    if sampling.stop and not has_text:
        raise ValueError("stop: needs a tokenizer to find strings; give stop_token_ids instead")


def check_chain(chain: TokenChain, num_tokens: int, block_size: int, *, hash: str, extra: ExtraKeys) -> None:
    """Raise where a chain that came with a prompt is not the one that the engine would make of it."""
    given = (len(chain), chain.block_size, chain.scheme.name, chain.extra)
    for name, ours, wanted in zip(
        ("tokens", "block_size", "hash", "extra"), given, (num_tokens, block_size, hash, extra)
    ):
        if ours != wanted:
            raise ValueError(f"chain of {name}={ours}: must be {wanted}, as the engine hashes; leave it out")


def check_ends(sampling: SamplingParams, ends: Collection[int]) -> None:
    """Raise where more tokens end a sample than a step can watch for."""
    if len(ends) > MAX_END_IDS:
        raise ValueError(f"{len(ends)} tokens end a sample: at most {MAX_END_IDS} may; leave some out")
    if sampling.beam_width:
        check_width(sampling.beam_width, len(ends))
