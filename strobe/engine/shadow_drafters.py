"""The drafters of shadow mode: their names, configs and limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from strobe.config import EngineConfig, Limits, resolve_limits
from strobe.hub.download import is_hub_name
from strobe.hub.locate import AUTO, LOOKUP
from strobe.models.architectures import load_draft_config
from strobe.models.config_readers.pair import check_pair
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.sampling_params import METHODS
from strobe.speculation.registry import DRAFTER_METHOD


@dataclass(frozen=True)
class ShadowDrafter:
    """A drafter to score. name: in reports, and of its K/V group. num_drafts: of a block."""

    name: str
    path: Path
    config: DraftConfig
    num_drafts: int


def load_shadow_configs(
    typed: EngineConfig, config: EngineConfig, target: TargetConfig
) -> tuple[ShadowDrafter, ...]:
    """Read the configs of all drafters in shadow mode. typed: settings before their models were
    located. Raises ValueError if one does not fit the target or the settings."""
    if not config.shadow:
        return ()
    names = list(typed.shadow_draft)
    if len(config.shadow_draft) > len(names):
        names.insert(0, typed.draft or AUTO)
    paths = [
        (name, Path(path))
        for name, path in zip(names, config.shadow_draft, strict=True)
        if path != LOOKUP
    ]
    short = [name if is_hub_name(name) else path.name for name, path in paths]
    reserved = {"target", *METHODS, *[name for name in short if short.count(name) > 1]}
    return tuple(
        _load(path, name=str(path) if name in reserved else name, config=config, target=target)
        for name, (_, path) in zip(short, paths, strict=True)
    )


def _load(path: Path, name: str, config: EngineConfig, target: TargetConfig) -> ShadowDrafter:
    draft = load_draft_config(path, Path(config.target))
    check_pair(draft, target, path)
    limits = _limits(config, draft, model_max=draft.decoder.max_position, gpu=False)
    return ShadowDrafter(name=name, path=path, config=draft, num_drafts=limits.num_drafts)


def shadow_limits(
    config: EngineConfig, shadows: Sequence[ShadowDrafter], *, model_max: int, gpu: bool
) -> Limits:
    """Return limits with room for the blocks of all drafters. Raises ValueError."""
    lookup = _limits(config, None, model_max=model_max, gpu=gpu)
    parts = [_limits(config, s.config, model_max=model_max, gpu=gpu) for s in shadows]
    return replace(
        lookup,
        max_num_batched_tokens=max(part.max_num_batched_tokens for part in (lookup, *parts)),
        num_drafts=max(part.num_drafts for part in (lookup, *parts)),
        drafter_block_size=max((part.drafter_block_size for part in parts), default=0),
    )


def _limits(
    config: EngineConfig, draft: DraftConfig | None, *, model_max: int, gpu: bool
) -> Limits:
    """Return the limits of an engine that drafts in this one way; None: by prompt lookup."""
    method = LOOKUP if draft is None else DRAFTER_METHOD
    if draft is not None:
        config = config.with_(max_model_len=None)
    return resolve_limits(config, model_max=model_max, method=method, draft=draft, gpu=gpu)
