"""Counter-based noise: one uniform per token, the same on every device and in every batch."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = (1 << 64) - 1
_STEP, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MUL1) & _WORD
    value = ((value ^ (value >> 27)) * _MUL2) & _WORD
    return value ^ (value >> 31)


PICKS, DRAFTS, TESTS = STREAMS = range(3)
"""Streams of a request's noise: the target's tokens, drafts, and whether a draft is kept."""


def stream_key(seed: int, sibling: int, stream: int = PICKS) -> int:
    """A signed 64-bit key for one stream of a request's noise."""
    key = _mix((seed + _STEP) & _WORD)
    key = _mix((key + (sibling + 1) * _MUL1) & _WORD)
    return _signed(_mix((key + (stream + 1) * _MUL2) & _WORD))


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """keys, positions [R] int64 -> [R] float64 in [0, 1): the output function of SplitMix64
    (Steele, Lea and Flood, 2014) at counter `positions` of the sequence that `keys` start."""
    x = keys + positions * _signed(_STEP)
    x = (x ^ _shift(x, 30)) * _signed(_MUL1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL2)
    return _shift(x ^ _shift(x, 31), 11).to(torch.float64) * 2.0**-53


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, whose own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
