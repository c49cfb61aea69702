"""Finds the directories of target and drafter: the demo models, hub names, a drafter that names its
own target, and `auto`."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.hub.download import directory, is_hub_name
from strobe.hub.files import read_json
from strobe.hub.pairs import published_drafter
from strobe.hub.speculators import Proposal, read_proposal

logger = logging.getLogger(__name__)

AUTO = "auto"

_DRAFTER = ("dflash", "dflash+ngram")  # methods that need one


def locate_models(config: EngineConfig) -> EngineConfig:
    """The settings with target and draft as local directories, what is not there downloaded except
    for the weights: `hub.fetch_weights` has them once the configs are known to be good.

    No target means the demo models. A target that is a speculators checkpoint gives the target it
    was trained for, the method and the drafts per step, and becomes the drafter. Settings that are
    located already come back as they are. Raises ValueError.
    """
    config = _own_pair(config) if not config.target else _named_pair(config)
    if config.method in _DRAFTER and config.draft is None:
        raise ValueError(
            f"method is {config.method!r} but no drafter is named; give draft a directory."
        )
    return config


def named(target: str, draft: str | None) -> tuple[str, str | None]:
    """Both as local directories, without asking what they are. Raises ValueError."""
    drafter = _drafter(draft, None, target)
    return directory(target, None), drafter


def _drafter(draft: str | None, revision: str | None, target: str) -> str | None:
    """The drafter's directory; none where the target is a drafter that names its own."""
    if draft is None:
        return None
    if draft == AUTO:
        config = {} if is_hub_name(target) else _config(target)
        if read_proposal(config, Path(target) / "config.json") is not None:
            return None
        draft = published_drafter(target, config)
        logger.warning("draft is auto: %s drafts for %s", draft, target)
    return directory(draft, revision, "draft_revision")


def _own_pair(config: EngineConfig) -> EngineConfig:
    for name in ("revision", "draft_revision"):
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name} is {getattr(config, name)!r}, but no target is named; name one on the "
                f"Hugging Face hub, or leave {name} out."
            )
    draft = config.draft
    if draft == AUTO or (draft is None and config.method in (None, *_DRAFTER)):
        draft = str(DEMO_MODELS / "draft")
    elif draft is not None:
        draft = directory(draft, None)
    return replace(config, target=str(DEMO_MODELS / "target"), draft=draft)


def _named_pair(config: EngineConfig) -> EngineConfig:
    draft = _drafter(config.draft, config.draft_revision, config.target)
    path = directory(config.target, config.revision)
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
    """A speculators checkpoint given as the target: all but drafter and method may be chosen."""
    target_name, verifier = config.target, proposal.verifier
    if proposal.method != "dflash":
        raise ValueError(
            f"{target_name} is a speculators checkpoint that drafts with {proposal.method!r}, "
            "but only "
            f"'dflash' is supported; name its target, {verifier}, and a DFlash drafter."
        )
    for name in ("draft", "draft_revision", "method"):
        value = getattr(config, name)
        is_default = value == AUTO if name == "draft" else name == "method" and value in _DRAFTER
        if value is not None and not is_default:
            raise ValueError(
                f"{name} is {value!r}, but {target_name} is a drafter that brings its own; leave "
                f"{name} "
                f"out, or name its target, {verifier}, as the target."
            )
    target = directory(verifier, None)
    if not Path(target).is_dir():
        raise ValueError(
            f"{target_name} drafts for {verifier}, which is not a directory here; name its target "
            "yourself, and it as the drafter."
        )
    logger.warning("%s is a drafter: its target is %s", target_name, verifier)
    drafts = config.num_drafts if config.num_drafts is not None else proposal.num_drafts
    changes: dict[str, Any] = {"target": target, "draft": path, "revision": None}
    method = config.method or proposal.method
    return replace(config, **changes, method=method, num_drafts=drafts)


def _config(path: str) -> dict[str, Any]:
    """config.json, empty where it cannot be read: whoever loads the checkpoint says why."""
    with suppress(ValueError):
        return read_json(Path(path) / "config.json")
    return {}
