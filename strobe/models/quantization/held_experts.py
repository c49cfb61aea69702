"""Experts whose weights stay as a checkpoint stores them.

Codes with scales, zeros and global scales are one weight for the outputs of all experts. FP8 and
MXFP4 have formats with kernels of their own. Legend: E experts, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from strobe.models.linear import Linear, StoredWeight
from strobe.models.quantization import fp8_formats, mxfp4
from strobe.models.quantization.forms import EXPONENTS, Form, read_weight
from strobe.models.quantization.grouped import (
    GridWeight,
    GroupWeight,
    empty_stack,
    powers_of_two,
    put,
)
from strobe.models.quantization.held import hold, scale_at
from strobe.models.quantization.rules import MXFP4
from strobe.models.quantization.stored import held_bytes
from strobe.models.quantization.value_checks import check_experts_groups, check_exponents
from strobe.models.weight_mapping import (
    FLOATS,
    Check,
    CheckpointTensors,
    WeightMapping,
    WeightPart,
    copy,
)


class HeldExperts:
    """The weights of experts in codes. nbytes: of the tensors that they are read from. stack: one
    weight [E * N, K]; None before loading."""

    def __init__(self, shape: tuple[int, int, int], nbytes: int):
        self.shape = shape
        self.nbytes = nbytes
        self.stack: StoredWeight | None = None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weights [E, N, K] in dtype."""
        return self.dense_experts(0, self.shape[0], dtype)

    def dense_experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of experts first to last - 1 in dtype."""
        assert self.stack is not None
        _, outputs, inputs = self.shape
        device = self.stack.scales[0].device
        out = torch.empty(last - first, outputs, inputs, dtype=dtype, device=device)
        for expert, weight in enumerate(out, start=first):
            row = expert * outputs
            weight.copy_(self.stack.rows(row, row + outputs))
        return out

    def fill(self, out: Tensor, *tensors: Tensor, form: Form, index: int, count: int) -> None:
        """Read a weight, which is number `index` of `count`, to the device of `out`."""
        weight = read_weight(form, iter(tensors), out.device).copied()
        assert isinstance(weight, GroupWeight | GridWeight)
        self.put(weight, index, count)

    def put(self, weight: GroupWeight | GridWeight, index: int, count: int) -> None:
        """Copy a weight, which is number `index` of `count`, to its place."""
        if self.stack is None:
            self.stack = empty_stack(weight, count)
        assert isinstance(self.stack, GroupWeight | GridWeight)
        put(self.stack, index, weight)


def hold_experts(
    path: str,
    linear: Linear,
    parts: Sequence[WeightPart],
    forms: Sequence[Mapping[str, Form | None]],
    tensors: CheckpointTensors,
) -> WeightMapping | None:
    """Make experts on the meta device hold their weights as stored; return the parts of their
    parameters, or None if the experts are not all stored in one form. path: the layer's; forms: of
    the parts' tensors."""
    if not all(part.fill is copy and len(part.sources) == 1 for part in parts):
        return None
    own = [(name, form) for part in forms for name, form in part.items() if form is not None]
    if len(own) < len(parts) or len({_structure(form, tensors) for _, form in own}) > 1:
        return None
    scheme = own[0][1].scheme
    if scheme == MXFP4:
        return _mxfp4(path, linear, parts, own)
    if scheme.kind == "float" and scheme.bits == 8:
        return _fp8(path, linear, parts, own)
    count, outputs, inputs = linear.weight.shape
    nbytes = sum(held_bytes(form, tensors, indexed=False) for _, form in own)
    linear.held_experts = HeldExperts((count, outputs, inputs), nbytes)
    empty = torch.empty(count, 0, 0, dtype=linear.weight.dtype, device=linear.weight.device)
    linear.weight = nn.Parameter(empty, requires_grad=False)
    coded = [
        WeightPart(
            sources=form.sources,
            fill=partial(linear.held_experts.fill, form=form, index=index, count=len(own)),
            dtypes=tuple(sorted({tensors.dtypes[source] for source in form.sources})),
            blocks=form.blocks,
            checks=_checks(form),
        )
        for index, (_, form) in enumerate(own)
    ]
    return {f"{path}.weight": coded}


