"""Which method a drafter's config.json belongs to, and what in it cannot be honoured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DFLASH = "DFlash"

_ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "Qwen3DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": "DFlash2",
    "Qwen3DSparkModel": "DSpark (or DeepSpec's DFlash, whose first slot predicts too)",
    "DSparkDraftModel": "DSpark",
    "MuseGlimmerAssistantModel": "the Muse-Glimmer assistant",
}
_SPECULATORS = {
    "dflash": DFLASH,
    "dflash2": "DFlash2",
    "dspark": "DSpark",
    "domino": "Domino",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "mtp": "MTP",
}
_PARTS = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "medusa": "Medusa", "mtp": "MTP"}


def method_of(config: dict[str, Any]) -> str | None:
    """The speculative method whose drafter the config is of; None where it is of none known."""
    kind = config.get("speculators_model_type")
    if kind is not None:
        return _SPECULATORS.get(str(kind), str(kind))
    found = config.get("architectures")
    names = [str(name) for name in found] if isinstance(found, list) else []
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        for part, method in _PARTS.items():
            if part in name.lower():
                return method
    return DFLASH if config.get("dflash_config") else None


def check_method(config: dict[str, Any], path: Path) -> None:
    """Raises ValueError, in one sentence, for what is no DFlash drafter in z-lab's format, or one
    whose mathematics is not supported."""
    mend = "use a DFlash drafter in z-lab's format"
    method = method_of(config)
    if method is None:
        raise ValueError(
            f"{path}: architectures {config.get('architectures')!r} is not a DFlash drafter; name "
            "a directory with a DFlashDraftModel in z-lab's format."
        )
    if method != DFLASH:
        raise ValueError(f"{path} is that of a drafter for {method}, not DFlash; {mend}.")
    if config.get("speculators_model_type") is not None:
        raise ValueError(
            f"{path} is that of a DFlash drafter in the speculators format, which is not supported "
            f"yet; {mend}."
        )
