"""The drafting methods, one entry each: everything that the engine asks of a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from strobe.attention.base import AttentionBackend
from strobe.config import EngineConfig
from strobe.kv.store import KVStore
from strobe.models.config import DraftConfig, TargetConfig
from strobe.models.config_readers.pair import check_pair
from strobe.models.dflash import DFlash
from strobe.models.load import check_draft_tensors, load_draft
from strobe.models.registry import load_draft_config
from strobe.runner.buckets import Buckets
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.runner import ModelRunner
from strobe.runner.state import DecodeState
from strobe.sampling.state import SamplingState
from strobe.sampling_params import METHODS
from strobe.speculation.base import HostProposer, Proposer
from strobe.speculation.dflash import DFlashProposer
from strobe.speculation.ngram import NgramProposer


@dataclass(frozen=True)
class ProposerContext:
    """Everything that a proposer is made from. models, stores: weights and K/V by method, for
    methods that have them."""

    config: EngineConfig
    state: DecodeState
    sampling: SamplingState
    graphs: Graphs | Eager
    buckets: Buckets | None
    backend: AttentionBackend
    models: Mapping[str, DFlash]
    stores: Mapping[str, KVStore]


MISSING: Any = None


@dataclass(frozen=True)
class DraftMethod:
    """read: reads the config of the method's checkpoint and checks it against the target's; None if
    the settings name no checkpoint. check: builds its module on the meta device and checks every
    tensor's header, from the checkpoint's directory, that config and `load_format`. load: loads its
    module, from directory, config, the target's module and the options of `strobe.models.load`.
    make: makes its proposer, on the device or on the host. Raises TypeError, naming the method, for
    a part that is missing or not callable."""

    name: str
    read: Callable[[EngineConfig, TargetConfig], DraftConfig | None] = MISSING
    check: Callable[[Path, DraftConfig, str], DFlash] = MISSING
    load: Callable[..., DFlash] = MISSING
    make: Callable[[ProposerContext], Proposer | HostProposer] = MISSING

    def __post_init__(self) -> None:
        for part in fields(self)[1:]:
            value: object = getattr(self, part.name)
            if not callable(value):
                raise TypeError(f"The drafting method {self.name!r} has no {part.name}: {value!r}.")


def _read_dflash(config: EngineConfig, target: TargetConfig) -> DraftConfig | None:
    if config.draft is None:
        return None
    draft = load_draft_config(Path(config.draft), Path(config.target))
    check_pair(draft, target, Path(config.draft))
    return draft


def _make_dflash(context: ProposerContext) -> Proposer:
    model = context.models["dflash"]
    runner = ModelRunner(
        model,
        model.config.decoder.masks,
        context.stores["dflash"],
        context.state,
        context.sampling,
        context.backend,
        buckets=context.buckets,
    )
    sampled = context.config.draft_sample_method == "probabilistic"
    options = {"sampled": sampled, "margins": context.config.adaptive}
    return DFlashProposer(model, runner, context.graphs, **options)


def no_checkpoint(*args: Any, **kwargs: Any) -> Any:
    """Stands in for the checkpoint parts of a method without weights."""
    return None


DFLASH = DraftMethod("dflash", _read_dflash, check_draft_tensors, load_draft, _make_dflash)
NGRAM = DraftMethod(
    "ngram",
    read=no_checkpoint,
    check=no_checkpoint,
    load=no_checkpoint,
    make=lambda context: NgramProposer(context.config.ngram_min, context.config.ngram_max),
)
REGISTRY = {method.name: method for method in (DFLASH, NGRAM)}
_mismatched = {*REGISTRY, "none"} ^ {part for method in METHODS for part in method.split("+")}
assert not _mismatched, f"only in one of REGISTRY and sampling_params.Method: {sorted(_mismatched)}"
