"""Formats of quantized checkpoints that do not run, by the names that their users know."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

QUANT_FILE = "hf_quant_config.json"
"""ModelOpt's description of a checkpoint. Older exports have it only there, not in config.json."""
_PRODUCERS = {
    "awq": "AWQ",
    "gptq": "GPTQ",
    "auto-round": "AutoRound",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
}
_ALGORITHMS = {
    "FP8": "FP8 with a scale per tensor",
    "MIXED_PRECISION": "mixed precision",
    "W4A16_NVFP4": "NVFP4",
}
"""ModelOpt's algorithms whose names say less than they could."""


def format_name(
    config: dict[str, Any],
    description: dict[str, Any] | None = None,
    running: Collection[str] = (),
) -> str | None:
    """Return the format of a quantized checkpoint, such as "ModelOpt in NVFP4"; None if the
    checkpoint is not quantized, or in a format that runs.

    description: of `QUANT_FILE`, if there is one. running: `quant_method` of the formats that run.
    """
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        mlx = part.get("quantization")
        if isinstance(mlx, dict) and "bits" in mlx:
            return f"MLX in {mlx['bits']} bits"
        values = part.get("quantization_config")
        if isinstance(values, dict) and values:
            return _name(values, running)
    values = (description or {}).get("quantization")
    if not isinstance(values, dict) or not values:
        return None
    return _name({"quant_algo": None, **values}, running)


def check_format(
    config: dict[str, Any],
    path: Path,
    *,
    hint: str,
    description: dict[str, Any] | None = None,
    running: Collection[str] = (),
) -> None:
    """Raises ValueError that names the format if a checkpoint is in one that does not run. hint:
    what to use; for the rest see `format_name`."""
    name = format_name(config, description, running)
    if name is not None:
        raise ValueError(
            f"{path}: the weights are quantized by {name}, which is not supported yet; {hint}"
        )


def _name(values: dict[str, Any], running: Collection[str]) -> str | None:
    method = method_name(values)
    if method in running:
        return None
    name = _PRODUCERS.get(method, f"quant_method {values.get('quant_method')!r}")
    kinds = _modelopt_kinds(values) if method == "modelopt" else _kinds(values)
    return f"{name} in {' and '.join(kinds)}" if kinds else name


def method_name(values: dict[str, Any]) -> str:
    """Return the method of a quantization_config. ModelOpt's files name another one or none in
    some checkpoints."""
    return "modelopt" if "quant_algo" in values else str(values.get("quant_method"))


def _modelopt_kinds(values: dict[str, Any]) -> list[str]:
    layers = values.get("quantized_layers")
    algorithms: set[str] = set()
    if isinstance(layers, dict):
        entries = (entry for entry in layers.values() if isinstance(entry, dict))
        algorithms = {str(entry.get("quant_algo")) for entry in entries}
    if not algorithms and values.get("quant_algo") is not None:
        algorithms = {str(values["quant_algo"])}
    if len(algorithms) > 1:
        return sorted({name.removeprefix("W4A16_") for name in algorithms})
    return [_ALGORITHMS.get(name, name) for name in algorithms]


def _kinds(values: dict[str, Any]) -> list[str]:
    """Return the kinds of weights in a quantization_config of another producer."""
    if isinstance(values.get("bits"), int):
        return [f"{values['bits']} bits"]
    groups = values.get("config_groups")
    kinds: list[str] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        kind = _kind(group) if isinstance(group, dict) else None
        if kind is not None and kind not in kinds:
            kinds.append(kind)
    return kinds


def _kind(group: dict[str, Any]) -> str | None:
    """Return the kind of one of compressed-tensors' groups."""
    weights = group.get("weights")
    if not isinstance(weights, dict) or not isinstance(weights.get("num_bits"), int):
        return None
    bits = weights["num_bits"]
    size = weights.get("group_size")
    if weights.get("type") == "float":
        if bits == 4:
            return "MXFP4" if size == 32 else "NVFP4"
        return f"FP{bits}"
    return f"int{bits}" + (f" with groups of {size}" if isinstance(size, int) and size > 0 else "")