def _structure(form: Form, tensors: CheckpointTensors) -> object:
    """Return what the forms of experts have in common that are one weight."""
    leaves = [(name.rpartition(".")[2], tensors.dtypes[name]) for name in form.sources]
    sizes = [shape for name, shape in form.sources.items() if not name.endswith("weight_shape")]
    return form.scheme, form.block, tuple(leaves), tuple(sizes)


def _checks(form: Form) -> dict[str, Check]:
    """Return the checks of an expert's tensors, whose groups must be consecutive inputs."""
    checks = dict(form.checks)
    for name in checks:
        if name.endswith("g_idx"):
            checks[name] = check_experts_groups(form.scheme.group or form.sources[name][0])
    return checks


def _mxfp4(
    path: str,
    linear: Linear,
    parts: Sequence[WeightPart],
    forms: Sequence[tuple[str, Form]],
) -> WeightMapping:
    """Hold values and scales as gpt-oss's experts do."""
    values = list[WeightPart]()
    scales = list[WeightPart]()
    for part, (_, form) in zip(parts, forms, strict=True):
        codes, exponents = form.sources
        own = WeightPart(
            sources={codes: form.sources[codes]},
            at=part.at,
            fill=_fill_mxfp4,
            dtypes=("U8",),
        )
        values.append(own)
        own = WeightPart(
            sources={exponents: form.sources[exponents]},
            at=scale_at(part.at),
            fill=mxfp4.fill_scales,
            dtypes=EXPONENTS,
            checks={exponents: check_exponents(mxfp4.MAX_EXPONENT)},
        )
        scales.append(own)
    mxfp4.hold_mxfp4(linear)
    return {f"{path}.weight": values, f"{path}.scale": scales}


def _fill_mxfp4(out: Tensor, packed: Tensor) -> None:
    """packed [N, K / 2], the first value in the low bits -> out [N, K / 2]; see `Mxfp4`."""
    mxfp4.fill_values(out[None], packed.unflatten(1, (-1, mxfp4.BLOCK // 2))[None])


def _fp8(
    path: str,
    linear: Linear,
    parts: Sequence[WeightPart],
    forms: Sequence[tuple[str, Form]],
) -> WeightMapping:
    """Hold values as they are, and each scale once for each row, as the kernels of experts in
    native FP8 read them."""
    count, outputs, inputs = linear.weight.shape
    values = list[WeightPart]()
    scales = list[WeightPart]()
    group = inputs
    for part, (_, form) in zip(parts, forms, strict=True):
        assert form.block is not None
        rows, group = form.block
        weight, scale = form.sources
        own = WeightPart(
            sources={weight: form.sources[weight]},
            at=part.at,
            fill=fp8_formats.fill_bytes_of,
            dtypes=(fp8_formats.STORED,),
        )
        values.append(own)
        own = WeightPart(
            sources={scale: form.sources[scale]},
            at=scale_at(part.at),
            fill=partial(_fill_scales, rows=rows),
            dtypes=(*FLOATS, *EXPONENTS),
            blocks=form.blocks,
            checks=form.checks,
        )
        scales.append(own)
    hold(
        linear,
        fp8_formats.Fp8Groups(group),
        values=(count, outputs, inputs),
        scale=(count, -(-inputs // group), outputs),
        scale_dtype=torch.float32,
    )
    return {f"{path}.weight": values, f"{path}.scale": scales}


def _fill_scales(out: Tensor, scales: Tensor, *, rows: int) -> None:
    """scales of one value, [N / rows] or [N / rows, G] -> out [G, N]."""
    if scales.dtype == torch.uint8:
        scales = powers_of_two(scales)
    fp8_formats.fill_scales(out, scales.reshape(-1, out.shape[0]), rows=rows)
