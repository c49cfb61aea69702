"""Formats, bytes and rounding errors of each kind of a checkpoint's weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.engine.backend_choice import WeightFormat
from strobe.models.checkpoint import Checkpoint
from strobe.models.config_readers.tensor_names import names_in_files
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.quantization.forms import Form, form_of
from strobe.models.quantization.fp8 import fp8_rows
from strobe.models.quantization.packed import FORMATS, head_format, int4_groups, int8_rows
from strobe.models.quantization.rounding import rounded
from strobe.models.quantization.rules import Scheme
from strobe.models.weight_mapping import FLOATS, CheckpointTensors

LEAVES = ("weight", "weight_packed", "qweight")
"""Tensors that hold the values of a weight X, as X.leaf."""
ROWS = 1024
"""Of one weight of each kind, whose error is measured."""
MXFP4 = "MXFP4"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_NAMES = tuple(_DTYPES.values())


class Held(NamedTuple):
    """How weights are held in memory, and what that does to values."""

    name: str
    round: Callable[[Tensor], Tensor] | None = None
    """Rows [N, K] in float32 -> their values in memory; None if they are exact."""


@dataclass
class Kind:
    """The weights of one kind. stored: number of weights by the name of their format; nbytes: in
    the checkpoint; sample: the first one's rows in float32, None if they cannot be read alone."""

    stored: Counter[str] = field(default_factory=Counter[str])
    nbytes: int = 0
    sample: Callable[[], Tensor] | None = None


def kinds_of(checkpoint: Checkpoint, config: TargetConfig | DraftConfig) -> dict[str, Kind]:
    """Return the kinds of weights of a checkpoint of safetensors, from its headers."""
    tensors = checkpoint.tensors
    kinds: dict[str, Kind] = {}
    stems: dict[str, str] = {}
    for name in checkpoint.shapes:
        stem, _, leaf = name.rpartition(".")
        if leaf in LEAVES and len(checkpoint.shapes[name]) > 1:
            stems[stem] = leaf
    for name, shape in checkpoint.shapes.items():
        stem, _, leaf = name.rpartition(".")
        kind = kinds.setdefault(_kind(name, shape, is_weight=stem in stems), Kind())
        kind.nbytes += checkpoint.bytes_of(name)
        if name.endswith("_blocks"):
            kind.stored[MXFP4] += 1
        if stems.get(stem) != leaf:
            if stem not in stems and not name.endswith(("_scales", "_blocks")):
                kind.stored[checkpoint.dtypes[name]] += 1
                kind.sample = kind.sample or _sampler(checkpoint, name, None)
            continue
        form = _form(stem, leaf, tensors, config)
        kind.stored[checkpoint.dtypes[name] if form is None else str(form.scheme)] += 1
        if kind.sample is None:
            kind.sample = _sampler(checkpoint, name, form)
    return kinds


def _kind(name: str, shape: tuple[int, ...], *, is_weight: bool) -> str:
    """Return what a tensor is part of."""
    parts = {
        "lm_head": "head",
        "embed_tokens": "embedding",
        ".experts.": "experts",
        "linear_attn.": "recurrent layers",
        "self_attn.": "attention",
        "mlp.": "MLP",
        "shared_expert": "MLP",
    }
    if len(shape) < 2 and not is_weight:
        return "norms and others"
    return next((kind for part, kind in parts.items() if part in name), "other matrices")


def _form(
    stem: str, leaf: str, tensors: CheckpointTensors, config: TargetConfig | DraftConfig
) -> Form | None:
    """Return the form of a weight in the checkpoint; None if it is not quantized."""
    quantization = config.quantization
    if quantization is None:
        return None
    declared = quantization.rules.scheme_of(names_in_files(stem))
    if quantization.method == "fp8":
        declared = Scheme(kind="float", bits=8, block=quantization.block)
    shape = _shape(stem, leaf, tensors, declared)
    return form_of(f"{stem}.weight", shape, tensors, declared)


