"""Small sets of combinations in which each pair of values of two dimensions occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Dimensions = Mapping[str, Sequence[Any]]
Pair = tuple[str, Any, str, Any]


def all_pairs(dimensions: Dimensions) -> set[Pair]:
    return {
        (a, x, b, y)
        for (a, xs), (b, ys) in itertools.combinations(dimensions.items(), 2)
        for x in xs
        for y in ys
    }


def pairs_of(values: Mapping[str, Any]) -> set[Pair]:
    return {(*a, *b) for a, b in itertools.combinations(values.items(), 2)}


def covering(
    dimensions: Dimensions,
    rng: random.Random,
    tries: int = 60,
    first: Sequence[dict[str, Any]] = (),
    time: Callable[[Mapping[str, Any]], float] = lambda values: 1.0,
) -> list[dict[str, Any]]:
    """Choose greedily: each combination is the best of several random ones around a missing pair.

    first: combinations to begin with. time: relative time of a combination, of which the best
    covers the most missing pairs per time."""
    missing, chosen = all_pairs(dimensions), list(first)
    for values in first:
        missing -= pairs_of(values)
    while missing:
        name, value, second_name, second_value = rng.choice(sorted(missing, key=repr))
        fixed = {name: value, second_name: second_value}
        tried = [
            {n: fixed[n] if n in fixed else rng.choice(v) for n, v in dimensions.items()}
            for _ in range(tries)
        ]
        best = max(tried, key=lambda values: len(missing & pairs_of(values)) / time(values))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
