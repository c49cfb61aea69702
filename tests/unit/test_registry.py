"""The registry of drafting methods: one complete entry for each method."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from strobe.sampling_params import METHODS
from strobe.speculation.registry import DFLASH, NGRAM, REGISTRY, DraftMethod

PARTS = [part.name for part in fields(DraftMethod) if part.name != "name"]


def test_registry_matches_method_names():
    parts = {part for method in METHODS for part in method.split("+")}
    assert parts == {*REGISTRY, "none"}
    assert len(set(METHODS)) == len(METHODS)


def test_entries_have_their_own_names():
    assert {name: method.name for name, method in REGISTRY.items()} == {n: n for n in REGISTRY}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("value", [None, "dflash", ()])
def test_incomplete_entry_is_rejected_with_missing_part(part: str, value: Any):
    for method in (DFLASH, NGRAM):
        message = f"The drafting method {method.name!r} has no {part}: "
        with pytest.raises(TypeError) as caught:
            replace(method, **{part: value})
        assert str(caught.value).startswith(message)
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("part", PARTS)
def test_entry_requires_every_part(part: str):
    parts = {field.name: getattr(NGRAM, field.name) for field in fields(DraftMethod)}
    del parts[part]
    with pytest.raises(TypeError, match=f"'ngram' has no {part}: None"):
        DraftMethod(**parts)


def test_entries_are_immutable():
    with pytest.raises(AttributeError):
        DFLASH.name = "other"  # type: ignore[misc]
