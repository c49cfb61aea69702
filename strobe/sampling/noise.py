"""Counter-based Gumbel noise: a function of (seed, sibling, position, token) only, so that a row's
noise is the same on every device, with or without graphs, and in any batch.

    key       64 bits  SplitMix64 of seed and sibling, computed once by the host
    word      64 bits  SplitMix64 of key and position, one per row: a low and a high half
    hash      32 bits  triple32 of the token id, with the halves xored in before and after its
                       first round, so that rows differ by more than a permutation of ids
    v         (hash + 1/2) / 2^32, uniform in (0, 1)
    E         -log(1 - v), exponential
    gumbel    -log(E)

The argmax of log weight + gumbel, which is the argmin of E / weight, is distributed in proportion
to the weights (Gumbel, 1954; Maddison, Tarlow and Minka, arXiv 1411.0030). Small E win, where v has
its full relative precision. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB
"""SplitMix64 (Steele, Lea and Flood, 2014)."""

_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
_LAST = 14
"""triple32 (Wellons, nullprogram.com/blog/2018/07/31): shift, xor, multiply; a bias of 0.021."""

UNIT = 2.0**-32 * (1 - 2.0**-23)
"""v / (hash + 1/2): slightly below 2^-32, so that v rounded to float32 stays below 1. All v are
scaled by the same factor, which changes no argmax."""

MAX_NOISE = 22.88
"""Above the largest noise, -log(-log(1 - UNIT / 2)) = 22.873."""

NEAR = 6.0
NEAR_HASH = int(2**32 * -math.expm1(-math.exp(-NEAR)) * 1.001)
"""Noise above NEAR implies a smaller hash than this."""

_CHUNK = 1 << 16
"""Elements per pass on a CPU, which fit in the L2 cache."""


def _signed(value: int) -> int:
    value &= _WORD
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MUL1) & _WORD
    value = ((value ^ (value >> 27)) * _MUL2) & _WORD
    return value ^ (value >> 31)


def noise_key(seed: int, sibling: int) -> int:
    """Return the signed 64-bit key of one answer's noise."""
    key = _mix((seed + _STEP) & _WORD)
    return _signed(_mix((key + (sibling + 1) * _MUL1) & _WORD))


def row_words(keys: Tensor, positions: Tensor) -> Tensor:
    """keys, positions [R] int64 -> [R] int64: SplitMix64's output `positions` steps after state
    `keys`."""
    x = keys + positions * _signed(_STEP)
    x = (x ^ _shift(x, 30)) * _signed(_MUL1)
    x = (x ^ _shift(x, 27)) * _signed(_MUL2)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 right logically; torch's own shift copies the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def gumbel(keys: Tensor, positions: Tensor, size: int) -> Tensor:
    """keys, positions [R] int64 -> noise of tokens 0 to size - 1, [R, size] float32."""
    words = row_words(keys, positions)
    if keys.device.type != "cpu":
        return gumbel_by_torch(words, torch.arange(size, device=words.device))
    return torch.from_numpy(Gumbel(size).noise(words.numpy()))


def gumbel_at(keys: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """keys, positions [R], tokens [R, C], all int64 -> noise of each row's tokens [R, C]
    float32."""
    words = row_words(keys, positions)
    if keys.device.type != "cpu":
        return gumbel_by_torch(words, tokens)
    return torch.from_numpy(Gumbel(0).of(words.numpy(), tokens.numpy()))


class Gumbel:
    """The noise on a CPU: a few in-place NumPy operations per token on chunks that fit in cache."""

    def __init__(self, size: int):
        ids = np.arange(size, dtype=np.uint32)
        self.ids = ids ^ (ids >> _ROUNDS[0][0])  # shifts distribute over xor with the word
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
        """words, tokens [C] -> each pair's noise [C]."""
        out = np.empty(len(tokens), dtype=np.float32)
        low, high = _halves(words)
        self._fill(self.ids[tokens], low, high, out)
        return out

    def of(self, words: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """words [R], tokens [R, C] of any vocabulary -> [R, C]."""
        ids = tokens.astype(np.uint32)
        ids ^= ids >> _ROUNDS[0][0]
        out = np.empty(ids.shape, dtype=np.float32)
        low, high = _halves(words)[:, :, None]
        self._fill(ids, low, high, out)
        return out

    def race(
        self, scores: NDArray[np.float32], words: NDArray[np.int64], min_sums: NDArray[np.float32]
    ) -> NDArray[np.int64]:
        """scores [R, V], words [R] -> first argmax of scores + noise [R].

        min_sums [R]: a lower bound of each maximum. Noise is computed only for tokens that can
        reach it: usually few have a score within MAX_NOISE of it; otherwise few have a score within
        NEAR of it or a hash that gives noise above NEAR."""
        near = scores >= (min_sums - MAX_NOISE)[:, None]
        if _crowded(near):
            low, high = _halves(words)[:, :, None]
            near = self._hashes(self.ids, low, high)[0] < NEAR_HASH
            near |= scores >= (min_sums - NEAR)[:, None]
        if _crowded(near):
            return (self.noise(words) + scores).argmax(-1)
        row, token = np.divmod(np.flatnonzero(near), scores.shape[1])
        sums = scores[row, token] + self.at(words[row], token)
        rows = np.arange(len(scores))
        winners = np.flatnonzero(sums == np.maximum.reduceat(sums, np.searchsorted(row, rows))[row])
        return token[winners[np.searchsorted(row[winners], rows)]]

    def _hashes(
        self, ids: NDArray[Any], low: NDArray[Any], high: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the hashes and scratch space of the same shape, both valid until the next call."""
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
        # E = (v - (1 - u)) - log(u) with u = 1 - v rounded. FreeBSD's log1p (s_log1p.c) divides the
        # correction by u as well, which would change E by far less than its rounding.
        u = hashed.view(np.float32)
        rounded = scratch.view(np.float32)
        np.subtract(np.float32(1), out, out=u)
        out -= np.subtract(np.float32(1), u, out=rounded)
        out -= np.log(u, out=u)
        np.negative(np.log(out, out=out), out=out)


def _crowded(near: NDArray[np.bool_]) -> bool:
    """Whether computing all noise is faster than computing the noise of these elements."""
    return bool(4 * np.count_nonzero(near) > near.size)


def _halves(words: NDArray[np.int64]) -> NDArray[Any]:
    """words [C] -> low halves after the first xor-shift, and high halves, [2, C]."""
    low, high = np.ascontiguousarray(words).view(np.uint32).reshape(-1, 2).T
    return np.stack([low ^ (low >> _ROUNDS[0][0]), high])


def gumbel_by_torch(words: Tensor, tokens: Tensor) -> Tensor:
    """words [R], tokens [R, C] or [C] of every row, int64 -> noise [R, C] float32, in torch
    only."""
    mask = (1 << 32) - 1
    low = words[:, None] & mask
    high = _shift(words[:, None], 32)
    hashed = tokens ^ low
    for number, (shift, factor) in enumerate(_ROUNDS):
        hashed = ((hashed ^ (hashed >> shift)) * factor) & mask
        if number == 0:
            hashed = hashed ^ high
    v = ((hashed ^ (hashed >> _LAST)).float() + 0.5) * UNIT
    u = 1 - v
    return -((v - (1 - u)) - u.log()).log()
