"""Detection of a drafter's speculative method and config format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.models.config_readers.fields import Fields
from strobe.models.heads import HEADS, head_of

DFLASH = "DFlash"
DSPARK = "DSpark"
_DEEPSPEC = "Qwen3DSparkModel"

_ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "Qwen3DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": "DFlash2",
    "DFlareDraftModel": "DFlare",
    "DSparkDraftModel": DSPARK,
    "Gemma4DSparkModel": DSPARK,
    "MuseGlimmerAssistantModel": "the Muse-Glimmer assistant",
}
_SPECULATORS = {
    "dflash": DFLASH,
    "dflash2": "DFlash2",
    "dspark": DSPARK,
    "domino": "Domino",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "mtp": "MTP",
}
_PARTS = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "medusa": "Medusa", "mtp": "MTP"}
_KEYS = {"selector_rank": "DFlash2", "conv_kernel_size": "DFlash2"}
"""Keys of `dflash_config` that only drafters of other methods have."""

SUPPORTED = "use a DFlash drafter in z-lab's, speculators' or DeepSpec's format"


def method_of(config: dict[str, Any]) -> str | None:
    """Return the speculative method of the drafter's config; None if unknown."""
    kind = _speculators(config)
    if kind is not None:
        return _SPECULATORS.get(str(kind), str(kind))
    names = _architectures(config)
    if _deepspec(config):
        plain = config.get("markov_rank") == 0 and not config.get("enable_confidence_head")
        return DFLASH if plain else DSPARK
    nested = config.get("dflash_config")
    inner: dict[str, Any] = nested if isinstance(nested, dict) else {}
    kind = inner.get("projector_type") or config.get("projector_type")
    if kind is not None and (nested or any("DFlash" in name for name in names)):
        return _SPECULATORS.get(str(kind).lower(), str(kind))
    for key, method in _KEYS.items():
        if inner.get(key) is not None:
            return method
    for name in names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        for part, method in _PARTS.items():
            if part in name.lower():
                return method
    return DFLASH if nested else None


def format_of(config: dict[str, Any], path: Path) -> str:
    """Return the reader module of the config: "zlab", "speculators" or "deepspec". Raises
    ValueError unless it is the config of a drafter whose head is in `HEADS`."""
    method = method_of(config)
    if method is None:
        raise ValueError(
            f"{path}: architectures {config.get('architectures')!r} is not a DFlash drafter; name "
            "a directory with one in z-lab's, speculators' or DeepSpec's format."
        )
    if method not in HEADS:
        raise ValueError(f"{path} describes a drafter for {method}, not DFlash; {SUPPORTED}.")
    if _speculators(config) is not None:
        return "speculators"
    return "deepspec" if _deepspec(config) else "zlab"


def read_head(config: dict[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the config's method and what its head reads from `fields`, as DraftConfig fields."""
    method = method_of(config)
    assert method is not None
    fields.get("projector_type")  # `method_of` has read it
    return {"method": method, "head": head_of(method).read(fields)}


def _speculators(config: dict[str, Any]) -> object:
    """Return the method as speculators' format names it; None for other formats."""
    nested = config.get("speculators_config")
    about: dict[str, Any] = nested if isinstance(nested, dict) else {}
    return config.get("speculators_model_type") or about.get("algorithm")


def _deepspec(config: dict[str, Any]) -> bool:
    names = _architectures(config)
    return _DEEPSPEC in names or (not names and "markov_rank" in config)


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []
