"""Detection of a drafter's speculative method and of the dialect of its config.json.

Labels do not tell dialects apart: `Qwen3DSparkModel` stands on flat and on nested files, and
`DFlashDraftModel` on files with a Markov head. So keys decide first, and labels only where there
are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.heads import HEADS, head_of

DFLASH = "DFlash"
DFLASH2 = "DFlash2"
DSPARK = "DSpark"

Z_LAB = "z-lab"
SPECULATORS = "speculators"
DEEPSPEC = "DeepSpec"
SPECFORGE = "SpecForge"
MODELOPT = "ModelOpt"

READERS = {
    Z_LAB: "zlab",
    SPECFORGE: "zlab",
    MODELOPT: "zlab",
    DEEPSPEC: "deepspec",
    SPECULATORS: "speculators",
}
"""Formats of config.json and the module that reads each."""

_ARCHITECTURES = {
    "DFlashDraftModel": DFLASH,
    "DFlashSpeculator": DFLASH,
    "Qwen3DFlashDraftModel": DFLASH,
    "DFlash2DraftModel": DFLASH2,
    "DFlash2BeamDraftModel": DFLASH2,
    "Qwen3DFlash2Model": DFLASH2,
    "DSparkDraftModel": DSPARK,
    "DSparkSpeculator": DSPARK,
    "Qwen3DSparkModel": DSPARK,
}
"""Labels of methods whose drafters may have heads that run, with layers like Qwen3's."""

_OTHERS = {
    "DFlashLagunaForCausalLM": "Laguna's DFlash",
    "MiniMaxDFlash2DraftModel": "MiniMax's DFlash2",
    "DFlareDraftModel": "DFlare",
    "DominoDraftModel": "Domino",
    "LiLiCorrDraftModel": "LiLiCorr",
    "Qwen3XPressModel": "XPress",
    "DFlashQwen3XPressModel": "XPress",
    "XPressSpeculator": "XPress",
    "JetSpecDraftModel": "JetSpec",
    "MuseGlimmerAssistantModel": "the Muse-Glimmer assistant",
    "Gemma4DSparkModel": "DSpark with Gemma 4's layers",
    "Qwen35DSparkModel": "DSpark with Qwen3.5's layers",
    "Lfm2DSparkDraftModel": "LFM2's DSpark",
    "K3DSparkModel": "Kimi K3's DSpark",
    "Qwen3OmniDSparkModel": "Qwen3-Omni's DSpark",
    "MuseSparkDSparkModel": "Muse-Spark's DSpark",
    "DSparkV41DraftModel": "DeepSeek-V4.1's DSpark",
}
"""Labels of drafters that do not run, and the names in their errors."""

_MODEL_TYPES = {
    "laguna": "Laguna's DFlash",
    "muse_glimmer_assistant": "the Muse-Glimmer assistant",
    "gemma4_text": "DSpark with Gemma 4's layers",
}
"""The same by `model_type`; targets of these types have no mask token."""

_KINDS = {
    "dflash": DFLASH,
    "dflash2": DFLASH2,
    "dspark": DSPARK,
    "dflare": "DFlare",
    "domino": "Domino",
    "jetspec": "JetSpec",
    "lilicorr": "LiLiCorr",
    "xpress": "XPress",
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "mtp": "MTP",
}
"""Methods by speculators' names, and by SpecForge's and ModelOpt's `projector_type`."""
_PARTS = {"eagle3": "EAGLE-3", "eagle": "EAGLE", "medusa": "Medusa", "mtp": "MTP"}
"""Parts of other labels."""

_OTHER_KEYS = {
    "enable_qwen35_gated_q_proj": "DSpark with gated queries, as in Ornith's",
    "lilicorr_candidate_topk": "LiLiCorr",
    "xpress_rank": "XPress",
    "causal_head": "JetSpec",
    "gru_hidden_dim": "Domino",
}
"""Keys that only drafters of other methods have, unless they are false or null."""
MARKOV_KEYS = ("markov_rank", "dspark_markov_rank", "markov_head_type")
CONFIDENCE_KEYS = (
    "enable_confidence_head", "use_confidence_head", "confidence_head_with_markov"
)  # fmt: skip
"""Keys of DSpark's heads."""
_MODELOPT_KEYS = ("use_confidence_head", "shift_label", "use_swa")
"""Keys that ModelOpt writes into the `dflash_config` of a DSpark drafter."""
_SELECTOR_KEYS = ("selector_rank", "conv_kernel_size")
_EMBEDDED_KEY = "dspark_block_size"
"""Key of a target that contains DSpark's layers, as DeepSeek-V4."""
_PARD_KEY = "pard_token"
"""Key of PARD's drafters, whole models under the label of a target."""


