"""Find the reader of a checkpoint's config.json, by the target's architecture or the drafter's
format."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from strobe.hub.files import read_json, source_of
from strobe.models.config_readers.detection import (
    READERS,
    detect,
    dialect_of,
    method_of,
    supported_methods,
)
from strobe.models.config_readers.fields import Fields
from strobe.models.config_readers.pair import check_ids
from strobe.models.families import FAMILIES
from strobe.models.heads import HEADS, ChecksDrafter
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.quantization import methods
from strobe.models.quantization.methods import read_quantization
from strobe.models.quantization.published import QUANT_FILE, check_format

if TYPE_CHECKING:
    from strobe.models.target import Target


def _family(architecture: str) -> ModuleType:
    return importlib.import_module(f"strobe.models.families.{FAMILIES[architecture][1]}")


def load_target_config(directory: Path) -> TargetConfig:
    """Read the target's config. Raises ValueError if it is damaged or not supported."""
    return read_target_config(directory / "config.json", directory)


def read_target_config(path: Path, directory: Path) -> TargetConfig:
    """Read a config that may have another name. directory: of the files that go with it, which
    need not exist. See `load_target_config`."""
    config = with_description(read_json(path), directory)
    method = method_of(config)
    if method is not None:
        hint = "name it as the drafter"
        if method not in HEADS:
            hint = f"use a drafter for {supported_methods()}"
        raise ValueError(
            f"{path} describes a drafter for {method}, not a target; name the model it drafts for "
            f"as the target, and {hint}."
        )
    names = config.get("architectures")
    kind = config.get("model_type")
    if not names:
        names = [name for name, (model_type, _) in FAMILIES.items() if model_type == kind]
    family = FAMILIES.get(names[0]) if isinstance(names, list) and len(names) == 1 else None
    if family is not None or not (names or kind):
        check_format(config, path, hint=methods.HINT, running=methods.METHODS)
    if family is None or family[0] != kind:
        raise ValueError(
            f"{path}: architectures {names!r} with model_type {kind!r} is not a supported target; "
            f"use a checkpoint of one of {', '.join(FAMILIES)}."
        )
    source = source_of(directory)  # a GGUF file's config.json is ours: errors name the file
    fields = Fields(config, path if source == directory else source)
    return _family(names[0]).read(fields, directory)


def with_description(config: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the config with the quantization that a checkpoint describes only in ModelOpt's file;
    unchanged if it describes one itself."""
    path = directory / QUANT_FILE
    text = config.get("text_config")
    parts = (config, text if isinstance(text, dict) else {})
    if any(part.get("quantization_config") for part in parts) or not path.exists():
        return config
    values = read_json(path).get("quantization")
    if not isinstance(values, dict) or not values:
        return config
    return {**config, "quantization_config": {"quant_algo": None, **values}}


def make_target(config: TargetConfig, max_positions: int) -> Target:
    """Make the module of the config's family; without weights on the meta device."""
    return _family(config.architecture).make(config, max_positions)


def load_draft_config(directory: Path, target: Path | None = None) -> DraftConfig:
    """Read a drafter's config. target: its target's directory, for values that older
    drafters lack. Raises ValueError that names the wrong value."""
    return read_draft_config(directory / "config.json", directory, target)


def read_draft_config(path: Path, directory: Path, target: Path | None = None) -> DraftConfig:
    """Read a config that may have another name; see `read_target_config` and
    `load_draft_config`."""
    config = with_description(read_json(path), directory)
    known = detect(config)
    if known is None or known.runs:
        check_format(config, path, hint="use the unquantized drafter.", running=methods.METHODS)
    dialect = dialect_of(config, path)
    if (side := directory / "mask_embedding.pt").exists():
        raise ValueError(
            f"{side} replaces the embedding of the mask token, which is not supported; use a "
            "drafter without it."
        )
    module = importlib.import_module(f"strobe.models.config_readers.{READERS[dialect.format]}")
    values = config.pop("quantization_config", None)
    draft: DraftConfig = module.read(config, path, dialect, target)
    check_ids(draft, path)
    if isinstance(draft.head, ChecksDrafter):
        draft.head.check(draft, path)
    fields = Fields({"quantization_config": values}, path)
    return replace(draft, quantization=read_quantization(fields, draft.decoder))
