"""FP8 checkpoints, as published for Qwen3 and DeepSeek: a weight `X.weight` in e4m3 with one scale
per block in `X.weight_scale_inv`. In memory, FP8 weights have one scale per row; experts keep their
blocks.

quantization_config is `{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
"weight_block_size": [128, 128], "modules_to_not_convert": [...]}`. The dtypes of the tensors tell
which weights are quantized.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.linear import Linear, LinearView
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization import detected, fp8_tensors
from strobe.models.quantization.fp8_formats import (
    FP8_ROWS,
    STORED,
    Fp8Groups,
    fill_bytes_of,
    fill_scales,
)
from strobe.models.quantization.held import hold, scale_at
from strobe.models.quantization.rules import LINEAR, Rule, Rules, Scheme
from strobe.models.quantization.value_checks import check_scales
from strobe.models.weight_mapping import (
    FLOATS,
    Blocks,
    CheckpointTensors,
    Fill,
    WeightMapping,
    WeightPart,
    copy,
)

HINT_OTHER = "use a checkpoint in FP8 with scales by blocks, or an unquantized one."
SCALE = "_scale_inv"
_ROWS = 1024


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError unless weights are in e4m3 with one scale per block, or one per weight."""
    if fields.get("weight_block_size") is None:
        return fp8_tensors.read(fields, decoder)
    fields.only("fmt", "e4m3", why=HINT_OTHER)
    fields.only("activation_scheme", "dynamic", why=HINT_OTHER)
    block = fields.ids("weight_block_size")
    if block is None or len(block) != 2 or 0 in block:
        raise ValueError(
            f"{fields.path}: quantization_config.weight_block_size is {block!r}, but must be two "
            f"whole numbers of at least 1, such as [128, 128]; {HINT}"
        )
    fields.finish(("modules_to_not_convert", "ignored_layers", "scale_fmt"))
    return Quantization(method="fp8", block=(block[0], block[1]), activations=True)


def apply(
    module: nn.Module,
    mapping: WeightMapping,
    tensors: CheckpointTensors,
    quantization: Quantization,
) -> WeightMapping:
    """Hold experts in FP8, and dequantize other FP8 tensors when they are read, unless layers keep
    theirs as stored. A linear layer is held in FP8 only if all its tensors are stored in FP8, which
    is assumed without `tensors`."""
    kept: WeightMapping = {}
    if quantization.held:
        experts = {
            f"{path}.weight"
            for path, linear in module.named_modules()
            if isinstance(linear, Linear) and linear.weight.ndim == 3
        }
        others = {name: parts for name, parts in mapping.items() if name not in experts}
        by_block = Scheme(kind="float", bits=8, block=quantization.block)
        # The dtypes decide, so that any layer may be unquantized: "" is part of every name.
        rules = Rules(rules=(Rule(LINEAR, by_block),), ignored=("",), loose=True)
        kept = detected.apply(module, others, tensors, replace(quantization, rules=rules))
        mapping = {name: mapping[name] for name in experts}
    every = chain.from_iterable(part.sources for parts in mapping.values() for part in parts)
    dtypes = tensors.dtypes or dict.fromkeys(every, STORED)
    add_scales = partial(_with_scales, dtypes=dtypes, block=quantization.block)
    scaled = {name: [add_scales(part) for part in parts] for name, parts in mapping.items()}
    for path, linear in module.named_modules():
        if isinstance(linear, Linear) and f"{path}.weight" in mapping:
            parts = mapping[f"{path}.weight"]
            sources = chain.from_iterable(part.sources for part in parts)
            if any(dtypes.get(name) != STORED for name in sources):
                linear.fixed = True
            elif linear.weight.ndim == 3 and all(part.fill is copy for part in parts):
                scaled |= _hold_blocks(path, linear, parts, quantization)
    return kept | scaled


def experts_format(quantization: Quantization, inputs: int) -> Fp8Groups:
    """Experts keep their blocks; see `Method.experts_format`."""
    return Fp8Groups(quantization.block[1])


def describe(quantization: Quantization, decoder: DecoderConfig) -> str:
    """See `Method.describe`."""
    rows, columns = quantization.block
    held = "kept in FP8 with a scale per row on a GPU with FP8, else dequantized"
    if decoder.experts is not None:
        held = f"experts kept as they are, the rest {held}"
    return f"fp8, a scale per {rows} x {columns} values, {held}"


