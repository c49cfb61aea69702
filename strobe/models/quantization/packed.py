"""Weights packed for torch's products on CPUs, converted from unquantized ones after loading.

float32 and bfloat16 are oneDNN's products. float16 is FBGEMM's, which multiplies weights in float16
by inputs in float32. int8 and int4 are torch's weight-only products, whose scales, inputs and
outputs are in bfloat16: int8 has a scale for each row, int4 a scale and a zero for each group of
inputs. Legend: T rows, N outputs, K inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from strobe.models.dflash_drafter import DFlash
from strobe.models.linear import AnyLinear, Linear, LinearView
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.quantization import rounding
from strobe.models.target import Target

logger = logging.getLogger(__name__)

GROUP = 32
"""Inputs in a group of int4."""
SMALL = 2**16
"""A weight in float32 with fewer values stays unpacked: oneDNN's product takes longer to start than
to compute."""
_ROWS = 4096
_BLOCK = 8
"""Rows that oneDNN's layout of a weight is chosen for. Its layout for one row is slower for more,
and sums them in another order."""


class Packed(Protocol):
    """A packed weight with its bias. value_bytes: bytes of a value, its share of scales included,
    without scales of rows."""

    value_bytes: float

    def __init__(self, weight: Tensor, bias: Tensor | None): ...

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] -> x Wᵀ + bias [T, N]."""
        ...


class Float32:
    """A weight in float32. A row's product is the same, bit by bit, in any number of rows."""

    value_bytes = 4.0

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), _BLOCK)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        if x.dtype == torch.float32:
            return product(x, self.packed, self.bias, "none", [], "")
        return product(x.float(), self.packed, self.bias, "none", [], "").to(x.dtype)


class BFloat16:
    """A weight in bfloat16, on a CPU that multiplies these natively; sums are in float32, outputs
    are rounded to bfloat16."""

    value_bytes = 2.0

    def __init__(self, weight: Tensor, bias: Tensor | None):
        weight = weight.bfloat16().contiguous()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _BLOCK)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.mkldnn._linear_pointwise
        if x.dtype == torch.bfloat16:
            return product(x, self.packed, self.bias, "none", [], "")
        return product(x.bfloat16(), self.packed, self.bias, "none", [], "").to(x.dtype)


class Float16:
    """A weight in float16. Values above 65,504 saturate."""

    value_bytes = 2.0

    def __init__(self, weight: Tensor, bias: Tensor | None):
        bias = None if bias is None else bias.float()
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight.float().contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.quantized.linear_dynamic_fp16
        if x.dtype == torch.float32:
            return product(x, self.packed)
        return product(x.float(), self.packed).to(x.dtype)


class Int8:
    """A weight in int8. The largest value of a row becomes 127."""

    value_bytes = 1.0

    def __init__(self, weight: Tensor, bias: Tensor | None):
        blocks = [int8_rows(rows.float()) for rows in weight.split(_ROWS)]
        self.values = torch.cat([values for values, _ in blocks])
        self.scale = torch.cat([scale for _, scale in blocks])
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int8pack_mm
        y = product(x.bfloat16(), self.values, self.scale).to(x.dtype)
        return y if self.bias is None else y + self.bias


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> values [N, K] int8, scales [N] bfloat16."""
    scale = (weight.abs().amax(1) / 127).bfloat16()
    scale = torch.where(scale > 0, scale, 1)
    return (weight / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


class Int4:
    """A weight in int4."""

    value_bytes = 0.5 + 4 / GROUP

    def __init__(self, weight: Tensor, bias: Tensor | None):
        blocks = [int4_groups(rows.float()) for rows in weight.split(_ROWS)]
        codes = torch.cat([codes for codes, _ in blocks])
        scales = torch.cat([scales for _, scales in blocks])
        self.values = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        self.scales = scales.transpose(0, 1).contiguous()
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product = torch.ops.aten._weight_int4pack_mm_for_cpu
        y = product(x.bfloat16(), self.values, GROUP, self.scales).to(x.dtype)
        return y if self.bias is None else y + self.bias


def int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> codes [N, K] uint8, and [N, K / GROUP, 2] bfloat16: scale and zero of each
    group, whose values are (code - 8) * scale + zero.

    A group spans its smallest and largest value, or has zero 0 and its largest magnitude at code
    0, whichever is closer. These are the rules of GGUF's Q4_1 and Q4_0, whose codes are therefore
    kept.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    low = groups.amin(2, keepdim=True)
    high = groups.amax(2, keepdim=True)
    largest = torch.where(high > -low, high, low)
    spanned = _rounded(groups, (high - low) / 15, low)
    centred = _rounded(groups, largest / -8, None)
    closer = centred[2] < spanned[2]
    codes, scales = (
        torch.where(closer, a, b) for a, b in zip(centred[:2], spanned[:2], strict=True)
    )
    return codes.flatten(1), scales


def _rounded(groups: Tensor, scale: Tensor, low: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """groups [N, G, GROUP], scale, low [N, G, 1] -> codes, [N, G, 2] scale and zero, and each
    group's squared error [N, G, 1]. low: value of code 0; None if zero is 0."""
    scale = scale.bfloat16().float()
    zero = torch.zeros_like(scale) if low is None else (low + 8 * scale).bfloat16().float()
    steps = (groups - zero) / torch.where(scale == 0, 1, scale)
    codes = (steps.round() + 8).clamp(0, 15)
    error = ((codes - 8) * scale + zero - groups).square().sum(2, keepdim=True)
    return codes.to(torch.uint8), torch.cat([scale, zero], 2).bfloat16(), error


