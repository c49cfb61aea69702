"""Rotary position embedding: the kinds in config.json and their frequencies."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KINDS = ("default", "linear", "llama3", "yarn", "proportional")
"""Supported kinds of rope, by transformers' names."""

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
"""Keys in a drafter's config from a multimodal target; its own rope is plain."""

_HINT = "use the config.json the checkpoint was published with."


@dataclass(frozen=True)
class RopeConfig:
    """A rotary position embedding, with transformers' names for most fields.

    theta: the base. factor: stretches the context beyond `original`, the training length. low,
    high: llama3's frequency factors. beta_fast, beta_slow: bounds of yarn's ramp, rounded if
    `truncate`. scale: yarn's factor of cosines and sines. share: fraction of each head that is
    rotated, counted from its first value; for proportional rope the fraction of pairs with a
    frequency above 0. interleaved: pairs are adjacent values instead of values half the rotated
    part apart.
    """

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
    share: float = 1.0
    interleaved: bool = False

    @property
    def reach(self) -> int:
        """Length of the stretched context; 0 if max_position_embeddings already is that length."""
        return int(self.original * self.factor) if self.kind in ("linear", "yarn") else 0

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Radians per position of each of the head's D / 2 pairs; 0 for pairs not rotated."""
        rotated = self._rotated(head_dim)
        return self._inverse_frequencies(rotated) + [0.0] * ((head_dim - rotated) // 2)

    def order(self, head_dim: int) -> list[int] | None:
        """Order of a checkpoint head's D values in which pairs are (i, i + D / 2); None if they
        already are. Attention is unchanged if queries and keys are reordered in the same way."""
        rotated = self._rotated(head_dim)
        if rotated == head_dim and not self.interleaved:
            return None
        half = rotated // 2
        rest = list(range(rotated, head_dim))
        pairs = [(2 * i, 2 * i + 1) if self.interleaved else (i, i + half) for i in range(half)]
        still = len(rest) // 2
        first = [a for a, _ in pairs]
        second = [b for _, b in pairs]
        return [*first, *rest[:still], *second, *rest[still:]]

    def _rotated(self, head_dim: int) -> int:
        """Number of a head's values that form pairs of their own."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)

    def _inverse_frequencies(self, head_dim: int) -> list[float]:
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":  # Chen et al., arXiv 2306.15595
            return [frequency / self.factor for frequency in plain]
        if self.kind == "proportional":  # transformers, modeling_rope_utils.py
            rotated = int(self.share * head_dim // 2)
            return [s / self.factor if i < rotated else 0.0 for i, s in enumerate(plain)]
        if self.kind == "llama3":
            return [self._llama3(frequency) for frequency in plain]
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    def _llama3(self, frequency: float) -> float:
        """Llama 3.1's model card: stretch slow pairs, keep fast ones, interpolate between them."""
        turns = self.original * frequency / (2 * math.pi)
        if turns < self.low:
            return frequency / self.factor
        if turns > self.high:
            return frequency
        share = (turns - self.low) / (self.high - self.low)
        return (1 - share) * frequency / self.factor + share * frequency

    def _yarn(self, plain: list[float], head_dim: int) -> list[float]:
        """Peng et al., arXiv 2309.00071: a linear ramp over pairs between two numbers of turns."""
        ends = [self._pair_of(turns, head_dim) for turns in (self.beta_fast, self.beta_slow)]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low = max(ends[0], 0)
        high = min(ends[1], head_dim - 1)
        width = max(high - low, 0.001)
        ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(len(plain))]
        return [f / self.factor * s + f * (1 - s) for f, s in zip(plain, ramp, strict=True)]

    def _pair_of(self, turns: float, head_dim: int) -> float:
        """Fractional index of the pair that makes so many turns over the original context."""
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
    """Read `rope_parameters` or `rope_scaling`. max_position: default of the original context
    length. Raises ValueError for unsupported kinds and for invalid values."""
    rope = _Parameters(parameters, path)
    rope.check_keys(drafter=drafter)
    if rope.kind == "default":
        return RopeConfig(theta=theta)
    if rope.kind == "proportional":
        return _read_proportional(rope, theta)
    factor = rope.number("factor")
    original = int(rope.number("original_max_position_embeddings", max_position))
    stretched = RopeConfig(theta=theta, kind=rope.kind, factor=factor, original=original)
    if rope.kind == "llama3":
        return _with_llama3(stretched, rope)
    if rope.kind == "yarn":
        return _with_yarn(stretched, rope)
    return stretched


@dataclass(frozen=True)
class _Parameters:
    """A rope's parameters in the config.json at `path`."""

    values: dict[str, Any]
    path: Path

    @property
    def kind(self) -> str:
        """The kind of rope. Raises ValueError unless it is one of KINDS."""
        kind = self.values.get("rope_type", self.values.get("type", "default"))
        if kind not in KINDS:
            raise ValueError(
                f"{self.path}: rope type {kind!r} is not supported; use a checkpoint with one of "
                f"{', '.join(KINDS)}."
            )
        return kind

    def check_keys(self, *, drafter: bool) -> None:
        """Raise ValueError for a parameter that this kind of rope does not have."""
        known_keys = _SHARED | _KEYS[self.kind] | (_MULTIMODAL if drafter else frozenset())
        unknown = sorted(
            key for key in set(self.values) - known_keys if self.values[key] is not None
        )
        if unknown:
            raise ValueError(
                f"{self.path}: {unknown[0]!r} of a rope of type {self.kind!r} is not supported; "
                "use a checkpoint without it."
            )

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number. Raises ValueError for any other value."""
        value: object = self.values.get(key)
        value = default if value is None else value
        is_bool = isinstance(value, bool)
        if is_bool or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(
                f"{self.path}: {key} of a rope of type {self.kind!r} is {value!r}, but must be a "
                f"positive number; {_HINT}"
            )
        return float(value)


def _read_proportional(rope: _Parameters, theta: float) -> RopeConfig:
    share = rope.number("partial_rotary_factor", 1.0)
    if share > 1:
        raise ValueError(
            f"{rope.path}: partial_rotary_factor is {share:g}, but must be at most 1; {_HINT}"
        )
    factor = rope.number("factor", 1.0)
    return RopeConfig(theta=theta, kind=rope.kind, factor=factor, share=share)


def _with_llama3(stretched: RopeConfig, rope: _Parameters) -> RopeConfig:
    low = rope.number("low_freq_factor")
    high = rope.number("high_freq_factor")
    if low >= high:
        raise ValueError(
            f"{rope.path}: low_freq_factor is {low:g}, but must be below high_freq_factor "
            f"{high:g}; {_HINT}"
        )
    return replace(stretched, low=low, high=high)


def _with_yarn(stretched: RopeConfig, rope: _Parameters) -> RopeConfig:
    truncate = rope.values.get("truncate", True)
    if not isinstance(truncate, bool):
        raise ValueError(
            f"{rope.path}: truncate is {truncate!r}, but must be true or false; {_HINT}"
        )
    return replace(
        stretched,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=truncate,
        scale=_yarn_scale(stretched.factor, rope),
    )


def _yarn_scale(factor: float, rope: _Parameters) -> float:
    """Return the factor of cosines and sines: the config's own, or yarn's for its `mscale`."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        scale = _mscale(factor, rope.number("mscale"))
        return scale / _mscale(factor, rope.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    """Yarn's attention temperature, equation 22."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    """Return the rope as config.json spells it, without `rope_theta`; None for plain rope."""
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
