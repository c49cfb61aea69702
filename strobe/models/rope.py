"""Rotary position embedding: how fast each pair of a head turns, by what config.json says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("default", "linear", "llama3", "yarn")
"""Kinds of rope that are computed, under transformers' names."""

_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
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


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. theta: the base. The rest as transformers names it: factor
    stretches the context beyond `original`, the longest of training; low and high: llama3's
    frequency factors; beta_fast and beta_slow bound yarn's ramp, whose ends `truncate` rounds;
    scale: what yarn multiplies cosines and sines with."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    scale: float = 1.0

    @property
    def reach(self) -> int:
        """Positions that a stretched context is good for; 0 where config.json's own are."""
        return int(self.original * self.factor) if self.kind in ("linear", "yarn") else 0

    def parameters(self) -> dict[str, Any] | None:
        """As `rope_scaling` of a config.json, beside `rope_theta`; None for plain rope."""
        if self.kind == "default":
            return None
        found: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        found["original_max_position_embeddings"] = self.original
        if self.kind == "llama3":
            found |= {"low_freq_factor": self.low, "high_freq_factor": self.high}
        if self.kind == "yarn":
            found |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
            found |= {"truncate": self.truncate, "attention_factor": self.scale}
        return found

    def speeds(self, head_dim: int) -> list[float]:
        """Radians per position of each of the head's D / 2 pairs."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":  # Chen et al., arXiv 2306.15595
            return [speed / self.factor for speed in plain]
        if self.kind == "llama3":
            return [self._llama3(speed) for speed in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    def _llama3(self, speed: float) -> float:
        """Llama 3.1's model card: slow pairs are stretched, fast ones not, others in between."""
        turns = self.original * speed / (2 * math.pi)
        if turns < self.low:
            return speed / self.factor
        if turns > self.high:
            return speed
        share = (turns - self.low) / (self.high - self.low)
        return (1 - share) * speed / self.factor + share * speed

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        """Peng et al., arXiv 2309.00071: a linear ramp over pairs between two numbers of turns."""
        ends = [self._pair_of(turns, head_dim) for turns in (self.beta_fast, self.beta_slow)]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], head_dim - 1)
        width = max(high - low, 0.001)
        found: list[float] = []
        for i, speed in enumerate(plain):
            stretched = min(max((i - low) / width, 0.0), 1.0)
            found.append(speed / self.factor * stretched + speed * (1 - stretched))
        return found

    def _pair_of(self, turns: float, head_dim: int) -> float:
        """The pair, a real number, that turns so often over the original context."""
        span = self.original / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(self.theta))


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
    known = _SHARED | _KEYS[kind] | (_MULTIMODAL if drafter else frozenset())
    unknown = sorted(set(parameters) - known)
    if unknown:
        raise ValueError(
            f"{path}: {unknown[0]!r} of a rope of type {kind!r} is not supported; use a checkpoint "
            "without it."
        )
    if kind == "default":
        return RopeConfig(theta)

    def value(key: str, default: float | None = None) -> float:
        found: Any = parameters.get(key)
        found = default if found is None else found
        real = isinstance(found, int | float) and not isinstance(found, bool)
        if not real or not 0 < found < math.inf:
            raise ValueError(
                f"{path}: {key} of a rope of type {kind!r} is {found!r}, but must be a positive "
                "number; use the config.json the checkpoint was published with."
            )
        return float(found)

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
