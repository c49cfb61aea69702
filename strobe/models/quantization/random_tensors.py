"""Tensors of a quantized checkpoint that does not exist, for measurements of speed: what a config
says of its weights decides which tensors there are, and their values are random."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from strobe.models.checkpoint import TORCH
from strobe.models.config_readers.tensor_names import names_in_files
from strobe.models.linear import Linear
from strobe.models.model_config import Quantization
from strobe.models.quantization import fp8_tensors
from strobe.models.quantization.held import fill_bytes
from strobe.models.quantization.rules import Rules, Scheme
from strobe.models.weight_mapping import FLOATS, CheckpointTensors, WeightMapping

Headers = dict[str, tuple[str, tuple[int, ...]]]
"""Dtypes and shapes by what follows a module's name."""
HEAD = "lm_head.weight"
_SCALES = {8: 2.0**-13, 4: 2.0**-8, 2: 2.0**-6}
"""By bits of a code: small enough that logits stay finite."""
_EXPONENT = 121
"""Of scales that are powers of two: 2^-6."""


def random_tensors(
    module: nn.Module, mapping: WeightMapping, quantization: Quantization
) -> CheckpointTensors:
    """Return the tensors of the quantized linear layers and experts."""
    dtypes: dict[str, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    headers = _LAYOUTS.get(quantization.method, _compressed_tensors)
    for path, linear in module.named_modules():
        name = f"{path}.weight"
        if not isinstance(linear, Linear) or (linear.fixed and name != HEAD):
            continue
        for part in mapping[name]:
            for source, shape in part.sources.items():
                stem = source.removesuffix(".weight")
                scheme = _scheme(stem, quantization)
                if scheme is None or stem == source or len(shape) != 2:
                    continue
                for leaf, (dtype, size) in headers(scheme, shape).items():
                    dtypes[f"{stem}.{leaf}"] = dtype
                    shapes[f"{stem}.{leaf}"] = size
    return CheckpointTensors(source="", dtypes=dtypes, shapes=shapes)


def _scheme(stem: str, quantization: Quantization) -> Scheme | None:
    """Return a module's quantization scheme; None if it is not quantized."""
    rules = quantization.rules
    names = names_in_files(stem)
    if quantization.method == "fp8":
        is_head = stem == HEAD.removesuffix(".weight")
        by_block = Scheme(kind="float", bits=8, block=quantization.block)
        return None if is_head else by_block
    if rules.ignores(names) is not None or _is_part_ignored(rules, stem):
        return None
    return rules.scheme_of(names)


def _is_part_ignored(rules: Rules, stem: str) -> bool:
    return rules.loose and any(entry in stem for entry in rules.ignored)


def _compressed_tensors(scheme: Scheme, shape: tuple[int, ...]) -> Headers:
    outputs, inputs = shape
    if scheme.kind == "float" and scheme.bits == 8:
        return _float8(scheme, shape)
    group = scheme.group or inputs
    grid = (outputs, -(-inputs // group))
    if scheme.kind == "float":
        headers: Headers = {"weight_packed": ("U8", (outputs, inputs // 2))}
        if scheme.group == 32:
            return headers | {"weight_scale": ("U8", grid)}
        return headers | {"weight_scale": ("F8_E4M3", grid), "weight_global_scale": ("F32", (1,))}
    if scheme.bits == 8 and scheme.group is None:
        return {"weight": ("I8", shape), "weight_scale": ("BF16", (outputs, 1))}
    headers = {
        "weight_packed": ("I32", (outputs, -(-inputs * scheme.bits // 32))),
        "weight_scale": ("BF16", grid),
    }
    if scheme.asymmetric:
        zeros = (-(-outputs * scheme.bits // 32), grid[1])
        headers["weight_zero_point"] = ("I32", zeros)
    return headers


def _float8(scheme: Scheme, shape: tuple[int, ...]) -> Headers:
    outputs, inputs = shape
    headers: Headers = {"weight": ("F8_E4M3", shape)}
    if scheme.group == 32:
        return headers | {"weight_scale": ("U8", (outputs, -(-inputs // 32)))}
    if scheme.block is None:
        return headers | {"weight_scale": ("F32", (outputs, 1))}
    rows, columns = scheme.block
    return headers | {"weight_scale": ("F32", (-(-outputs // rows), -(-inputs // columns)))}


def _fp8(scheme: Scheme, shape: tuple[int, ...]) -> Headers:
    headers = _float8(scheme, shape)
    return {"weight": headers["weight"], "weight_scale_inv": headers["weight_scale"]}


def _modelopt(scheme: Scheme, shape: tuple[int, ...]) -> Headers:
    """As compressed-tensors has them, but one scale for a weight in FP8, and other names."""
    if scheme.bits == 8 and scheme.block is None and scheme.group is None:
        return {"weight": ("F8_E4M3", shape), "weight_scale": ("F32", ())}
    headers = _compressed_tensors(scheme, shape)
    names = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}
    return {names.get(leaf, leaf): header for leaf, header in headers.items()}


def _gptq(scheme: Scheme, shape: tuple[int, ...]) -> Headers:
    outputs, inputs = shape
    groups = -(-inputs // (scheme.group or inputs))
    words = -(-outputs * scheme.bits // 32)
    return {
        "qweight": ("I32", (-(-inputs * scheme.bits // 32), outputs)),
        "scales": ("F16", (groups, outputs)),
        "qzeros": ("I32", (groups, words)),
    }


def _awq(scheme: Scheme, shape: tuple[int, ...]) -> Headers:
    headers = _gptq(scheme, shape)
    _, words = headers["qzeros"][1]
    return headers | {"qweight": ("I32", (shape[1], words))}


_LAYOUTS: dict[str, Callable[[Scheme, tuple[int, ...]], Headers]] = {
    "auto-round": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    fp8_tensors.METHOD: _modelopt,
    "gptq": _gptq,
    "modelopt": _modelopt,
    "mxfp4": lambda scheme, shape: {},
}


def draw_tensor(name: str, tensors: CheckpointTensors, generator: torch.Generator) -> Tensor:
    """Return a random tensor of the checkpoint, on the generator's device; codes are any, and
    scales one small number."""
    dtype = tensors.dtypes[name]
    shape = tensors.shapes[name]
    device = generator.device
    leaf = name.rpartition(".")[2]
    value = torch.empty(shape, dtype=TORCH[dtype], device=device)
    if leaf in ("weight_scale_2", "weight_global_scale"):
        factor = 2.0**-8
        return value.fill_(factor if leaf == "weight_scale_2" else 1 / factor)
    if "scale" in leaf and dtype in FLOATS:
        return value.fill_(_SCALES[_bits(name, tensors)])
    if "scale" in leaf:
        return value.fill_(_EXPONENT) if dtype == "U8" else value.fill_(1.0)
    codes = value.view(torch.uint8) if prod(shape) else value
    if dtype == "F8_E4M3":
        fill_bytes(codes, generator)
    else:
        codes.random_(0, 256, generator=generator)
    return value


def _bits(name: str, tensors: CheckpointTensors) -> int:
    """Return 8 for the scale of a weight in bytes, else 4."""
    weight = f"{name.rpartition('.')[0]}.weight"
    return 8 if tensors.dtypes.get(weight) in ("F8_E4M3", "I8") else 4
