"""Tests that only `make test-all` runs: those marked `full`, and combinations of parameters.

They are slow for what they are likely to find: tests that need a browser or a second installation,
repeats in another size or dtype of what `make test` runs once, and servers that start for one rare
way of ending.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import signature

import pytest


def full_where(condition: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark as `full` the combinations of stacked parameters that satisfy a condition.

    condition: a function of some of the test's parameters, by their names."""
    return pytest.mark.full_where.with_args(condition)


def mark_full_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark the collected tests whose parameters satisfy a condition of `full_where`."""
    for item in items:
        for mark in item.iter_markers("full_where"):
            (condition,) = mark.args
            parameters = item.callspec.params
            arguments = {name: parameters[name] for name in signature(condition).parameters}
            if condition(**arguments):
                item.add_marker(pytest.mark.full)
