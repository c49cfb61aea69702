"""Counts of weights by the way a forward uses them, which the modules that hold them report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import nn


@dataclass(frozen=True)
class WeightCounts:
    """Number of values.

    linear: of matrices that multiply each row. experts: of matrices of which a row passes through
    a few, all that the model holds. small: norms, biases and convolutions. tables: of which a
    forward reads a row for each token.
    """

    linear: int = 0
    experts: int = 0
    small: int = 0
    tables: int = 0

    def __add__(self, other: WeightCounts) -> WeightCounts:
        return WeightCounts(
            linear=self.linear + other.linear,
            experts=self.experts + other.experts,
            small=self.small + other.small,
            tables=self.tables + other.tables,
        )

    @property
    def total(self) -> int:
        return self.linear + self.experts + self.small + self.tables


@runtime_checkable
class CountsWeights(Protocol):
    """A module whose parameters are not all what their shapes suggest, or that multiplies rows by
    others' parameters."""

    def weight_counts(self) -> WeightCounts:
        """Count the weights of the module and of those in it."""
        ...


def count_weights(module: nn.Module) -> WeightCounts:
    """Count the weights of a module and of those in it. Unless it says otherwise itself, a matrix
    multiplies each row, an embedding is a table, and all else is small."""
    if isinstance(module, CountsWeights):
        return module.weight_counts()
    counts = WeightCounts()
    for parameter in module.parameters(recurse=False):
        size = parameter.numel()
        if isinstance(module, nn.Embedding):
            counts += WeightCounts(tables=size)
        elif parameter.ndim == 2:
            counts += WeightCounts(linear=size)
        else:
            counts += WeightCounts(small=size)
    for child in module.children():
        counts += count_weights(child)
    return counts
