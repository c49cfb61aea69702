"""Checkpoints of compressed-tensors, as published by RedHatAI, unsloth and others.

quantization_config has `config_groups`, each with `targets` and the form of their `weights`, and
`ignore`, the layers that are not quantized. Weights are stored in FP8 (`weight`, `weight_scale`),
in int8 so, in int4 or int8 packed in words (`weight_packed`, `weight_scale`, perhaps
`weight_zero_point`), in NVFP4 or in MXFP4.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization.detected import apply, describe, experts_format
from strobe.models.quantization.rules import FP8, LINEAR, MXFP4, MXFP8, NVFP4, Rule, Rules, Scheme

__all__ = ["apply", "describe", "experts_format", "read"]

FORMATS = (
    None, "dense", "float-quantized", "int-quantized", "naive-quantized", "pack-quantized",
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
PRESETS = {
    "FP8": FP8,
    "FP8_DYNAMIC": FP8,
    "FP8_BLOCK": Scheme(kind="float", bits=8, block=(128, 128)),
    "W8A8": Scheme(kind="int", bits=8),
    "INT8": Scheme(kind="int", bits=8),
    "W8A16": Scheme(kind="int", bits=8),
    "W4A16": Scheme(kind="int", bits=4, group=128),
    "W4A16_ASYM": Scheme(kind="int", bits=4, group=128, asymmetric=True),
    "W4A8": Scheme(kind="int", bits=4, group=128),
    "W4AFP8": Scheme(kind="int", bits=4, group=128),
    "NVFP4": NVFP4,
    "NVFP4A16": NVFP4,
    "MXFP4": MXFP4,
    "MXFP4A16": MXFP4,
    "MXFP8": MXFP8,
    "MXFP8A16": MXFP8,
}
"""Groups that a config names and does not describe."""
_USE = "use another checkpoint of the model."


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError for weights that are sparse, transformed or of an unknown form."""
    if (stored := fields.get("format")) not in FORMATS:
        raise ValueError(f"{fields.path}: format is {stored!r}, which is not supported; {_USE}")
    sparsity = fields.object("sparsity_config")
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(
            f"{fields.path}: sparsity_config.format is {sparsity['format']!r}, but sparse weights "
            f"are not supported; {_USE}"
        )
    transform = fields.object("transform_config")
    if any(transform.values()):
        raise ValueError(
            f"{fields.path}: transform_config is {transform!r}, but weights that are to be "
            f"transformed are not supported; {_USE}"
        )
    groups = fields.object("config_groups")
    rules = Rules(
        tuple(_rule(name, group, fields.path) for name, group in groups.items()),
        tuple(read_names(fields, "ignore")),
    )
    kv_format = read_kv_format(fields)
    fields.finish(
        ("quant_method", "quantization_status", "global_compression_ratio", "version", "producer")
    )
    return Quantization(
        method="compressed-tensors",
        block=(1, 1),
        rules=rules,
        kv_format=kv_format,
        activations=any(map(_rounds_activations, groups, groups.values())),
    )


def _rounds_activations(name: str, group: Any) -> bool:
    """Whether a group of config_groups rounds activations, by its description or its preset."""
    if isinstance(group, dict):
        return bool(group.get("input_activations"))
    return "A16" not in (group if isinstance(group, str) else name)


def read_kv_format(fields: Fields) -> str | None:
    """Return what kv_cache_scheme says of keys and values, as "fp8" or "int8". Some files of
    ModelOpt have the name of the format there."""
    name = fields.get("kv_cache_scheme")
    if isinstance(name, str):
        return name.lower()
    scheme = fields.object("kv_cache_scheme")
    if not scheme:
        return None
    return f"{'fp' if scheme.get('type') == 'float' else 'int'}{scheme.get('num_bits')}"


def _rule(name: str, group: Any, path: Path) -> Rule:
    if isinstance(group, list) and name in PRESETS:  # targets of a preset
        return Rule(tuple(map(str, group)), PRESETS[name])
    if isinstance(group, str) and group in PRESETS:
        return Rule(LINEAR, PRESETS[group])
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        raise ValueError(
            f"{path}: config_groups.{name} is {group!r}, but must describe weights or be one of "
            f"{', '.join(PRESETS)}; {HINT}"
        )
    targets = group.get("targets") or LINEAR
    return Rule(tuple(map(str, targets)), _scheme(weights, f"{path}: config_groups.{name}.weights"))


def _scheme(weights: dict[str, Any], place: str) -> Scheme:
    bits = weights.get("num_bits")
    kind = weights.get("type", "int")
    sizes = {"int": (2, 4, 8), "float": (4, 8)}
    if bits is None or kind not in sizes or bits not in sizes[kind]:
        raise ValueError(
            f"{place} has {bits!r} bits of type {kind!r}, which is not supported; {_USE}"
        )
    if weights.get("dynamic"):
        raise ValueError(f"{place}.dynamic is true, but weights have stored scales; {HINT}")
    group = weights.get("group_size")
    block = weights.get("block_structure")
    return Scheme(
        kind=kind,
        bits=bits,
        group=group if isinstance(group, int) and group > 0 else None,
        block=(block[0], block[1]) if isinstance(block, list) and len(block) == 2 else None,
        asymmetric=kind == "int" and weights.get("symmetric") is False,
    )


def read_names(fields: Fields, *keys: str) -> list[str]:
    """Return the names in lists of modules. Raises ValueError for other values."""
    names = list[str]()
    for key in keys:
        value = fields.get(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ValueError(f"{fields.path}: {key} is {value!r}, but must list names; {HINT}")
        names += value
    return names
