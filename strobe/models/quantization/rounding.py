"""Weights rounded to codes while loading, for GPUs.

int8 has a scale per row. int4 has a scale in bfloat16 and a zero for each group of inputs, spanning
the group's values. Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.models.linear import Linear, StoredWeight
from strobe.models.quantization.grouped import GridWeight, GroupWeight
from strobe.models.quantization.stored import HeldProduct

NAMES = ("int8", "int4")
"""Values of weight_dtype."""
GROUP = 32
"""Inputs in a group of int4."""
BYTES_PER_VALUE = {"int8": 1.0, "int4": 0.5 + 3 / GROUP}
"""Without scales of rows."""
_ROWS = 4096
_LARGEST = {"int8": 127, "int4": 15}


def rounded_bytes(shape: torch.Size, name: str) -> int:
    """Return the bytes of a rounded weight [N, K]."""
    outputs, inputs = shape
    if _name_for(inputs, name) == "int8":
        return outputs * (inputs + 4)
    return outputs * (inputs // 2 + 3 * -(-inputs // GROUP))


def hold_rounded(linear: Linear, weight: Tensor, name: str) -> Tensor:
    """Make a layer hold its weight [N, K] in codes; return an empty tensor for `Linear.weight`."""
    product = HeldProduct(linear, rounded_bytes(weight.shape, name))
    product.parts = (rounded(weight, name),)
    linear.stored = product
    linear.product = product
    return weight.new_empty(0)


def rounded(weight: Tensor, name: str) -> StoredWeight:
    """Return the nearest weight of the format to [N, K]."""
    inputs = weight.shape[1]
    if _name_for(inputs, name) == "int8":
        parts = [_by_rows(rows) for rows in weight.split(_ROWS)]
        return GridWeight(
            values=torch.cat([values for values, _ in parts]),
            scale=torch.cat([scale for _, scale in parts]),
            block=(1, inputs),
        )
    groups = [_by_groups(rows) for rows in weight.split(_ROWS)]
    return GroupWeight(
        codes=torch.cat([codes for codes, _, _ in groups]),
        scale=torch.cat([scale for _, scale, _ in groups]),
        bits=4,
        group=GROUP,
        inputs=inputs,
        zero=torch.cat([zero for _, _, zero in groups]),
    )


def _name_for(inputs: int, name: str) -> str:
    """Return the format of a weight: two codes of int4 fill a byte."""
    return "int8" if inputs % 2 else name


def _by_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 values [N, K], scales [N, 1] float32."""
    largest = weight.abs().amax(1, keepdim=True).float()
    scale = torch.where(largest > 0, largest / _LARGEST["int8"], 1.0)
    return (weight.float() / scale).round().to(torch.int8), scale


def _by_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """weight [N, K] -> codes [N, K / 2], scales [N, G] in bfloat16, zeros [N, G]."""
    inputs = weight.shape[1]
    groups = F.pad(weight.float(), (0, -inputs % GROUP)).unflatten(1, (-1, GROUP))
    low = groups.amin(2, keepdim=True).clamp(max=0)
    high = groups.amax(2, keepdim=True).clamp(min=0)
    scale = ((high - low) / _LARGEST["int4"]).bfloat16()
    step = torch.where(scale > 0, scale.float(), 1.0)
    zero = (-low / step).round().clamp(0, _LARGEST["int4"])
    codes = (groups / step + zero).round().clamp(0, _LARGEST["int4"]).to(torch.uint8)
    codes = codes.flatten(1)[:, :inputs]
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.squeeze(2), zero.squeeze(2).to(torch.uint8)
