"""Typed look-ups in a model's own settings, and the list of what may stand there.

A model file says what its model computes. A key that nobody here reads may be one that changes the answers, so each
family lists the keys that it reads, `NO_EFFECT` those that change nothing here and why, `ONLY` those that may have
one value, and everything else is refused by its name. A null says nothing and is let through.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from pagedjax.models.config import ACTIVATIONS, ModelError

_TRAINING = "training only"
_OUTPUT = "what a transformers call returns, not what it computes"
_CLASSIFY = "heads of classifiers; a decoder has none"
_GENERATION = "generation settings: generation_config.json is their place"
_NAMES = "names of files, classes and versions"
_IDS = "ids that a decoder never reads by itself"

# Keys of config.json that change nothing here, and why.
NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        (
            "_name_or_path",
            "name_or_path",
            "_commit_hash",
            "transformers_version",
            "architectures",  # model_type decides, as it does in transformers' AutoModelForCausalLM
            "auto_map",  # code of the repository is never run
            "tokenizer_class",
            "torch_dtype",  # model.dtype decides, files are read whatever they hold
            "dtype",
            "use_bfloat16",
            "is_llama_config",
            "transformers.js_config",
            "unsloth_version",
            "unsloth_fixed",
        ),
        _NAMES,
    ),
    **dict.fromkeys(
        (
            "attention_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "dropout",
            "hidden_dropout",
            "hidden_dropout_prob",
            "attention_probs_dropout_prob",
            "activation_dropout",
            "layerdrop",
            "initializer_range",
            "init_std",
            "pretraining_tp",  # splits a product into sums: the same but for rounding
            "gradient_checkpointing",
        ),
        _TRAINING,
    ),
    **dict.fromkeys(
        (
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "return_dict",
            "return_dict_in_generate",
            "use_cache",
            "cache_implementation",
            "torchscript",
            "tf_legacy_loss",
            "chunk_size_feed_forward",  # computes the MLP in pieces: the same numbers
            "attn_implementation",
            "_attn_implementation",
            "_attn_implementation_autoset",
            "_flash_attn_2_enabled",
        ),
        _OUTPUT,
    ),
    **dict.fromkeys(
        (
            "problem_type",
            "id2label",
            "label2id",
            "num_labels",
            "_num_labels",
            "finetuning_task",
            "task_specific_params",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
            "classifier_dropout",
        ),
        _CLASSIFY,
    ),
    **dict.fromkeys(
        ("pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id", "prefix"), _IDS
    ),
    "max_sequence_length": "of training; max_position_embeddings is the model's",
    "quantization": "as quantization_config, in MLX's files",
    "quantization_config": "looked at when weights do not fit the model; a left-over one does no harm",
}
# Generation settings that older versions wrote into config.json, and the value that says nothing.
# transformers 5 drops them there too.
GENERATION: dict[str, Any] = {
    "max_length": 20,
    "min_length": 0,
    "do_sample": False,
    "early_stopping": False,
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "num_return_sequences": 1,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
# Keys that may have one value: another would mean what stands beside it.
ONLY: dict[str, tuple[Any, str]] = {
    "is_encoder_decoder": (False, "an encoder in front"),
    "is_decoder": (False, "cross attention"),
    "add_cross_attention": (False, "cross attention"),
    "cross_attention_hidden_size": (None, "cross attention"),
    "tie_encoder_decoder": (False, "an encoder in front"),
    "decoder_start_token_id": (None, "an encoder in front"),
    "pruned_heads": ({}, "heads that are left out"),
    "reorder_and_upcast_attn": (False, "another order of products"),
    "scale_attn_by_inverse_layer_idx": (False, "scores divided by the layer's number"),
    "use_mrope": (False, "rotation by several positions"),
    "rope_interleaved": (False, "rotary pairs side by side"),
    "use_bidirectional_attention": (False, "queries that see the future"),
}


def check_keys(
    values: Mapping[str, Any], known: Collection[str], where: str, *, no_effect: Collection[str] = NO_EFFECT
) -> None:
    """Refuse what stands in a file and that nobody reads.

    Args:
        values: The file's content.
        known: Keys that are read.
        where: The file's name, for the message.
        no_effect: Keys that change nothing.

    Raises:
        ModelError: Naming the first key that is unknown, or has a value that we lack.
    """
    for key, value in values.items():
        if value is None or key in known or key in no_effect:
            continue
        if key in ONLY:
            only, meaning = ONLY[key]
            if value == only and type(value) is type(only):
                continue
            raise ModelError(f"{where}: {key}={value!r}: must be {only!r}; {meaning} is not supported")
        refuse_key(where, key, value, known)


def refuse_key(where: str, key: str, value: Any, known: Collection[str]) -> NoReturn:
    """Raise ModelError for a key that nobody reads, with the nearest one that somebody does."""
    near = difflib.get_close_matches(key, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else "remove it if it changes nothing"
    shown = repr(value)
    shown = shown if len(shown) < 60 else f"{shown[:56]}..."
    raise ModelError(f"{where}: {key}={shown}: not known here, and it might change the answers; {remedy}")


class Reader:
    """Typed look-ups in an outside mapping; a wrong type is an error that names the key.

    A key that is missing takes the default; a null is a value of its own, and only `optional_*` take it.

    Args:
        values: The mapping.
        where: Its file, for messages.
        prefix: In front of every key (GGUF: the architecture).
        notes: Takes what `prefer` has to say.
    """

    def __init__(
        self, values: Mapping[str, Any], where: str, prefix: str = "", notes: list[str] | None = None
    ) -> None:
        self.values, self.where, self.prefix = values, where, prefix
        self.notes = [] if notes is None else notes

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, or the default where there is none."""
        return self.values.get(self.prefix + key, default)

    def prefer(self, first: str, a: Any, second: str, b: Any) -> Any:
        """The first of two places that say the same thing, as transformers has it; a conflict becomes a note."""
        if a is not None and b is not None and a != b:
            self.notes.append(
                f"{self.where}: {first}={a!r} and {second}={b!r}: the first counts, as in transformers"
            )
        return b if a is None else a

    def fail(self, key: str, rule: str) -> NoReturn:
        """Raise ModelError about a key's value."""
        raise ModelError(f"{self.where}: {self.prefix}{key}={self.get(key)!r}: {rule}; check the file")

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(key, "must be a whole number")
        return value

    def optional_whole(self, key: str, default: int | None = None) -> int | None:
        """A whole number, or None where the file says null (or the default is None)."""
        return None if self.get(key, default) is None else self.whole(key, default)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, "must be a number")
        try:
            number = float(value)
        except OverflowError:  # a whole number of hundreds of digits
            number = math.inf
        if not math.isfinite(number):
            self.fail(key, "must be a finite number")
        return number

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            self.fail(key, "must be above 0")
        return value

    def optional_positive(self, key: str, default: float | None = None) -> float | None:
        """A finite number above 0, or None where the file says null (or the default is None)."""
        return None if self.get(key, default) is None else self.positive(key, default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null is false, as it is where transformers asks `if value`."""
        value = self.get(key, default)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.fail(key, "must be true or false")
        return value

    def table(self, key: str) -> Mapping[str, Any]:
        """An object; {} where it is missing or null."""
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.fail(key, "must be a table")
        return value or {}

    def activation(self, key: str, default: str) -> str:
        """An activation by its name in transformers, as one of ours."""
        name = self.get(key, default)
        if not isinstance(name, str) or name not in ACTIVATIONS:
            self.fail(key, f"must be one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def ids(self, key: str, vocab_size: int, default: int | None = None) -> tuple[int, ...]:
        """One token id or a list of them, each in the vocabulary; () where there is none.

        A default that lies outside a small vocabulary is none.
        """
        value = self.get(key, default if default is not None and default < vocab_size else None)
        ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size for i in ids):
            self.fail(key, f"must be token ids below {vocab_size}")
        return tuple(dict.fromkeys(ids))
