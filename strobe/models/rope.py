"""Rotary position embedding: how fast each pair of a head turns, by what config.json says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RopeConfig:
    """How positions become angles. theta: the base. The rest as transformers names it: factor
    stretches the context beyond `original`, the longest of training; low and high: llama3's
    frequency factors; beta_fast and beta_slow bound yarn's ramp, whose ends `truncate` rounds;
    scale: what yarn multiplies cosines and sines with. share: of each head that turns, its first
    part, and of a proportional rope's pairs those that turn, the others standing still;
    interleaved: whether pairs are neighbours, not a half of that part from each other."""

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
        """Positions that a stretched context is good for; 0 where config.json's own are."""
        return int(self.original * self.factor) if self.kind in ("linear", "yarn") else 0

    def parameters(self) -> dict[str, Any] | None:
        """As `rope_scaling` of a config.json, beside `rope_theta`; None for plain rope."""
        if self.kind == "default":
            return None
        found: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "proportional":
            return found | {"partial_rotary_factor": self.share}
        found["original_max_position_embeddings"] = self.original
        if self.kind == "llama3":
            found |= {"low_freq_factor": self.low, "high_freq_factor": self.high}
        if self.kind == "yarn":
            found |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow}
            found |= {"truncate": self.truncate, "attention_factor": self.scale}
        return found

    def speeds(self, head_dim: int) -> list[float]:
        """Radians per position of each of the head's D / 2 pairs; those that do not turn have 0."""
        turning = self._turning(head_dim)
        return self._speeds(turning) + [0.0] * ((head_dim - turning) // 2)

    def order(self, head_dim: int) -> list[int] | None:
        """Where in a checkpoint's head each of its D values lies in order that pairs be (i, i + D /
        2); None: they are. Heads of queries and keys may be put in any order, as long as both are.
        """
        turning = self._turning(head_dim)
        if turning == head_dim and not self.interleaved:
            return None
        half, rest = turning // 2, list(range(turning, head_dim))
        pairs = [(2 * i, 2 * i + 1) if self.interleaved else (i, i + half) for i in range(half)]
        still = len(rest) // 2
        first, second = [a for a, _ in pairs], [b for _, b in pairs]
        return [*first, *rest[:still], *second, *rest[still:]]

    def _turning(self, head_dim: int) -> int:
        """Values of a head that belong to a pair of their own."""
        return head_dim if self.kind == "proportional" else int(head_dim * self.share)

    def _speeds(self, head_dim: int) -> list[float]:
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.kind == "linear":  # Chen et al., arXiv 2306.15595
            return [speed / self.factor for speed in plain]
        if self.kind == "proportional":  # transformers, modeling_rope_utils.py
            turning = int(self.share * head_dim // 2)
            return [s / self.factor if i < turning else 0.0 for i, s in enumerate(plain)]
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
