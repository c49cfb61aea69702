"""Facts about a checkpoint from its config.json alone: its kind, and whether it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.config import EngineConfig
from strobe.hub.files import read_json
from strobe.models.architectures import read_draft_config, read_target_config
from strobe.models.config_readers.detection import detect
from strobe.models.config_readers.pair import check_pair
from strobe.models.model_config import TargetConfig
from strobe.models.quantization import methods
from strobe.models.quantization.published import QUANT_FILE, format_name
from strobe.models.weight_loading import check_draft_tensors, check_target_tensors
from strobe.tools.checkpoint_info import decoder_facts, drafting_facts
from strobe.tools.memory_table import memory_facts


def is_config(name: str) -> bool:
    """Whether the name belongs to a JSON file."""
    path = Path(name)
    return path.suffix == ".json" and path.is_file()


def describe_config(path: Path, draft: Path | None = None) -> dict[str, Any]:
    """Return the facts of a target's or a drafter's config, and of a drafter for the target if
    `draft` is set, a config or a directory. Of a checkpoint that does not load, "reason" has the
    error. Raises ValueError for a file that holds no config."""
    config = read_json(path)
    dialect = detect(config)
    if dialect is not None and draft is not None:
        raise ValueError(f"{path} is a drafter itself; name the target first, then --draft.")
    if dialect is not None:
        return _draft_facts(path)
    facts: dict[str, Any] = {
        "path": str(path),
        "kind": "target",
        "architecture": ", ".join(map(str, config.get("architectures") or ())) or "not named",
    }
    directory = _directory(path)
    target: TargetConfig | None = None
    try:
        target = read_target_config(path, directory)
        module = check_target_tensors(directory, target, open=None)
    except ValueError as error:
        facts |= _weights(config, directory)
        facts |= {"loads": False, "reason": str(error)}
    else:
        facts["architecture"] = target.architecture
        facts["parameters"] = sum(parameter.numel() for parameter in module.parameters())
        facts |= {**decoder_facts(target.decoder), "dtype": target.dtype}
        if target.quantization is not None:
            facts["quantization"] = methods.describe(target.quantization, target.decoder)
        facts["loads"] = True
        facts["memory"] = memory_facts(EngineConfig(target=str(directory)), target)
    if draft is not None:
        facts["draft"] = _draft_facts(draft if draft.is_file() else draft / "config.json", target)
    return facts


def loads(facts: dict[str, Any]) -> bool:
    """Whether all that the facts describe loads, and the pair fits."""
    drafter = facts.get("draft")
    return facts["loads"] and (drafter is None or loads(drafter))


def _draft_facts(path: Path, target: TargetConfig | None = None) -> dict[str, Any]:
    """Return the facts of a drafter's config. target: the config that it must fit."""
    config = read_json(path)
    directory = _directory(path)
    dialect = detect(config)
    facts: dict[str, Any] = {"path": str(path), "kind": "no drafter"}
    if dialect is not None:
        facts["kind"] = f"{dialect.method} drafter"
    if dialect is not None and dialect.runs:
        facts["format"] = dialect.format
    try:
        draft = read_draft_config(path, directory)
        facts |= {**decoder_facts(draft.decoder), **drafting_facts(draft)}
        module = check_draft_tensors(directory, draft, open=None)
        facts["parameters"] = sum(parameter.numel() for parameter in module.parameters())
        if target is not None:
            check_pair(draft, target, path)
    except ValueError as error:
        facts |= _weights(config, directory)
        facts |= {"loads": False, "reason": str(error)}
    else:
        facts["loads"] = True
    return facts


def _directory(path: Path) -> Path:
    """Return the directory of the files that belong to a config; for one with another name than
    config.json a path at which there are none."""
    return path.parent if path.name == "config.json" else path


def _weights(config: dict[str, Any], directory: Path) -> dict[str, str]:
    """Return the format of quantized weights, by its name."""
    description = directory / QUANT_FILE
    name = format_name(config, read_json(description) if description.exists() else None, ())
    return {} if name is None else {"weights": f"quantized by {name}"}
