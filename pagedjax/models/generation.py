"""What a model's files say about generating: ends of text, and sampling settings for requests that give none.

transformers keeps both in generation_config.json, llama.cpp in general.sampling.* of a GGUF file. A setting that we
lack is refused by name unless it has the value that says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pagedjax.models.config import ModelConfig, ModelError
from pagedjax.models.config_keys import GENERATION, Reader, refuse_key

WHERE = "generation_config.json"

# Field of SamplingParams → (key, its range as text, whether a value is in it). Those in _SAMPLED need do_sample.
_NUMBERS: dict[str, tuple[str, str, Any]] = {
    "temperature": ("temperature", "0 or above", lambda v: v >= 0),
    "top_p": ("top_p", "in (0, 1]", lambda v: 0 < v <= 1),
    "min_p": ("min_p", "in [0, 1]", lambda v: 0 <= v <= 1),
    "repetition_penalty": ("repetition_penalty", "above 0", lambda v: v > 0),
}
_WHOLES: dict[str, tuple[str, int]] = {
    "top_k": ("top_k", 0),
    "max_tokens": ("max_new_tokens", 1),
    "min_tokens": ("min_new_tokens", 0),
}
_SAMPLED = ("temperature", "top_k", "top_p", "min_p")
_READ = (
    *(key for key, _, _ in _NUMBERS.values()),
    *(key for key, _ in _WHOLES.values()),
    "do_sample",
    "eos_token_id",
    "bos_token_id",
    "stop_strings",
)
# Only what a call returns, how it is computed, or what belongs to beams and assistants that nobody asks for.
_NO_EFFECT = (
    "_from_model_config",
    "_commit_hash",
    "transformers_version",
    "trust_remote_code",
    "pad_token_id",
    "use_cache",
    "cache_implementation",
    "cache_config",
    "max_cache_len",
    "max_length",  # prompt and answer together; here max_tokens counts the answer
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "num_return_sequences",
    "length_penalty",  # of beams, which a request asks for
    "early_stopping",
    "compile_config",
    "disable_compile",
    "low_memory",
    "prefill_chunk_size",
    "continuous_batching_config",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "prompt_lookup_num_tokens",
    "max_matching_ngram_size",
    "remove_invalid_values",  # weights that give none are refused
    "renormalize_logits",
)
# Key → the value that says nothing.
_NEUTRAL: dict[str, Any] = {
    **{key: GENERATION[key] for key in ("num_beams", "num_beam_groups", "diversity_penalty", "typical_p")},
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "token_healing": False,
    "use_mtp": False,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": {},
}


def read_generation(
    values: Mapping[str, Any], config: ModelConfig
) -> tuple[dict[str, Any], tuple[int, ...] | None]:
    """Sampling settings and ends of a generation_config.json.

    Args:
        values: Its content.
        config: Of the model, for the vocabulary.

    Returns:
        Fields of `SamplingParams` that the file sets, and the ends it names (None: it names none).

    Raises:
        ModelError: A key is unknown, not supported, or out of its range.
    """
    for key, value in values.items():
        if value is None or key in _READ or key in _NO_EFFECT:
            continue
        if key not in _NEUTRAL:
            refuse_key(WHERE, key, value, _READ)
        if value != _NEUTRAL[key]:
            raise ModelError(
                f"{WHERE}: {key}={value!r}: not supported; remove it to generate without, it was {_NEUTRAL[key]!r} then"
            )
    r = Reader(values, WHERE)
    ends = r.ids("eos_token_id", config.vocab_size) if values.get("eos_token_id") is not None else None
    r.ids("bos_token_id", config.vocab_size)
    return _sampling(r), ends


def _sampling(r: Reader) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field, (key, rule, fits) in _NUMBERS.items():
        if r.get(key) is not None:
            out[field] = r.number(key)
            if not fits(out[field]):
                r.fail(key, f"must be {rule}")
    for field, (key, least) in _WHOLES.items():
        if r.get(key) is not None:
            out[field] = r.whole(key)
            if not least <= out[field] < 2**31:
                r.fail(key, f"must be a whole number from {least}")
    if r.flag("do_sample", False):
        out.setdefault("temperature", 1.0)
    else:  # greedy: transformers leaves the rest aside then
        out = {field: value for field, value in out.items() if field not in _SAMPLED}
    stops = r.get("stop_strings")
    if stops is not None:
        texts = (stops,) if isinstance(stops, str) else tuple(stops) if isinstance(stops, list) else (None,)
        if not all(isinstance(text, str) and text for text in texts):
            r.fail("stop_strings", "must be texts that are not empty")
        out["stop"] = texts
    return out


def gguf_sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of a GGUF file's general.sampling.*, as fields of `SamplingParams`.

    Raises:
        ModelError: One is not supported, or out of its range.
    """
    prefix = "general.sampling."
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    values: dict[str, Any] = {}
    for key, value in metadata.items():
        if not key.startswith(prefix):
            continue
        name = key.removeprefix(prefix)
        if name not in names:
            refuse_key("GGUF metadata", key, value, [prefix + known for known in names])
        # f32 of a decimal number: 0.8 is stored as 0.800000012
        values[names[name]] = (
            float(f"{value:.7g}") if isinstance(value, float) and math.isfinite(value) else value
        )
    if not values:
        return {}
    return _sampling(Reader({"do_sample": True, **values}, "GGUF metadata: general.sampling"))
