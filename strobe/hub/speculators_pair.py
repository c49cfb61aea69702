"""The pair that a speculators checkpoint's config.json describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_DRAFTERS = ("dflash", "dflash2", "dspark")
"""The library's names of methods whose drafters run."""


@dataclass(frozen=True)
class Proposal:
    """A drafter's target, its method, and the number of tokens to draft per step."""

    verifier: str
    method: str
    num_drafts: int


def read_proposal(config: Mapping[str, Any], path: Path) -> Proposal | None:
    """Parse config.json; return None if it is not of the speculators library. Raises ValueError
    naming a wrong key.

    Some exporters wrote the block size as speculative_tokens. Unless the anchor predicts a draft,
    too, a block has one draft less than slots, so block_size - 1 is the maximum.
    """
    if "speculators_config" not in config and "speculators_model_type" not in config:
        return None
    section = _mapping(config.get("speculators_config"), "speculators_config", path)
    verifier = _mapping(section.get("verifier"), "speculators_config.verifier", path)
    name = verifier.get("name_or_path")
    if not isinstance(name, str) or not name:
        raise _wrong("speculators_config.verifier.name_or_path", name, "name the target", path)
    methods = section.get("proposal_methods")
    if not isinstance(methods, list) or not methods:
        raise _wrong("speculators_config.proposal_methods", methods, "list at least one", path)
    first = _mapping(methods[0], "speculators_config.proposal_methods[0]", path)
    drafts = first.get("speculative_tokens")
    if isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 1:
        location = "speculators_config.proposal_methods[0].speculative_tokens"
        raise _wrong(location, drafts, "be a whole number of at least 1", path)
    block = config.get("block_size")
    if isinstance(block, int) and block > 1 and not config.get("sample_from_anchor"):
        drafts = min(drafts, block - 1)
    method = config.get("speculators_model_type") or section.get("algorithm")
    return Proposal(name, str(method), drafts)


def _mapping(value: object, key: str, path: Path) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(key, value, "be an object", path)
    return value


def _wrong(key: str, value: object, must: str, path: Path) -> ValueError:
    return ValueError(
        f"{path}: {key} is {value!r}, but must {must}; use the config.json the checkpoint was "
        "published with."
    )
