"""Checkpoints of NVIDIA's ModelOpt.

quantization_config, or "quantization" in hf_quant_config.json, has one `quant_algo`, or one for
each of `quantized_layers`, and `ignore` or `exclude_modules`. `config_groups` repeats it for other
programs and contradicts it in some published files, so it is not read. Weights keep the name
`weight`: in FP8 with `weight_scale`; in NVFP4 as bytes, with `weight_scale` and `weight_scale_2`.
"""

from __future__ import annotations

from typing import Any

from strobe.models.config_readers.fields import Fields
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization.compressed_tensors import read_kv_format, read_names
from strobe.models.quantization.detected import apply, describe, experts_format
from strobe.models.quantization.rules import FP8, LINEAR, MXFP8, NVFP4, Rule, Rules, Scheme

__all__ = ["apply", "describe", "experts_format", "read"]

MIXED = "MIXED_PRECISION"
ALGORITHMS = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "FP8_PB_WO": FP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "MXFP8": MXFP8,
}
WEIGHT_ONLY = ("W4A16_NVFP4", "None", "NONE")
"""Algorithms that leave activations as they are."""
_HARMLESS = (
    "quant_method", "producer", "config_groups",
    "group_size", "moe_quant_algo", "activation_scheme", "fmt", "scale_fmt", "has_zero_point",
    "pre_quant_scale", "weight_block_size", "version",
)  # fmt: skip


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError for an unknown algorithm."""
    algorithm = fields.get("quant_algo")
    layers = fields.object("quantized_layers")
    rules = [
        Rule((name,), scheme)
        for name, entry in layers.items()
        if (scheme := _scheme(_algorithm(entry), f"{fields.path}: quantized_layers.{name}"))
    ]
    if not layers and algorithm != MIXED:
        scheme = _scheme(algorithm, f"{fields.path}: quant_algo")
        rules += [Rule(LINEAR, scheme)] if scheme else []
    ignored = tuple(read_names(fields, "ignore", "exclude_modules"))
    algorithms = {str(_algorithm(entry)) for entry in layers.values()} or {str(algorithm)}
    activations = bool(algorithms.difference(WEIGHT_ONLY))
    algorithm = fields.get("kv_cache_quant_algo")
    kv_format = read_kv_format(fields) if algorithm is None else str(algorithm).lower()
    fields.finish(_HARMLESS)
    names = Rules(rules=tuple(rules), ignored=ignored, loose=True)
    return Quantization(
        method="modelopt",
        block=(1, 1),
        rules=names,
        kv_format=kv_format,
        activations=activations,
    )


def _algorithm(entry: Any) -> Any:
    return entry.get("quant_algo") if isinstance(entry, dict) else entry


def _scheme(algorithm: Any, place: str) -> Scheme | None:
    """Return the scheme of an algorithm, None for none."""
    if algorithm in (None, "NONE"):
        return None
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"{place} is {algorithm!r}, which is not supported; use a checkpoint in "
            f"{', '.join(ALGORITHMS)} or {MIXED}."
        )
    return ALGORITHMS[algorithm]
