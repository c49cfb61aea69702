"""Checked access to the values of a config.json. An unread key is an error."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that a checkpoint may have."""
HINT = "use the config.json the checkpoint was published with."
HARMLESS = frozenset(
    {
        "_name_or_path", "architectures", "auto_map", "transformers_version", "model_type",
        "bos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id",
        "initializer_range", "use_cache", "attention_dropout", "hidden_dropout", "resid_pdrop",
        "embd_pdrop", "pretraining_tp", "output_attentions", "output_hidden_states", "return_dict",
        "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder", "add_cross_attention",
        "id2label", "label2id", "problem_type", "tokenizer_class", "task_specific_params",
        "torchscript", "use_bfloat16", "_attn_implementation", "attn_implementation",
        "router_aux_loss_coef", "output_router_logits", "language_model_only",
        "is_llama_config", "transformers.js_config", "generation_config",
        # Defaults of generation, which older exports wrote here.
        "do_sample", "temperature", "top_k", "top_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
        "max_length", "min_length", "max_new_tokens", "min_new_tokens", "num_beams",
        "num_beam_groups", "diversity_penalty", "early_stopping", "length_penalty",
        "repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty", "num_return_sequences", "bad_words_ids",
        "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id",
        "remove_invalid_values", "output_scores", "return_dict_in_generate", "cache_implementation",
        # Of training and of its tools.
        "gradient_checkpointing", "neftune_noise_alpha", "model_max_length", "num_logits_to_keep",
        "model_name", "base_model_name_or_path", "finetuning_task", "prefix", "pruned_heads",
        "tie_encoder_decoder", "cross_attention_hidden_size", "tf_legacy_loss",
    }
)  # fmt: skip
"""Keys that do not affect the computation, or that are read elsewhere. Default sampling values are
read from generation_config.json only."""
HARMLESS_PREFIXES = ("_", "unsloth_")
"""Prefixes of keys that do not affect the computation either."""


class Fields:
    """An object of a config.json. Every method raises ValueError that names the key and its value.

    first: the key of a nested object whose keys take precedence, as in `dflash_config`.
    """

    def __init__(self, values: dict[str, Any], path: Path, *, first: str | None = None):
        self.path = path
        self._values = values
        self._first_key = first
        self._seen = {first} if first else set[str]()
        self._first: dict[str, Any] = {}
        self._first = self.object(first) if first else {}

    def __contains__(self, key: str) -> bool:
        return key in self._first or key in self._values

    def is_nested(self, key: str) -> bool:
        """Whether the key is in the nested object whose keys take precedence."""
        return key in self._first

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value. `default` replaces a missing or null one."""
        self._seen.add(key)
        value = self._first.get(key)
        value = self._values.get(key) if value is None else value
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise ValueError(
                f"{self.path}: {key} is {value!r}, but must be a whole number of at least {low}; "
                f"{HINT}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number."""
        return positive(self.get(key, default), key, self.path)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} is {value!r}, but must be true or false; {HINT}")
        return value

    def inner(self, key: str, ignored: Collection[str], first: Collection[str] = ()) -> Fields:
        """Return the nested config at `key`, with values from this one: of the keys in `ignored` if
        it lacks them, and of the keys in `first` if this one has them. Other keys that both have
        must have the same value. Raises ValueError."""
        inner_values = dict(self.object(key))
        for name in self._values.keys() & inner_values.keys() - {*ignored, *first, *HARMLESS}:
            if self.get(name) is not None and self.get(name) != inner_values[name]:
                raise ValueError(
                    f"{self.path}: {name} is {self.get(name)!r}, but {inner_values[name]!r} in "
                    f"{key}; {HINT}"
                )
        for name in (*ignored, *first):
            value = self.get(name)
            if value is not None and (name in first or inner_values.get(name) is None):
                inner_values[name] = value
        return Fields(inner_values, self.path)

    def object(self, key: str) -> dict[str, Any]:
        """Return the object at `key`; empty if missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{self.path}: {key} is {value!r}, but must be an object; {HINT}")
        return value or {}

    def ids(self, key: str) -> list[int] | None:
        """Return a list of non-negative integers; None if the key is missing."""
        value = self.get(key)
        if value is not None and (not isinstance(value, list) or not all(map(_index, value))):
            raise ValueError(
                f"{self.path}: {key} is {value!r}, but must list whole numbers from 0 on; {HINT}"
            )
        return value

    def only(self, key: str, *values: object, why: str) -> None:
        """Raises ValueError unless the key is missing, null or has one of the values."""
        if (value := self.get(key)) is not None and value not in values:
            raise ValueError(f"{self.path}: {key} is {value!r}, which is not supported; {why}")

    def agree(self, keys: Collection[str] | None = None) -> None:
        """Raises ValueError for a key whose value in the nested object contradicts this one's.
        keys: the only ones to compare; None for all."""
        for key in self._first if keys is None else keys:
            inner = self._first.get(key)
            outer = self._values.get(key)
            if None not in (inner, outer) and inner != outer:
                raise ValueError(
                    f"{self.path}: {key} is {outer!r}, but {inner!r} in {self._first_key}; {HINT}"
                )

    def finish(self, harmless: Collection[str] = ()) -> None:
        """Raises ValueError for a key that was not read and is not harmless: ignoring it could
        change the model's output."""
        for key in [*self._first, *self._values]:
            is_known = key in self._seen or key in HARMLESS or key in harmless
            if not is_known and not key.startswith(HARMLESS_PREFIXES):
                value = self._first.get(key, self._values.get(key))
                if value is not False and value not in (None, [], {}):
                    raise ValueError(
                        f"{self.path}: {key} is {value!r}, which is not known; computing the model "
                        "without it might be wrong, so use a checkpoint without it, or take the "
                        "key out where it means nothing."
                    )


def _index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def positive(value: object, key: str, path: Path) -> float:
    """Return a number above 0. Raises ValueError."""
    is_bool = isinstance(value, bool)
    if is_bool or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{path}: {key} is {value!r}, but must be a positive number; {HINT}")
    return float(value)
