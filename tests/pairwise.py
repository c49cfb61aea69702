"""Small sets of combinations in which each pair of values of two dimensions occurs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
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


def covering(dimensions: Dimensions, rng: random.Random, tries: int = 60) -> list[dict[str, Any]]:
    """Choose greedily: each combination is the best of several random ones around a missing
    pair."""
    missing, chosen = all_pairs(dimensions), list[dict[str, Any]]()
    while missing:
        name, value, second_name, second_value = rng.choice(sorted(missing, key=repr))
        fixed = {name: value, second_name: second_value}
        tried = [
            {n: fixed[n] if n in fixed else rng.choice(v) for n, v in dimensions.items()}
            for _ in range(tries)
        ]
        best = max(tried, key=lambda values: len(missing & pairs_of(values)))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen
