"""The drafting methods, one entry each: everything that the engine asks of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from strobe.config import EngineConfig
from strobe.hub.locate import LOOKUP
from strobe.models.dflash_drafter import DFlash
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.model_runner import ModelRunner
from strobe.speculation.dflash import DFlashProposer
from strobe.speculation.ngram import NgramProposer
from strobe.speculation.proposer import HostProposer, Proposer, ProposerSet


@dataclass(frozen=True)
class ProposerContext:
    """Everything needed to create a proposer. draft_runner: runs the drafter."""

    config: EngineConfig
    device: torch.device
    graphs: Graphs | Eager
    drafter: DFlash | None = None
    draft_runner: ModelRunner | None = None


@dataclass(frozen=True)
class DraftMethod:
    """make: makes its proposer, on the device or on the host. needs_drafter: whether it runs a
    drafter's checkpoint."""

    make: Callable[[ProposerContext], Proposer | HostProposer]
    needs_drafter: bool = False


def _make_dflash(context: ProposerContext) -> Proposer:
    assert context.drafter is not None
    assert context.draft_runner is not None
    return DFlashProposer(
        model=context.drafter,
        runner=context.draft_runner,
        graphs=context.graphs,
        config=context.config,
    )


def _make_ngram(context: ProposerContext) -> HostProposer:
    return NgramProposer(context.config.ngram_min, context.config.ngram_max)


REGISTRY = {
    "dflash": DraftMethod(_make_dflash, needs_drafter=True),
    LOOKUP: DraftMethod(_make_ngram),
}
COMPOSITES = {"dflash+ngram": (LOOKUP, "dflash")}
"""Methods that combine two: the host's drafts first, then the device's."""
DRAFTER_METHOD = next(name for name, method in REGISTRY.items() if method.needs_drafter)
"""The method of a drafter that is named without one."""


def make_proposers(context: ProposerContext) -> ProposerSet:
    """Make the proposers of all methods, except methods whose drafter is missing."""
    has_drafter = context.drafter is not None
    usable = {n: m for n, m in REGISTRY.items() if has_drafter or not m.needs_drafter}
    proposers = {name: method.make(context) for name, method in usable.items()}
    return ProposerSet(proposers, context.device, COMPOSITES)


def make_shadow_proposers(
    context: ProposerContext, drafters: Mapping[str, ProposerContext]
) -> ProposerSet:
    """Make the proposers that shadow mode scores: prompt lookup, and drafters by name."""
    proposers = {name: _make_dflash(drafter) for name, drafter in drafters.items()}
    return ProposerSet({LOOKUP: _make_ngram(context), **proposers}, context.device)