@dataclass(frozen=True)
class Dialect:
    """A drafter's speculative method, and the format of its config.json, one of `READERS`."""

    method: str
    format: str

    @property
    def runs(self) -> bool:
        return self.method in HEADS


class _Keys:
    """The values of a config.json, in `dflash_config` or at the top level."""

    def __init__(self, config: dict[str, Any]):
        nested = config.get("dflash_config")
        self.outer = config
        self.inner: dict[str, Any] = nested if isinstance(nested, dict) else {}
        self.has_inner = bool(nested)
        names = config.get("architectures")
        self.names = [str(name) for name in names] if isinstance(names, list) else []

    @property
    def is_flat_drafter(self) -> bool:
        """Whether drafting keys stand at the top level, under no label or under a target's."""
        is_target = all(name.endswith("ForCausalLM") for name in self.names)
        drafting = (self.outer.get("mask_token_id"), self.outer.get("target_layer_ids"))
        return is_target and None not in drafting

    def values(self, *keys: str) -> Iterator[Any]:
        for part in (self.inner, self.outer):
            for key in keys:
                if part.get(key) is not None:
                    yield part[key]

    def any(self, *keys: str) -> bool:
        """Whether a key is set, and not to false."""
        return any(value is not False for value in self.values(*keys))


def detect(config: dict[str, Any]) -> Dialect | None:
    """Return the dialect of a drafter's config; None if it does not describe a drafter."""
    keys = _Keys(config)
    kind = _speculators(config)
    if kind is not None:
        return Dialect(method=_KINDS.get(str(kind).lower(), str(kind)), format=SPECULATORS)
    method = _other_method(keys) or _dspark_method(keys)
    if method in (DFLASH, DSPARK):
        return Dialect(method=method, format=_dspark_format(keys))
    if method is None:
        method = _dflash_method(keys)
    if method is None and keys.any(_PARD_KEY):
        method = "PARD"
    return None if method is None else Dialect(method=method, format=Z_LAB)


def method_of(config: dict[str, Any]) -> str | None:
    """Return the speculative method of the drafter's config; None if it describes no drafter."""
    dialect = detect(config)
    return None if dialect is None else dialect.method


def supported_methods() -> str:
    """List the methods whose drafters run."""
    *first, last = HEADS
    return f"{', '.join(first)} or {last}" if first else last


def dialect_of(config: dict[str, Any], path: Path) -> Dialect:
    """Return the dialect of a drafter's config. Raises ValueError unless its head runs."""
    dialect = detect(config)
    hint = f"use a drafter for {supported_methods()}."
    names = config.get("architectures")
    if dialect is None and config.get(_EMBEDDED_KEY) is not None:
        raise ValueError(
            f"{path}: architectures {names!r} is a target that contains DSpark's layers "
            f"({_EMBEDDED_KEY} is {config[_EMBEDDED_KEY]!r}), which is not supported; {hint}"
        )
    if dialect is None:
        raise ValueError(
            f"{path}: architectures {names!r} is not a drafter for {supported_methods()}; name a "
            "directory with one."
        )
    if not dialect.runs:
        raise ValueError(
            f"{path} describes a drafter for {dialect.method}, which is not supported; {hint}"
        )
    keys = _Keys(config)
    selector = [key for key in _SELECTOR_KEYS if keys.any(key)]
    if dialect.method == DSPARK and selector:
        value = next(keys.values(selector[0]))
        raise ValueError(
            f"{path}: {selector[0]} is {value!r}, a key of DFlash2, beside keys of DSpark's heads, "
            f"but a drafter is for one of the two; {HINT}"
        )
    return dialect


