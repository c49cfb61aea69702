"""Counter-based Gumbel noise: a function of (seed, sibling, position, token) alone, so that a row's
noise is the same on every device, captured or not, and whatever else is in the batch.

    key       64 bits  SplitMix64 of seed and sibling, made once by the host
    word      64 bits  SplitMix64 of key and position, one per row: a low and a high half
    hash      32 bits  triple32 of the token's id, with the halves xored in before and behind its
                       first round, so that rows differ by more than an order of their ids
    v         (hash + 1/2) / 2^32, a uniform in (0, 1)
    E         -log(1 - v), exponential
    gumbel    -log(E)

The token that wins a race by E over its weight, which is the argmax of log weight plus gumbel, is
distributed by the weights (Gumbel, 1954; Maddison, Tarlow and Minka, arXiv 1411.0030). Small E win,
so v has its full relative precision there. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = (1 << 64) - 1
_STEP, _MUL1, _MUL2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""SplitMix64 (Steele, Lea and Flood, 2014)."""

_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST = 14
"""triple32 (Wellons, nullprogram.com/blog/2018/07/31): shift, xor, multiply; a bias of 0.021."""

UNIT = 2.0**-32 * (1 - 2.0**-23)
"""What takes hash + 1/2 to v: so little below 2^-32 that v, rounded to float32, stays below 1. All
tokens' v are scaled alike, which changes no race."""

MAX_NOISE = 22.88
"""More than any noise: -log(-log(1 - UNIT / 2)) is 22.873."""

NEAR = 6.0
NEAR_HASH = int(2**32 * -math.expm1(-math.exp(-NEAR)) * 1.001)
"""All noise above NEAR is that of smaller hashes."""

_CHUNK = 1 << 16
"""Elements that the CPU's form works on at a time, so that they stay in the L2 cache."""


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MUL1) & _WORD
    value = ((value ^ (value >> 27)) * _MUL2) & _WORD
    return value ^ (value >> 31)


def noise_key(seed: int, sibling: int) -> int:
    """A signed 64-bit key for one answer's noise."""
    key = _mix((seed + _STEP) & _WORD)
    return _signed(_mix((key + (sibling + 1) * _MUL1) & _WORD))


