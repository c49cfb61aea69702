"""The registry of drafting methods: one entry with every part for each method there is."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from strobe.sampling_params import METHODS
from strobe.speculation.registry import DFLASH, NGRAM, REGISTRY, DraftMethod

PARTS = [part.name for part in fields(DraftMethod) if part.name != "name"]


def test_the_methods_that_requests_can_name_are_those_of_the_registry_and_none():
    parts = {part for method in METHODS for part in method.split("+")}
    assert parts == {*REGISTRY, "none"}
    assert len(set(METHODS)) == len(METHODS)


def test_each_entry_stands_under_its_own_name():
    assert {name: method.name for name, method in REGISTRY.items()} == {n: n for n in REGISTRY}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [None, "dflash", ()])
def test_an_entry_that_lacks_a_part_is_refused_with_its_name_and_the_parts(part: str, value: Any):
    for method in (DFLASH, NGRAM):
        message = f"The drafting method {method.name!r} has no {part}: "
        with pytest.raises(TypeError) as refused:
            replace(method, **{part: value})
        assert str(refused.value).startswith(message)
        assert repr(value) in str(refused.value)


@pytest.mark.parametrize("part", PARTS)
def test_an_entry_cannot_be_made_without_a_part(part: str):
    given = {field.name: getattr(NGRAM, field.name) for field in fields(DraftMethod)}
    del given[part]
    with pytest.raises(TypeError, match=f"'ngram' has no {part}: None"):
        DraftMethod(**given)


def test_entries_are_not_changed_after_they_are_made():
    with pytest.raises(AttributeError):
        DFLASH.name = "other"  # type: ignore[misc]