def read_head(method: str, fields: Fields) -> dict[str, Any]:
    """Return the method and what its head reads from `fields`, as DraftConfig fields."""
    fields.get("projector_type")  # `detect` has read it
    if method == DFLASH:  # and found that these keys turn both heads off
        for key in (*MARKOV_KEYS, *CONFIDENCE_KEYS):
            fields.get(key)
    return {"method": method, "head": head_of(method).read(fields)}


def _speculators(config: dict[str, Any]) -> object:
    """Return the method as speculators' format names it; None for other formats."""
    nested = config.get("speculators_config")
    about: dict[str, Any] = nested if isinstance(nested, dict) else {}
    return config.get("speculators_model_type") or about.get("algorithm")


def _projector(keys: _Keys) -> str | None:
    """Return the method that `projector_type` names. Other models have a key of that name."""
    kind = next(keys.values("projector_type"), None)
    if kind is None or not (keys.has_inner or any("Draft" in name for name in keys.names)):
        return None
    return _KINDS.get(str(kind).lower(), str(kind))


def _other_method(keys: _Keys) -> str | None:
    """Return the method of a drafter that does not run; None for others."""
    if keys.outer.get("jetspec_config"):
        return "JetSpec"
    for key, method in _OTHER_KEYS.items():
        if keys.any(key) and (keys.has_inner or "DSpark" in method):
            return method
    method = _projector(keys)
    if method not in (None, DFLASH, DFLASH2, DSPARK):
        return method
    for name in keys.names:
        if name in _OTHERS:
            return _OTHERS[name]
    kind = str(keys.outer.get("model_type"))
    if kind in _MODEL_TYPES and keys.any("mask_token_id"):
        return _MODEL_TYPES[kind]
    if "DSparkDraftModel" in keys.names and keys.any(_EMBEDDED_KEY, "hc_mult"):
        return "DeepSeek-V4's DSpark"
    if any(name not in _ARCHITECTURES and "DSpark" in name for name in keys.names):
        return f"DSpark with the layers of {keys.names[0]}"
    return None


def _dspark_method(keys: _Keys) -> str | None:
    """Return DSpark, or DFlash for a file of that family without either of its heads; None for
    drafters of other methods."""
    ranks = list(keys.values("markov_rank", "dspark_markov_rank"))
    has_confidence = keys.any(*CONFIDENCE_KEYS[:2])
    is_labelled = any(_ARCHITECTURES.get(name) == DSPARK for name in keys.names)
    is_labelled = is_labelled or _projector(keys) == DSPARK
    is_drafter = is_labelled or keys.has_inner or "DFlashDraftModel" in keys.names
    if ranks and (not keys.names or keys.is_flat_drafter):  # a copy whose label is lost or wrong
        is_drafter = True
    if not is_drafter or not (is_labelled or has_confidence or keys.any(*MARKOV_KEYS)):
        return None
    return DFLASH if ranks and not any(ranks) and not has_confidence else DSPARK


def _dspark_format(keys: _Keys) -> str:
    """Return the format of a drafter of DSpark's family. DeepSpec's files are flat; one under
    DFlash's label repeats some keys in `dflash_config`."""
    if "num_anchors" in keys.outer:
        return DEEPSPEC
    if keys.has_inner and any(key in keys.inner for key in _MODELOPT_KEYS):
        return MODELOPT
    if _projector(keys) == DSPARK:
        return SPECFORGE
    if any(_ARCHITECTURES.get(name) == DFLASH for name in keys.names):
        return Z_LAB
    return SPECFORGE if keys.has_inner else DEEPSPEC


def _dflash_method(keys: _Keys) -> str | None:
    """Return the method of a drafter without DSpark's keys; None if it is none."""
    is_drafter = keys.has_inner or any(name in _ARCHITECTURES for name in keys.names)
    is_drafter = is_drafter or keys.is_flat_drafter
    if is_drafter and keys.any(*_SELECTOR_KEYS):
        return DFLASH2
    if not keys.names and keys.any(_SELECTOR_KEYS[0]):  # a copy whose label is lost
        return DFLASH2
    if keys.has_inner and _projector(keys) is not None:
        return _projector(keys)
    for name in keys.names:
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        for part, method in _PARTS.items():
            if part in name.lower():
                return method
    return DFLASH if keys.has_inner or keys.is_flat_drafter else None