def row_words(keys: Tensor, positions: Tensor) -> Tensor:
    """keys, positions [R] int64 -> [R] int64: the output function of SplitMix64 at counter
    `positions` of the sequence that `keys` start."""
    x = keys + positions * _signed(_STEP)
    x = (x ^ _shift(x, 30)) * _signed(_MUL1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64, whose own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def gumbel(keys: Tensor, positions: Tensor, size: int) -> Tensor:
    """keys, positions [R] int64 -> [R, size] float32, the noise of tokens 0 to size - 1."""
    words = row_words(keys, positions)
    if keys.device.type != "cpu":
        return gumbel_by_torch(words, size)
    return torch.from_numpy(Gumbel(size).noise(words.numpy()))


class Gumbel:
    """The CPU's form: NumPy in place, a few operations a token over what is in the cache."""

    def __init__(self, size: int):
        ids = np.arange(size, dtype=np.uint32)
        self.ids = ids ^ (ids >> _ROUNDS[0][0])  # the first shift of an xor is that of its parts
        self.rows = max(_CHUNK // max(size, 1), 1)
        self._scratch = np.empty((2, self.rows * min(size, _CHUNK)), dtype=np.uint32)

    def noise(self, words: NDArray[np.int64]) -> NDArray[np.float32]:
        """words [R] -> [R, V]."""
        out = np.empty((len(words), len(self.ids)), dtype=np.float32)
        low, high = _halves(words)[:, :, None]
        for row in range(0, len(words), self.rows):
            rows = slice(row, row + self.rows)
            for first in range(0, len(self.ids), _CHUNK):
                columns = slice(first, first + _CHUNK)
                self._fill(self.ids[columns], low[rows], high[rows], out[rows, columns])
        return out

    def at(self, words: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """words, tokens [C] -> [C], the noise of one token each."""
        out = np.empty(len(tokens), dtype=np.float32)
        low, high = _halves(words)
        self._fill(self.ids[tokens], low, high, out)
        return out

    def race(
        self, scores: NDArray[np.float32], words: NDArray[np.int64], min_sums: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """scores [R, V], words [R] -> the first maximum of scores plus noise [R], which is at least
        `min_sums` [R]. Mostly few tokens come near that with the greatest noise there is, or have a
        score that needs less than NEAR or a hash that gives more; only theirs is computed."""
        near = scores >= (min_sums - MAX_NOISE)[:, None]
        if _crowded(near):
            low, high = _halves(words)[:, :, None]
            near = self._hashes(self.ids, low, high)[0] < NEAR_HASH
            near |= scores >= (min_sums - NEAR)[:, None]
        if _crowded(near):
            return (self.noise(words) + scores).argmax(-1)
        row, token = np.divmod(np.flatnonzero(near), scores.shape[1])
        sums, rows = scores[row, token] + self.at(words[row], token), np.arange(len(scores))
        winners = np.flatnonzero(sums == np.maximum.reduceat(sums, np.searchsorted(row, rows))[row])
        return token[winners[np.searchsorted(row[winners], rows)]]

    def _hashes(
        self, ids: NDArray[Any], low: NDArray[Any], high: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The hashes, and as much room again, both only until the next call."""
        shape = np.broadcast_shapes(ids.shape, low.shape)
        size = math.prod(shape)
        if size > self._scratch.shape[1]:
            self._scratch = np.empty((2, size), dtype=np.uint32)
        hashed, scratch = (room[:size].reshape(shape) for room in self._scratch)
        np.bitwise_xor(ids, low, out=hashed)
        hashed *= np.uint32(_ROUNDS[0][1])
        hashed ^= high
        for shift, factor in _ROUNDS[1:]:
            hashed ^= np.right_shift(hashed, shift, out=scratch)
            hashed *= np.uint32(factor)
        hashed ^= np.right_shift(hashed, _LAST, out=scratch)
        return hashed, scratch

    def _fill(
        self, ids: NDArray[Any], low: NDArray[Any], high: NDArray[Any], out: NDArray[Any]
    ) -> None:
        hashed, scratch = self._hashes(ids, low, high)
        np.copyto(out, hashed, casting="unsafe")
        out += np.float32(0.5)
        out *= np.float32(UNIT)
        # E = (v - (1 - u)) - log(u) with u = 1 - v rounded: FreeBSD's log1p (s_log1p.c), whose
        # correction is divided by u; where it is not 0, that is far below E's rounding.
        u, rounded = hashed.view(np.float32), scratch.view(np.float32)
        np.subtract(np.float32(1), out, out=u)
        out -= np.subtract(np.float32(1), u, out=rounded)
        out -= np.log(u, out=u)
        np.negative(np.log(out, out=out), out=out)


def _crowded(near: NDArray[np.bool_]) -> bool:
    """Whether the noise of all is computed faster than that of some."""
    return bool(4 * np.count_nonzero(near) > near.size)


def _halves(words: NDArray[np.int64]) -> NDArray[Any]:
    """words [C] -> low, taken through the first shift, and high [2, C]."""
    low, high = np.ascontiguousarray(words).view(np.uint32).reshape(-1, 2).T
    return np.stack([low ^ (low >> _ROUNDS[0][0]), high])


def gumbel_by_torch(words: Tensor, size: int) -> Tensor:
    """words [R] int64 -> [R, size] float32, the same hashes by torch's operations alone."""
    mask = (1 << 32) - 1
    low, high = words[:, None] & mask, _shift(words[:, None], 32)
    hashed = torch.arange(size, device=words.device) ^ low
    for number, (shift, factor) in enumerate(_ROUNDS):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & mask
        if number == 0:
            hashed = hashed ^ high
    v = ((hashed ^ (hashed >> _LAST)).float() + 0.5) * UNIT
    u = 1 - v
    return -((v - (1 - u)) - u.log()).log()
