"""Faults planted in an engine, each as a context manager that takes it out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from strobe.engine.engine import Engine
from strobe.models.modules import RotaryTable
from strobe.sampling import sampler

Plant = Callable[[Engine, pytest.MonkeyPatch], None]


def causality(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Rows of a verified block see the drafts after them."""
    backend: Any = engine.runner.backend
    plan = backend.plan

    def planned(batch: Any, store: Any, masks: Any) -> Any:
        if bool(batch.draft_lengths.any()):
            masks = tuple(replace(mask, causal=False) for mask in masks)
        return plan(batch, store, masks)

    patch.setattr(backend, "plan", planned)


def layer_offset(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """While drafts are verified, one layer reads the keys and values of the layer before it."""
    runner = engine.runner
    forward = runner.forward
    verifies = False

    def forwarded(batch: Any) -> Any:
        nonlocal verifies
        verifies = bool(batch.draft_lengths.any())
        return forward(batch)

    def shifted(gather: Callable[..., Any]) -> Callable[..., Any]:
        return lambda layer, *places: gather(layer - (verifies and layer == 3), *places)

    patch.setattr(runner, "forward", forwarded)
    for name in ("gather", "gather_pages"):
        patch.setattr(runner.store, name, shifted(getattr(runner.store, name)))


def stale_page(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A request that finds its prefix cached reads one page that has not been written again."""
    apply = engine.state.apply
    size = engine.config.page_size

    def applied(plan: Any) -> None:
        hits = {admission.slot for admission in plan.admitted if admission.length}
        for write in plan.pages:
            if write.slot in hits and write.first == 0:
                page = write.pages[0]
                engine.runner.store.data[:, page * size : (page + 1) * size] *= 0.5
        apply(plan)

    patch.setattr(engine.state, "apply", applied)


def rope_of_one_layer(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """One layer rotates with another base, in every step."""
    model: Any = engine.runner.model
    decoder = model.config.decoder
    shape = decoder.shape_of(2)
    positions = len(model.tables[2].cos)
    table = RotaryTable(shape.head_dim, replace(shape.rope, theta=shape.rope.theta * 2), positions)
    patch.setattr(model, "tables", [*model.tables[:2], table, *model.tables[3:]])


def foreign_state(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Pages are found by their own tokens only, whatever came before them."""
    pool = engine.components.pool
    key = pool.key
    patch.setattr(pool, "key", lambda parent, tokens: key(b"", tokens))


def foreign_recurrent_state(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A request that finds its prefix cached begins from the state of another prefix."""
    states = engine.components.kept_states
    assert states is not None
    find = states.find

    def found(keys: Any) -> Any:
        state = find(keys)
        if state is None:
            return None
        others = [row for row in states._kept.values() if row != state.row]
        return state._replace(row=others[0]) if others else state

    patch.setattr(states, "find", found)


def wrong_token(every: int) -> Plant:
    """Return a plant that accepts one draft that the target did not sample, in so many steps'
    tokens."""

    def plant(engine: Engine, patch: pytest.MonkeyPatch) -> None:
        ops = engine.state.ops
        accept = ops.accept
        accepted = 0

        def accepting(tokens: Any, batch: Any, layout: Any, tables: Any, **options: Any) -> Any:
            nonlocal accepted
            width = layout.shape.max_drafts
            for i, length in enumerate(batch.draft_lengths.tolist() if width else ()):
                drafts = batch.ids[layout.draft_rows][i]
                matches = (drafts[:length] == tokens[i, :length]).tolist()
                first = matches.index(False) if False in matches else length
                accepted += first
                if accepted >= every and first < length:
                    accepted = 0
                    tokens[i, first] = drafts[first]
            return accept(tokens, batch, layout, tables, **options)

        patch.setattr(ops, "accept", accepting)

    return plant


def top_p_off_by_one(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """Top-p keeps one token too many, with and without speculation."""
    mask = sampler.filter_mask

    def masked(weights: torch.Tensor, rows: Any) -> torch.Tensor:
        kept = mask(weights, rows)
        others = weights.masked_fill(kept, -1.0).argmax(-1, keepdim=True)
        return torch.where((rows.top_p < 1)[:, None], kept.scatter(1, others, True), kept)

    patch.setattr(sampler, "filter_mask", masked)
    patch.setattr(sampler, "_passes_filters", lambda scores, *rest: scores[:, 0] != scores[:, 0])


def shifted_mask(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    """A verified row gets the grammar mask of the row before it."""
    masks_of = engine._masks

    def shifted(walk: Any, layout: Any) -> Any:
        masks, errors = masks_of(walk, layout)
        shape = layout.shape
        rows = masks.view(shape.spans, shape.max_logits, -1)
        rows[:, 1:] = rows[:, :-1].clone()
        return masks, errors

    patch.setattr(engine, "_masks", shifted)


PLANTS: dict[str, Plant] = {
    "causality": causality,
    "layer offset": layer_offset,
    "stale page": stale_page,
    "rope of one layer": rope_of_one_layer,
    "foreign state": foreign_state,
    "one wrong token": wrong_token(100),
    "top-p off by one": top_p_off_by_one,
    "grammar mask shifted": shifted_mask,
}
"""The eight faults of `strobe verify`'s tests."""


@contextmanager
def planted(engine: Engine, plant: Plant) -> Iterator[None]:
    """Plant a fault for the block."""
    with pytest.MonkeyPatch.context() as patch:
        plant(engine, patch)
        yield