def _shape(
    stem: str, leaf: str, tensors: CheckpointTensors, declared: Scheme | None
) -> tuple[int, ...]:
    """Return the shape [N, K] of a weight, derived from the shape of its codes."""
    shape = tensors.shapes[f"{stem}.{leaf}"]
    dtype = tensors.dtypes[f"{stem}.{leaf}"]
    bits = 4 if declared is None else declared.bits
    if leaf == "qweight":
        inputs, outputs = shape
        columns = tensors.shapes[f"{stem}.scales"][1]
        return (columns, inputs if outputs != columns else inputs * 32 // bits)
    if len(shape) != 2 or dtype not in ("I32", "U8"):
        return shape
    return (shape[0], shape[1] * (32 // bits if dtype == "I32" else 2))


def _sampler(checkpoint: Checkpoint, name: str, form: Form | None) -> Callable[[], Tensor] | None:
    """Return what reads the first rows of a weight."""
    if form is None:
        if checkpoint.dtypes[name] not in FLOATS:
            return None
        return lambda: _rows(checkpoint.read(name))

    def read() -> Tensor:
        weight = form.read([checkpoint.read(source) for source in form.sources])
        return weight.rows(0, min(ROWS, weight.shape[0]))

    return read


def _rows(weight: Tensor) -> Tensor:
    """Return the first rows of a tensor in float32; a vector is one."""
    return torch.atleast_2d(weight).flatten(0, -2)[:ROWS].float()


def _cast(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.to(dtype).float()


def _rounded(rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    return rounded(rows.to(dtype), name).rows(0, len(rows))


def _in_fp8(rows: Tensor, dtype: torch.dtype) -> Tensor:
    values, scale = fp8_rows(rows.to(dtype))
    return values.float() * scale[:, None]


def held_kinds(
    config: TargetConfig | DraftConfig, weights: WeightFormat, dtype: torch.dtype
) -> Mapping[str, Held]:
    """Return the form of each kind of weights in memory; "" stands for all other kinds."""
    quantization = config.quantization
    plain = Held(_name(dtype), partial(_cast, dtype=dtype))
    stored = Held("as stored")
    linear = plain
    head = plain
    experts = plain
    if weights.packed is not None:
        linear = _packed(weights.packed)
        make = head_format(FORMATS[weights.packed], dtype)
        head = _packed(next(name for name, kind in FORMATS.items() if kind is make))
    elif weights.rounded is not None:
        linear = Held(weights.rounded, partial(_rounded, name=weights.rounded, dtype=dtype))
    elif weights.fp8:
        linear = Held("fp8, a scale per row", partial(_in_fp8, dtype=dtype))
        experts = linear
    if quantization is not None and quantization.method in ("fp8", "mxfp4"):
        experts = stored
    kinds = {"attention": linear, "MLP": linear, "recurrent layers": linear, "head": head}
    kinds |= {"experts": experts, "other matrices": linear, "": plain}
    return kinds


def storage_facts(
    checkpoint: Checkpoint,
    config: TargetConfig | DraftConfig,
    weights: WeightFormat,
    dtype: torch.dtype,
    *,
    measure: bool = True,
) -> dict[str, dict[str, Any]]:
    """Return, for each kind of weights: its formats in the checkpoint, its bytes there, its form in
    memory, and the largest and the mean error of a sample, as shares of the largest and the mean
    size of its values; None if they are rounded and `measure` is False, so that no weight is
    read."""
    held = held_kinds(config, weights, dtype)
    keeps = config.quantization is not None and config.quantization.held
    facts: dict[str, dict[str, Any]] = {}
    for name, kind in kinds_of(checkpoint, config).items():
        ways = held.get(name, held[""])
        is_quantized = any(stored not in FLOATS for stored in kind.stored)
        if keeps and is_quantized:
            ways = Held("as stored")
        error = None
        if ways.round is None or (ways.name in _NAMES and _is_exact(kind.stored, ways.name)):
            error = {"max": 0.0, "mean": 0.0}
        elif measure and kind.sample is not None:
            error = errors(kind.sample(), ways.round)
        facts[name] = {
            "stored": dict(kind.stored.most_common()),
            "bytes": kind.nbytes,
            "held": ways.name,
            "error": error,
        }
    return facts


def _is_exact(stored: Collection[str], held: str) -> bool:
    """Whether formats are exact in a dtype without a look at the values."""
    if held == "float32":
        return set(stored) <= {*FLOATS, "MXFP4"}
    return {_DTYPES.get(name) for name in stored} == {held}


def errors(values: Tensor, round: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Return the largest and the mean error of rounding, as shares of the largest and the mean
    size of values [N, K]."""
    difference = (round(values) - values).abs()
    size = values.abs()
    return {
        "max": float(difference.max() / size.max().clamp(min=1e-30)),
        "mean": float(difference.mean() / size.mean().clamp(min=1e-30)),
    }


def _packed(name: str) -> Held:
    """Return the form of a CPU's packed weights in memory."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "bfloat16": lambda rows: rows.bfloat16().float(),
        "float16": lambda rows: rows.half().float(),
        "int8": _int8,
        "int4": _int4,
    }
    return Held(name, functions.get(name))


def _int8(rows: Tensor) -> Tensor:
    values, scale = int8_rows(rows)
    return values.float() * scale.float()[:, None]


def _int4(rows: Tensor) -> Tensor:
    codes, scales = int4_groups(rows)
    scale, zero = scales.float().unbind(2)
    groups = codes.unflatten(1, (scale.shape[1], -1)).float() - 8
    return (groups * scale[..., None] + zero[..., None]).flatten(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage_text(facts: Mapping[str, Any]) -> str:
    """Format one kind's facts for reading."""
    stored = ", ".join(f"{count} in {_DTYPES.get(n, n)}" for n, count in facts["stored"].items())
    error = facts["error"]
    if error is None:
        exact = "rounded"
    elif not error["max"]:
        exact = "exact"
    else:
        exact = f"error {error['mean']:.2%} on average, {error['max']:.2%} at most"
    return f"{stored}, {facts['bytes']:,} bytes; held {_in(facts['held'])}, {exact}"


def _in(held: str) -> str:
    return held if held.startswith("as ") else f"in {held}"
