"""Sampling in plain Python, the reference for the fast code."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from strobe.sampling.noise import noise_key
from strobe.sampling.sampler import RowParams
from strobe.sampling_params import OPTIONS

COLUMN_DTYPES = {float: torch.float32, int: torch.int64}
WORD = 2**64


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    return [w / sum(weights) for w in weights]


def kept(
    probs: Sequence[float], top_k: int, top_p: float, min_p: float, *, slack: float = 0.0
) -> set[int]:
    """Return the token ids that pass all three filters, ties at the edge included.

    slack > 0 keeps more tokens and slack < 0 fewer, where a sum or product is close to its limit.
    """
    ordered = sorted(probs, reverse=True)
    inside = ordered[:top_k] if 0 < top_k < len(ordered) else ordered
    edge = inside[-1]
    if top_p < 1:
        mass, goal = 0.0, top_p * sum(inside)
        for p in inside:
            mass += p
            if mass >= goal + slack:
                edge = p
                break
    floor = min_p * ordered[0] * (1 - slack) - (1e-300 if slack > 0 else 0)
    return {i for i, p in enumerate(probs) if p >= edge and p >= floor}


def distribution(
    logits: Sequence[float],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Return each token's sampling probability."""
    probs = softmax(logits, temperature)
    ids = kept(probs, top_k, top_p, min_p)
    total = sum(probs[i] for i in ids)
    return [p / total if i in ids else 0.0 for i, p in enumerate(probs)]


def row_word(key: int, position: int) -> int:
    """SplitMix64 at a counter, with Python's integers."""
    x = (key + position * 0x9E3779B97F4A7C15) % WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % WORD
    return x ^ (x >> 31)


def token_hash(word: int, token: int) -> int:
    """triple32, with half of a row's word mixed in before and half after the first round."""
    x = token ^ (word % 2**32)
    x = ((x ^ (x >> 17)) * 0xED5AD4BB) % 2**32
    x ^= word >> 32
    x = ((x ^ (x >> 11)) * 0xAC4C1B51) % 2**32
    x = ((x ^ (x >> 15)) * 0x31848BAB) % 2**32
    return x ^ (x >> 14)


def exponential(word: int, token: int) -> float:
    """Return E; the Gumbel noise is -log(E)."""
    return -math.log1p(-(token_hash(word, token) + 0.5) / 2**32)


def params(
    count: int,
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | int = 0,
    siblings: Sequence[int] | int = 0,
    **values: float | Sequence[float],
) -> RowParams:
    """Return RowParams of `count` rows; a single value serves all rows. seeds: 0, 1, 2, ...
    values: of sampling options; the others are at their defaults."""

    def many(value: object) -> list:
        return list(value) if isinstance(value, Sequence) else [value] * count

    columns = {
        option.name: torch.tensor(
            many(values.pop(option.name, option.default)), dtype=COLUMN_DTYPES[option.facts.column]
        )
        for option in OPTIONS
        if option.facts.column is not None
    }
    assert not values, values
    keys = map(noise_key, seeds or range(count), many(siblings))
    return RowParams(
        **columns,
        key=torch.tensor(list(keys), dtype=torch.int64),
        position=torch.tensor(many(positions), dtype=torch.int64),
    )


def race(
    logits: Sequence[float],
    temperature: float,
    key: int,
    position: int,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[int, float]:
    """Return the token that wins a row's race and its margin; 0 if a token is too close to a
    filter's edge to decide."""
    probs = softmax(logits, temperature)
    ids, word = kept(probs, top_k, top_p, min_p), row_word(key, position)
    scores = sorted(
        ((logits[i] / temperature - math.log(exponential(word, i)), i) for i in ids), reverse=True
    )
    sure = all(kept(probs, top_k, top_p, min_p, slack=s) == ids for s in (1e-5, -1e-5))
    margin = scores[0][0] - scores[1][0] if len(scores) > 1 else math.inf
    return scores[0][1], margin if sure else 0.0
