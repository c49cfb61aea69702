"""Tests that only `make test-all` or `make test-nightly` runs: those marked `full`, `nightly`, and
combinations of parameters.

They are slow for what they are likely to find: tests that need a browser or a second installation,
repeats in another size or dtype of what `make test` runs once, and servers that start for one rare
way of ending. The nightly ones are further cells of matrices of which the others run a part with
every value of each dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature

import pytest


def full_where(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark as `full` the combinations of stacked parameters that satisfy a condition.

    condition: a function of some of the test's parameters, by their names."""
    return pytest.mark.full_where.with_args(condition)


def nightly_where(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark as `nightly` and `full` the combinations of stacked parameters that satisfy a condition;
    see `full_where`."""
    return pytest.mark.nightly_where.with_args(condition)


def nightly(*values: object, id: str | None = None) -> object:
    """Return a parameter whose tests are marked `nightly` and `full`."""
    return pytest.param(*values, id=id, marks=[pytest.mark.full, pytest.mark.nightly])


def mark_full_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark the collected tests whose parameters satisfy a condition of `full_where` or
    `nightly_where`."""
    for item in items:
        for mark in item.iter_markers("full_where"):
            if _holds(mark, item):
                item.add_marker(pytest.mark.full)
        for mark in item.iter_markers("nightly_where"):
            if _holds(mark, item):
                item.add_marker(pytest.mark.full)
                item.add_marker(pytest.mark.nightly)


def _holds(mark: pytest.Mark, item: pytest.Item) -> bool:
    """Whether a test's parameters satisfy the condition of a mark."""
    (condition,) = mark.args
    parameters = item.callspec.params
    arguments = {name: parameters[name] for name in signature(condition).parameters}
    return condition(**arguments)
