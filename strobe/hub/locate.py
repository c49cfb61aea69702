"""Find the directories of target and drafter: the demo models, hub names, drafters that name their
target, and `auto`."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.hub.download import find_checkpoint, is_hub_name
from strobe.hub.files import read_json
from strobe.hub.packaged import MODELS, is_packaged
from strobe.hub.pairs import published_drafter
from strobe.hub.speculators_pair import BLOCK_DRAFTERS, Proposal, read_proposal
from strobe.sampling_params import DRAFTER_METHODS

logger = logging.getLogger(__name__)

AUTO = "auto"
LOOKUP = "ngram"
"""Prompt lookup, where drafters are named."""


def locate_models(config: EngineConfig) -> EngineConfig:
    """Return the settings with target and draft as local directories, downloading everything but
    the weights, which `fetch_weights` downloads once the configs are known to be good.

    No target means the demo models. A packaged model drafts with its own drafter unless another one
    or another method is named. If the target is a speculators checkpoint, it becomes the
    drafter and sets the target it was trained for, the method and the drafts per step. Settings
    that name local directories are returned as they are. Raises ValueError.
    """
    config = _own_pair(config) if not config.target else _named_pair(config)
    if config.shadow:
        return _shadow_drafters(config)
    if config.method in DRAFTER_METHODS and config.draft is None:
        raise ValueError(
            f"method is {config.method!r}, but no drafter is named; set draft to a directory."
        )
    return config


def _shadow_drafters(config: EngineConfig) -> EngineConfig:
    """Return settings of shadow mode with all its drafters in shadow_draft: the one of `draft`
    first. Raises ValueError if there are none."""
    others = [
        name if name == LOOKUP else _find_drafter(name, None, config.target)
        for name in config.shadow_draft
    ]
    drafters = [path for path in (config.draft, *others) if path is not None]
    if not drafters:
        raise ValueError(
            f"shadow is set, but no drafter is named for {config.target}; name one with "
            f"shadow_draft or draft, or score prompt lookup alone with shadow_draft {LOOKUP}."
        )
    twice = [path for path in drafters if drafters.count(path) > 1]
    if twice:
        raise ValueError(f"Shadow mode would score {twice[0]} twice; name each drafter once.")
    return replace(config, draft=None, draft_revision=None, shadow_draft=tuple(drafters))


def find_pair(target: str, draft: str | None) -> tuple[str, str | None]:
    """Return both as local directories without checking that they match. Raises ValueError."""
    drafter = _find_drafter(draft, None, target)
    return find_checkpoint(target, None), drafter


def _find_drafter(draft: str | None, revision: str | None, target: str) -> str | None:
    """Return the drafter's directory; None for `auto` if the target is a speculators checkpoint."""
    if draft is None:
        return None
    if draft == AUTO and is_packaged(target):
        return str(MODELS[target].draft)
    if draft == AUTO:
        config = {} if is_hub_name(target) else _config(target)
        if read_proposal(config, Path(target) / "config.json") is not None:
            return None
        choice = published_drafter(target, config)
        draft = choice.drafter.name
        logger.warning("draft is auto: %s drafts for %s: %s", draft, target, choice.reason)
    return find_checkpoint(draft, revision, "draft_revision")


def _own_pair(config: EngineConfig) -> EngineConfig:
    for name in ("revision", "draft_revision"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name} is {getattr(config, name)!r}, but no target is named; name one on the "
                f"Hugging Face hub, or leave {name} out."
            )
    draft = config.draft
    if draft == AUTO or (draft is None and config.method in (None, *DRAFTER_METHODS)):
        draft = str(DEMO_MODELS / "draft")
    elif draft is not None:
        draft = find_checkpoint(draft, None)
    return replace(config, target=str(DEMO_MODELS / "target"), draft=draft)


def _named_pair(config: EngineConfig) -> EngineConfig:
    if is_packaged(config.target) and config.method in (None, *DRAFTER_METHODS):
        config = replace(config, draft=config.draft or AUTO)
    draft = _find_drafter(config.draft, config.draft_revision, config.target)
    path = find_checkpoint(config.target, config.revision)
    proposal = read_proposal(_config(path), Path(path) / "config.json")
    if proposal is not None:
        return _proposed_pair(config, proposal, path)
    if draft is None and config.draft_revision is not None:
        raise ValueError(
            f"draft_revision is {config.draft_revision!r}, but no drafter is named; name one, or "
            "leave draft_revision out."
        )
    return replace(config, target=path, draft=draft, revision=None, draft_revision=None)


def _proposed_pair(config: EngineConfig, proposal: Proposal, path: str) -> EngineConfig:
    """Resolve a speculators checkpoint named as the target; it sets drafter and method."""
    target_name = config.target
    verifier = proposal.verifier
    if proposal.method not in BLOCK_DRAFTERS:
        raise ValueError(
            f"{target_name} is a speculators checkpoint that drafts with {proposal.method!r}, but "
            f"only {', '.join(map(repr, BLOCK_DRAFTERS))} are supported; name its target, "
            f"{verifier}, and a drafter for one of these methods."
        )
    for name in ("draft", "draft_revision", "method"):
        value = getattr(config, name)
        is_default = (
            value == AUTO if name == "draft" else name == "method" and value in DRAFTER_METHODS
        )
        if value is not None and not is_default:
            raise ValueError(
                f"{name} is {value!r}, but {target_name} is a drafter that brings its own; leave "
                f"{name} out, or name its target, {verifier}, as the target."
            )
    target = find_checkpoint(verifier, None)
    if not Path(target).is_dir():
        raise ValueError(
            f"{target_name} drafts for {verifier}, which is not a directory here; name a local "
            f"target, and {target_name} as the drafter."
        )
    logger.warning("%s is a drafter: its target is %s", target_name, verifier)
    drafts = config.num_drafts if config.num_drafts is not None else proposal.num_drafts
    changes: dict[str, Any] = {"target": target, "draft": path, "revision": None}
    method = None if config.shadow else config.method or "dflash"
    return replace(config, **changes, method=method, num_drafts=drafts)


def _config(path: str) -> dict[str, Any]:
    """Read config.json, or return {} if it cannot be read: loading the checkpoint reports why."""
    with suppress(ValueError):
        return read_json(Path(path) / "config.json")
    return {}
