"""The registry of drafting methods: one entry for each method, its capabilities as data."""

from __future__ import annotations

from strobe.sampling_params import DRAFTER_METHODS, METHODS
from strobe.speculation.registry import COMPOSITES, DRAFTER_METHOD, REGISTRY


def test_registry_matches_method_names():
    assert {*REGISTRY, *COMPOSITES, "none"} == set(METHODS)
    assert len(set(METHODS)) == len(METHODS)


def test_methods_with_weights_need_a_drafter():
    parts = {name: (name,) for name in REGISTRY} | COMPOSITES
    with_weights = {
        name for name, of in parts.items() if any(REGISTRY[part].needs_drafter for part in of)
    }
    assert with_weights == DRAFTER_METHODS
    assert DRAFTER_METHOD in DRAFTER_METHODS


def test_composites_are_made_of_registered_methods():
    for name, (host, device) in COMPOSITES.items():
        assert {host, device} <= set(REGISTRY), name
        assert not REGISTRY[host].needs_drafter
