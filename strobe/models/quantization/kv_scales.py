"""Scales of keys and values in FP8, which checkpoints of compressed-tensors and ModelOpt have next
to the weights of attention: one number for the keys and one for the values of a layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import torch

from strobe.kv.kv_store import NO_SCALE, KVScale, KVStore
from strobe.models.checkpoint import Checkpoint
from strobe.models.model_config import Quantization
from strobe.models.modules import Attention
from strobe.models.target import Target
from strobe.models.weight_mapping import FLOATS

logger = logging.getLogger(__name__)

NAMES = {
    "keys": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "attn.k_scale", "kv_scale"),
    "values": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "attn.v_scale", "kv_scale"),
}
"""Tensors next to an attention's weights, by what they scale."""


def use_kv_scales(
    store: KVStore, target: Target, checkpoint: Checkpoint, quantization: Quantization | None
) -> None:
    """Let the target's keys and values in FP8 have the checkpoint's scales, and log what becomes of
    these if there are any."""
    layers = scaled_layers(target, checkpoint.shapes)
    if not layers:
        return
    unused = _unused_reason(store.spec.dtype, quantization)
    if unused is not None:
        logger.info(
            "%s: the scales of keys and values of %d layers have no effect: %s.",
            checkpoint.source,
            layers,
            unused,
        )
        return
    store.scales = read_kv_scales(target, checkpoint, quantization)
    logger.info("%s: keys and values of %d layers have scales.", checkpoint.source, layers)


def _unused_reason(dtype: torch.dtype, quantization: Quantization | None) -> str | None:
    if dtype.itemsize > 1:
        return "keys and values are not stored in FP8, which kv_cache_dtype fp8 asks for"
    kv_format = None if quantization is None else quantization.kv_format
    if kv_format not in (None, "fp8"):
        return f"they are for keys and values in {kv_format}"
    return None


def read_kv_scales(
    target: Target, checkpoint: Checkpoint, quantization: Quantization | None
) -> list[KVScale]:
    """Return the scales for FP8 of the target's layers with attention, 1 where the checkpoint has
    none. Raises ValueError for scales that are not one number above zero each."""
    attentions = {path: m for path, m in target.named_modules() if isinstance(m, Attention)}
    scales = [NO_SCALE] * len(attentions)
    if _unused_reason(torch.float8_e4m3fn, quantization) is not None:
        return scales
    for path, attention in attentions.items():
        keys = _read(checkpoint, path, "keys")
        values = _read(checkpoint, path, "values")
        scales[attention.layer] = KVScale(keys=keys, values=values)
    return scales


def scaled_layers(target: Target, shapes: Mapping[str, object]) -> int:
    """Return the number of layers that have a scale of keys or values."""
    names = {name for kind in NAMES.values() for name in kind}
    paths = [path for path, m in target.named_modules() if isinstance(m, Attention)]
    return sum(any(f"{path}.{name}" in shapes for name in names) for path in paths)


def _read(checkpoint: Checkpoint, path: str, kind: str) -> float:
    """Return a layer's scale; 1 if there is none."""
    name = next((n for n in NAMES[kind] if f"{path}.{n}" in checkpoint.shapes), None)
    if name is None:
        return 1.0
    name = f"{path}.{name}"
    shape = checkpoint.shapes[name]
    if math.prod(shape) != 1 or checkpoint.dtypes[name] not in FLOATS:
        raise ValueError(
            f"{checkpoint.source}: tensor {name} has shape {list(shape)} and holds "
            f"{checkpoint.dtypes[name]} values, but scales of keys and values in FP8 must be one "
            "number for a layer; use kv_cache_dtype auto."
        )
    value = float(checkpoint.read(name).float().flatten()[0])
    checkpoint.release(name)
    if not math.isfinite(value) or value <= 0:
        raise ValueError(
            f"{checkpoint.source}: tensor {name} is {value}, but a scale must be a finite number "
            "above zero; use kv_cache_dtype auto, or download the checkpoint again."
        )
    return value