FORMATS: dict[str, type[Packed]] = {
    "float32": Float32, "bfloat16": BFloat16, "float16": Float16, "int8": Int8, "int4": Int4,
}  # fmt: skip
"""By values of weight_dtype."""
_ONEDNN = ("float32", "bfloat16")


def packed_format(
    name: str,
    target: TargetConfig,
    models: Sequence[TargetConfig | DraftConfig],
    device: torch.device,
    dtype: torch.dtype,
    option: str = "weight_dtype",
) -> str | None:
    """Return the format of models for a weight_dtype, None if weights stay as they are or are
    rounded while loading. For models in float32 auto is float16 if the target's weights were
    trained or stored in at most 16 bits, else float32; for models in bfloat16 it is bfloat16 where
    the CPU multiplies it natively. option: names the setting in errors. Raises ValueError if
    weights cannot be packed."""
    wanted = name
    is_bfloat16 = dtype == torch.bfloat16
    unsupported = None
    if name in rounding.NAMES and device.type == "cuda":
        return None
    if name not in FORMATS:
        wanted = "float16" if target.dtype != "float32" and _has_fbgemm() else "float32"
        wanted = "bfloat16" if is_bfloat16 else wanted
    if device.type != "cpu":
        unsupported = f"the device is {device}, and packed weights run on a CPU"
    elif name in FORMATS and any(model.decoder.experts for model in models):
        unsupported = "experts have no product with packed weights"
    elif wanted in _ONEDNN and not torch.backends.mkldnn.is_available():
        unsupported = "torch has no oneDNN here"
    elif wanted == "bfloat16" and not multiplies_bfloat16():
        unsupported = "this CPU does not multiply bfloat16 natively (AVX512-BF16 or AMX)"
    elif wanted not in _ONEDNN and not _has_fbgemm():
        unsupported = "torch has no FBGEMM here, which needs a CPU with AVX2"
    if name in FORMATS and unsupported is not None:
        raise ValueError(f"{option} is {name!r}, but {unsupported}; use {option} auto.")
    is_float32 = dtype == torch.float32
    is_asked = name in FORMATS or (name in ("auto", "stored") and (is_float32 or is_bfloat16))
    return wanted if is_asked and unsupported is None else None


def head_format(make: type[Packed], dtype: torch.dtype) -> type[Packed]:
    """Return the format of heads next to linear layers in this one, of models in dtype: float16 or
    better, so that logits keep their precision, unless they are in bfloat16 anyway."""
    keeps = make is Float32 or (make is BFloat16 and dtype == torch.bfloat16)
    return make if keeps else Float16


def multiplies_bfloat16() -> bool:
    """Whether the CPU has instructions that multiply bfloat16; others convert each value."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name)() for name in checks)


def _has_fbgemm() -> bool:
    return "fbgemm" in torch.backends.quantized.supported_engines


def pack(name: str | None, target: Target) -> None:
    """Pack the target's linear layers, and its head as `head_format` says."""
    _pack_codes(target)
    if name is None:
        return
    _pack_layers(target, FORMATS[name])
    if target.packed_head is None:
        dtype = target.embed_tokens.weight.dtype
        target.packed_head = packed(target.output, head_format(FORMATS[name], dtype))


def pack_drafter(name: str | None, drafter: DFlash, target: Target) -> None:
    """Pack a drafter's linear layers and its own head; it shares the target's as that is held."""
    _pack_codes(drafter)
    if name is None:
        drafter.share_head(target.output)
        return
    _pack_layers(drafter, FORMATS[name])
    drafter.pack(target.output, partial(packed, make=FORMATS[name]))


def _pack_codes(model: Target | DFlash) -> None:
    """Pack the codes of layers that keep them, if rows are in bfloat16 on a CPU."""
    weight = model.norm.weight
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    products = [linear.stored for linear in linears if linear.stored is not None]
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _has_fbgemm():
        return
    packed = [product.pack() for product in products]
    if packed:
        logger.info(
            "%d of %d layers with codes are multiplied by torch's products of int4 and int8, the "
            "others are dequantized for each product.",
            sum(packed),
            len(packed),
        )


def _pack_layers(model: Target | DFlash, make: type[Packed]) -> None:
    for linear in model.modules():
        if isinstance(linear, Linear) and linear.weight.ndim == 2 and not linear.fixed:
            _pack(linear, make)
    if model.lm_head is not None:
        _pack(model.lm_head, head_format(make, model.norm.weight.dtype))


def _pack(linear: Linear, make: type[Packed]) -> None:
    linear.product = packed(linear, make).product
    if linear.product is not None:
        linear.weight = _empty(linear.weight)


def packed(linear: AnyLinear, make: type[Packed]) -> LinearView:
    """Return the layer with its weight packed, unless it is too small. int8 and int4 take sizes
    that are multiples of GROUP; other weights are in float16 then."""
    if linear.product is not None:
        return LinearView(weight=linear.weight, product=linear.product)
    weight = linear.dense(torch.float32).detach()
    if make is Float32 and weight.numel() < SMALL:
        return LinearView(weight=weight, bias=linear.bias)
    if make in (Int8, Int4) and any(size % GROUP for size in weight.shape):
        make = Float16
    return LinearView(weight=_empty(weight), product=make(weight, linear.bias))


def _empty(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight.new_empty(0), requires_grad=False)