def _hold_blocks(
    path: str, linear: Linear, parts: list[WeightPart], quantization: Quantization
) -> WeightMapping:
    """Make experts hold their values, and each block's scale once per row."""
    block = quantization.block
    count, outputs, inputs = linear.weight.shape
    values = list[WeightPart]()
    scales = list[WeightPart]()
    for part in parts:
        (name,) = part.sources
        *outer, rows, _ = linear.weight[part.at].shape
        shape = (*outer, -(-rows // block[0]), -(-inputs // block[1]))
        fill = partial(fill_scales, rows=block[0])
        values.append(part._replace(fill=fill_bytes_of, dtypes=(STORED,)))
        at = scale_at(part.at)
        blocks = {name + SCALE: Blocks(name, block)}
        scale_sources = {name + SCALE: shape}
        own = part._replace(
            sources=scale_sources,
            at=at,
            fill=fill,
            blocks=blocks,
            checks={name + SCALE: check_scales},
        )
        scales.append(own)
    hold(
        linear,
        experts_format(quantization, inputs),
        values=(count, outputs, inputs),
        scale=(count, -(-inputs // block[1]), outputs),
        scale_dtype=torch.float32,
    )
    return {f"{path}.weight": values, f"{path}.scale": scales}


def _with_scales(
    part: WeightPart, *, dtypes: Mapping[str, str], block: tuple[int, int]
) -> WeightPart:
    stored = [dtypes.get(name) == STORED and len(part.sources[name]) > 1 for name in part.sources]
    if not any(stored):
        return part
    sources = dict(part.sources)
    grids = dict[str, Blocks]()
    for (name, shape), scaled in zip(part.sources.items(), stored, strict=True):
        if scaled:
            blocks = [
                -(-size // block_size) for size, block_size in zip(shape[-2:], block, strict=True)
            ]
            sources[name + SCALE] = (*shape[:-2], *blocks)
            grids[name + SCALE] = Blocks(name, block)
    fill = partial(_fill, fill=part.fill, stored=stored, block=block)
    return part._replace(
        sources=sources,
        fill=fill,
        dtypes=(*FLOATS, STORED),
        blocks=grids,
        checks=dict.fromkeys(grids, check_scales),
    )


def _fill(
    out: Tensor, *tensors: Tensor, fill: Fill, stored: Sequence[bool], block: tuple[int, int]
) -> None:
    """Dequantize the stored tensors by their scales, which follow all of them, then fill."""
    fill(out, *_each_dequantized(out, tensors, stored, block))


def _each_dequantized(
    out: Tensor, tensors: Sequence[Tensor], stored: Sequence[bool], block: tuple[int, int]
) -> Iterator[Tensor]:
    scales = iter(tensors[len(stored) :])
    for value, scaled in zip(tensors, stored, strict=False):
        if scaled:
            scale = next(scales).to(out.device)
            yield dequantized(value.to(out.device), scale, block, out.dtype)
        else:
            yield value


def dequantized(
    weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """FP8 weight [..., N, K], scale [..., ceil(N / block[0]), ceil(K / block[1])] -> the weight
    [..., N, K] in dtype."""
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    rows = max(_ROWS // block[0], 1) * block[0]  # at a time: products are in float32
    for values, scales, target in zip(
        weight.split(rows, -2),
        scale.float().split(rows // block[0], -2),
        out.split(rows, -2),
        strict=True,
    ):
        by_row = scales.repeat_interleave(block[0], -2)[..., : values.shape[-2], :]
        product = by_row.repeat_interleave(block[1], -1)[..., : values.shape[-1]]
        torch.mul(values.float(), product, out=product)
        target.copy_(product)
    return out


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> rows in FP8 (e4m3, Micikevicius et al., arXiv 2209.05433) and their scales
    [N] float32. The largest value of a row becomes 448, the maximum of e4m3."""
    largest = torch.cat([weight_rows.abs().amax(1) for weight_rows in weight.split(4096)]).float()
    scale = torch.where(largest > 0, largest / 448.0, 1.0)
    rows = [
        (weight_rows.float() / row_scale[:, None]).to(torch.float8_e4m3fn)
        for weight_rows, row_scale in zip(weight.split(4096), scale.split(4096), strict=True)
    ]
    return torch.cat(rows), scale


def hold_rows(linear: Linear, weight: Tensor) -> Tensor:
    """Return the values of a layer's weight in FP8, and make the layer hold them."""
    rows, scale = fp8_rows(weight.flatten(0, -2))
    linear.scale = scale.view(weight.shape[:-1])
    linear.format = FP8_ROWS
    rows = rows.view(weight.shape)
    return rows if weight.ndim == 2 else rows.view(torch.uint8)


def unsupported_reason(device: torch.device) -> str | None:
    """Return the reason that a GPU cannot multiply weights in FP8, None if it can."""
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "this GPU has no FP8 (compute capability 8.9 or above)"
    return None


def fp8_copy(weight: Tensor) -> LinearView:
    """Return an FP8 linear layer with this weight."""
    rows, scale = fp8_rows(weight)
    return LinearView(weight=rows, scale=scale, format=FP8_ROWS)
