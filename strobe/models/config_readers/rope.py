"""Rope as config.json spells it: plain, linear, Llama 3.1's, by yarn or of a share of the pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from strobe.models.rope import RopeConfig

KINDS = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of rope that are computed, under transformers' names."""

_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "proportional": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor"}),
    "yarn": frozenset(
        {"factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim",
         "truncate"}
    ),
}  # fmt: skip
_SHARED = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
)
_MULTIMODAL = frozenset({"mrope_section", "mrope_interleaved"})
"""What a drafter trained beside a multimodal target carries along; its own rope is plain."""


def read_rope(
    parameters: dict[str, Any],
    theta: float,
    max_position: int,
    path: Path,
    *,
    drafter: bool = False,
) -> RopeConfig:
    """The rope of `rope_parameters` or `rope_scaling`. max_position: the original context where
    they name none. Raises ValueError naming what is not supported or makes no sense."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(
            f"{path}: rope type {kind!r} is not supported; use a checkpoint with one of "
            f"{', '.join(KINDS)}."
        )
    known_keys = _SHARED | _KEYS[kind] | (_MULTIMODAL if drafter else frozenset())
    unknown = sorted(key for key in set(parameters) - known_keys if parameters[key] is not None)
    if unknown:
        raise ValueError(
            f"{path}: {unknown[0]!r} of a rope of type {kind!r} is not supported; use a checkpoint "
            "without it."
        )
    if kind == "default":
        return RopeConfig(theta)

    def value(key: str, default: float | None = None) -> float:
        setting: Any = parameters.get(key)
        setting = default if setting is None else setting
        real = isinstance(setting, int | float) and not isinstance(setting, bool)
        if not real or not 0 < setting < math.inf:
            raise ValueError(
                f"{path}: {key} of a rope of type {kind!r} is {setting!r}, but must be a positive "
                "number; use the config.json the checkpoint was published with."
            )
        return float(setting)

    if kind == "proportional":
        share = value("partial_rotary_factor", 1.0)
        if share > 1:
            raise ValueError(
                f"{path}: partial_rotary_factor is {share:g}, but must be at most 1; use the "
                "config.json the checkpoint was published with."
            )
        return RopeConfig(theta, kind, value("factor", 1.0), share=share)
    factor = value("factor")
    original = int(value("original_max_position_embeddings", max_position))
    if kind == "linear":
        return RopeConfig(theta, kind, factor, original)
    if kind == "llama3":
        low, high = value("low_freq_factor"), value("high_freq_factor")
        if low >= high:
            raise ValueError(
                f"{path}: low_freq_factor is {low:g}, but must be below high_freq_factor {high:g}; "
                "use the config.json the checkpoint was published with."
            )
        return RopeConfig(theta, kind, factor, original, low=low, high=high)
    truncate = parameters.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(
            f"{path}: truncate is {truncate!r}, but must be true or false; use the config.json the "
            "checkpoint was published with."
        )
    if parameters.get("attention_factor") is not None:
        scale = value("attention_factor")
    elif parameters.get("mscale") and parameters.get("mscale_all_dim"):
        scale = _mscale(factor, value("mscale")) / _mscale(factor, value("mscale_all_dim"))
    else:
        scale = _mscale(factor, 1.0)
    return RopeConfig(
        theta,
        kind,
        factor,
        original,
        beta_fast=value("beta_fast", 32.0),
        beta_slow=value("beta_slow", 1.0),
        truncate=truncate,
        scale=scale,
    )


def _mscale(factor: float, weight: float) -> float:
    """Yarn's attention temperature, equation 22."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """What config.json says of it, beside `rope_theta`; None for plain rope."""
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "proportional":
        return scaling | {"partial_rotary_factor": rope.share}
    scaling["original_max_position_embeddings"] = rope.original
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling |= {"truncate": rope.truncate, "attention_factor": rope.scale}
    return scaling
