"""Published DFlash drafters by the target that they were trained for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strobe.hub.download import is_hub_name, snapshot_of, without_revision

PAIRS = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-30B-A3B": "RedHatAI/Qwen3-30B-A3B-speculator.dflash",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "Qwen/Qwen3.5-4B": "z-lab/Qwen3.5-4B-DFlash",
    "Qwen/Qwen3.5-9B": "z-lab/Qwen3.5-9B-DFlash",
    "Qwen/Qwen3.5-27B": "z-lab/Qwen3.5-27B-DFlash",
    "Qwen/Qwen3.5-35B-A3B": "z-lab/Qwen3.5-35B-A3B-DFlash",
    "Qwen/Qwen3.5-122B-A10B": "z-lab/Qwen3.5-122B-A10B-DFlash",
    "Qwen/Qwen3.5-397B-A17B": "z-lab/Qwen3.5-397B-A17B-DFlash",
    "Qwen/Qwen3.6-27B": "z-lab/Qwen3.6-27B-DFlash",
    "Qwen/Qwen3.6-35B-A3B": "z-lab/Qwen3.6-35B-A3B-DFlash",
    "google/gemma-4-12B-it": "z-lab/gemma4-12B-it-DFlash",
    "google/gemma-4-26B-A4B-it": "z-lab/gemma-4-26B-A4B-it-DFlash",
    "google/gemma-4-31B-it": "z-lab/gemma-4-31B-it-DFlash",
    "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
    "openai/gpt-oss-120b": "z-lab/gpt-oss-120b-DFlash",
}
"""Hub names of target and drafter."""

_BY_SIZE = {
    ("qwen3", 2560, 36, 40960): "Qwen/Qwen3-4B",
    ("qwen3", 4096, 36, 40960): "Qwen/Qwen3-8B",
    ("gpt_oss", 2880, 24, 131072): "openai/gpt-oss-20b",
    ("gpt_oss", 2880, 36, 131072): "openai/gpt-oss-120b",
}
"""Targets by model_type, hidden_size, num_hidden_layers and max_position_embeddings, if no other
published model of the family shares all four."""


def published_drafter(target: str, config: Mapping[str, Any]) -> str:
    """Return the hub name of the target's drafter. Raises ValueError listing the known targets if
    there is none.

    target: as the user named it; config: its config.json if it is a directory, else {}.
    """
    drafters = {name.lower(): drafter for name, drafter in PAIRS.items()}
    for name in (*_names(target, config), _BY_SIZE.get(_size(config), "")):
        if name.lower() in drafters:
            return drafters[name.lower()]
    raise ValueError(
        f"draft is auto, but no published DFlash drafter is known for {target}; name the drafter, "
        f"or one of these targets: {', '.join(PAIRS)}."
    )


def _names(target: str, config: Mapping[str, Any]) -> list[str]:
    """Return the target's possible names on the hub, the most certain first."""
    if is_hub_name(target):
        return [without_revision(target)]
    snapshot = snapshot_of(Path(target))
    candidates = [snapshot.name] if snapshot is not None else []
    return [*candidates, str(config.get("_name_or_path"))]


def _size(config: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("model_type", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    return tuple(config.get(key) for key in keys)
