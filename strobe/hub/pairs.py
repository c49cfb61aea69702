"""Published block drafters by the target that they were trained for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from strobe.hub.download import is_hub_name, snapshot_of, without_revision


class PublishedDrafter(NamedTuple):
    """A drafter's hub name and its speculative method. compared: whether its acceptance was
    published by the authors of the method or of the speculators library."""

    name: str
    method: str
    compared: bool = True


METHODS = ("DFlash2", "DSpark", "DFlash")
"""Methods whose heads run, on layers like Qwen3's, best first: DFlash2's authors report 6.20, 5.69
and 4.99 tokens per step for Qwen3.5-4B on GSM8K, and 4.80 of DFlash2 and 3.62 of DSpark for
Qwen3.8-27B."""

_GEMMA_DSPARK = "DSpark with Gemma 4's layers"


def _dflash2(name: str) -> PublishedDrafter:
    return PublishedDrafter(name=name, method="DFlash2")


def _dspark(name: str, *, compared: bool = True) -> PublishedDrafter:
    return PublishedDrafter(name=name, method="DSpark", compared=compared)


def _dflash(name: str, *, compared: bool = True) -> PublishedDrafter:
    return PublishedDrafter(name=name, method="DFlash", compared=compared)


PAIRS: Mapping[str, Sequence[PublishedDrafter]] = {
    "Qwen/Qwen3-4B": (
        _dflash2("RedHatAI/Qwen3-4B-speculator.dflash2"),
        _dflash2("mgoin/Qwen3-4B-speculator.dflash2"),
        _dspark("deepseek-ai/dspark_qwen3_4b_block7"),
        _dflash("z-lab/Qwen3-4B-DFlash-b16"),
    ),
    "Qwen/Qwen3-8B": (
        _dflash2("RedHatAI/Qwen3-8B-speculator.dflash2"),
        _dspark("deepseek-ai/dspark_qwen3_8b_block7"),
        _dflash("z-lab/Qwen3-8B-DFlash-b16"),
        _dspark("Dogacel/Qwen3-8B-DSpark", compared=False),
    ),
    "Qwen/Qwen3-14B": (_dspark("deepseek-ai/dspark_qwen3_14b_block7"),),
    "Qwen/Qwen3-30B-A3B": (_dflash("RedHatAI/Qwen3-30B-A3B-speculator.dflash"),),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (
        _dflash("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.dflash"),
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (_dflash("z-lab/Qwen3-Coder-30B-A3B-DFlash"),),
    "Qwen/Qwen3.5-0.8B": (
        _dspark("satgeze/Qwen3.5-0.8B-DSpark", compared=False),
        _dflash("Moonlight556/Qwen3.5-0.8B-DFlash", compared=False),
    ),
    "Qwen/Qwen3.5-4B": (_dflash("z-lab/Qwen3.5-4B-DFlash"),),
    "Qwen/Qwen3.5-9B": (_dflash("z-lab/Qwen3.5-9B-DFlash"),),
    "Qwen/Qwen3.5-27B": (_dflash("z-lab/Qwen3.5-27B-DFlash"),),
    "Qwen/Qwen3.5-35B-A3B": (_dflash("z-lab/Qwen3.5-35B-A3B-DFlash"),),
    "Qwen/Qwen3.5-122B-A10B": (_dflash("z-lab/Qwen3.5-122B-A10B-DFlash"),),
    "Qwen/Qwen3.5-397B-A17B": (_dflash("z-lab/Qwen3.5-397B-A17B-DFlash"),),
    "Qwen/Qwen3.6-27B": (
        _dflash("z-lab/Qwen3.6-27B-DFlash"),
        _dspark("satgeze/Qwen3.6-27B-DSpark", compared=False),
        _dspark("Avesed/Qwen3.6-27B-DSpark", compared=False),
    ),
    "Qwen/Qwen3.6-35B-A3B": (
        _dspark("RedHatAI/Qwen3.6-35B-A3B-speculator.dspark"),
        _dflash("z-lab/Qwen3.6-35B-A3B-DFlash"),
        _dspark("Koopah/Qwen3.6-35B-A3B-NVFP4-DSPARK", compared=False),
    ),
    "Qwen/Qwen3.8-27B": (
        _dflash2("z-lab/Qwen3.8-27B-DFlash2"),
        _dflash2("incoai/Qwen3.8-27B-DFlash2"),
        _dspark("RadixArk/Qwen3.8-27B-DSpark"),
        _dspark("Doopeworld/Qwen3.8-27B-DSpark-vLLM", compared=False),
    ),
    "google/gemma-4-12B-it": (
        PublishedDrafter("deepseek-ai/dspark_gemma4_12b_block7", _GEMMA_DSPARK),
        _dflash("z-lab/gemma4-12B-it-DFlash"),
    ),
    "google/gemma-4-26B-A4B-it": (
        _dflash("z-lab/gemma-4-26B-A4B-it-DFlash"),
        _dspark("makora-ai/gemma4-26b-a4b-dspark", compared=False),
    ),
    "google/gemma-4-31B-it": (
        _dspark("RedHatAI/gemma-4-31B-it-speculator.dspark"),
        _dflash("z-lab/gemma-4-31B-it-DFlash"),
    ),
    "meta-llama/Llama-3.1-8B-Instruct": (_dflash("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),),
    "openai/gpt-oss-20b": (_dflash("z-lab/gpt-oss-20b-DFlash"),),
    "openai/gpt-oss-120b": (_dflash("z-lab/gpt-oss-120b-DFlash"),),
}
"""Drafters by the hub name of their target, best first: by method among those whose acceptance was
published, then the others."""

_SAME = {
    "Qwen/Qwen3-8B-AWQ": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B-FP8": "Qwen/Qwen3-30B-A3B",
    "nvidia/Qwen3.5-122B-A10B-NVFP4": "Qwen/Qwen3.5-122B-A10B",
    "nvidia/Qwen3.5-397B-A17B-NVFP4": "Qwen/Qwen3.5-397B-A17B",
    "nvidia/Qwen3.6-35B-A3B-NVFP4": "Qwen/Qwen3.6-35B-A3B",
    "RedHatAI/Qwen3.6-35B-A3B-NVFP4": "Qwen/Qwen3.6-35B-A3B",
    "Qwen/Qwen3.8-27B-FP8": "Qwen/Qwen3.8-27B",
    "cyankiwi/Qwen3.8-27B-AWQ-INT4": "Qwen/Qwen3.8-27B",
    "nvidia/Qwen3.8-27B-NVFP4": "Qwen/Qwen3.8-27B",
    "RadixArk/Qwen3.8-27B-NVFP4": "Qwen/Qwen3.8-27B",
    "unsloth/Qwen3.8-27B-NVFP4": "Qwen/Qwen3.8-27B",
    "nvidia/Gemma-4-26B-A4B-NVFP4": "google/gemma-4-26B-A4B-it",
    "google/gemma-4-31B-it-qat-w4a16-ct": "google/gemma-4-31B-it",
    "nvidia/Gemma-4-31B-IT-NVFP4": "google/gemma-4-31B-it",
    "RedHatAI/gemma-4-31B-it-FP8-Dynamic": "google/gemma-4-31B-it",
}
"""Quantized copies of targets, which take the same drafters."""

_BY_SIZE = {
    ("qwen3", 2560, 36, 40960): "Qwen/Qwen3-4B",
    ("qwen3", 4096, 36, 40960): "Qwen/Qwen3-8B",
    ("gpt_oss", 2880, 24, 131072): "openai/gpt-oss-20b",
    ("gpt_oss", 2880, 36, 131072): "openai/gpt-oss-120b",
}
"""Targets by model_type, hidden_size, num_hidden_layers and max_position_embeddings, if no other
published model of the family shares all four."""


class Choice(NamedTuple):
    """The drafter that `auto` takes, and why it was preferred to the others."""

    drafter: PublishedDrafter
    reason: str


def published_drafter(
    target: str, config: Mapping[str, Any], running: Collection[str] = METHODS
) -> Choice:
    """Choose among the target's published drafters. Raises ValueError listing the known targets if
    there is none that runs.

    target: as the user named it; config: its config.json if it is a directory, else {}; running:
    methods that run.
    """
    drafters = {name.lower(): entries for name, entries in PAIRS.items()}
    drafters |= {name.lower(): PAIRS[base] for name, base in _SAME.items()}
    for name in (*_names(target, config), _BY_SIZE.get(_size(config), "")):
        choice = _choose(drafters.get(name.lower(), ()), running)
        if choice is not None:
            return choice
    known = [name for name, entries in PAIRS.items() if _choose(entries, running) is not None]
    raise ValueError(
        f"draft is auto, but no published drafter is known for {target}; name the drafter, or one "
        f"of these targets: {', '.join(known)}."
    )


def _choose(drafters: Sequence[PublishedDrafter], running: Collection[str]) -> Choice | None:
    """Return the first drafter that runs; None if none does."""
    first = next((drafter for drafter in drafters if drafter.method in running), None)
    if first is None:
        return None
    others = [drafter for drafter in drafters if drafter is not first]
    if not others:
        return Choice(first, f"the only published one, for {first.method}")
    advantage = _advantage(first, [other for other in others if other.method in running])
    named = [
        f"{other.name} ({other.method}{'' if other.method in running else ': does not run'})"
        for other in others
    ]
    return Choice(first, f"for {first.method}, {advantage}; also published: {', '.join(named)}")


def _advantage(first: PublishedDrafter, others: Sequence[PublishedDrafter]) -> str:
    """Return what the first has and the others that run have not."""
    if not others:
        return "the only one that runs"
    if METHODS.index(first.method) <= min(METHODS.index(other.method) for other in others):
        return "the method with the most accepted tokens"
    return "the best method whose authors published its acceptance"


def _names(target: str, config: Mapping[str, Any]) -> list[str]:
    """Return the target's possible names on the hub, in descending order of certainty."""
    if is_hub_name(target):
        return [without_revision(target)]
    snapshot = snapshot_of(Path(target))
    candidates = [snapshot.name] if snapshot is not None else []
    return [*candidates, str(config.get("_name_or_path"))]


def _size(config: Mapping[str, Any]) -> tuple[Any, ...]:
    keys = ("model_type", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    return tuple(config.get(key) for key in keys)
