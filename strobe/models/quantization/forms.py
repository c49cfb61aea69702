"""Quantized weights of checkpoints, recognized by the names and dtypes of their tensors.

A weight `X.weight` is stored as tensors `X.*`. Legend: N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from strobe.models.linear import StoredWeight
from strobe.models.quantization.grouped import (
    GridWeight,
    GroupWeight,
    powers_of_two,
    unpacked,
)
from strobe.models.quantization.rules import FP8, MXFP4, MXFP8, NVFP4, Scheme
from strobe.models.quantization.value_checks import (
    check_global_scale,
    check_groups,
    check_scales,
    check_signed_scales,
    check_size,
    check_zeros,
    is_consecutive,
)
from strobe.models.weight_mapping import FLOATS, Blocks, Check, CheckpointTensors

Shape = tuple[int, ...]
EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of scales that are powers of two."""
BITS = (4, 8, 2)
"""Of codes that do not cross bytes."""
AWQ_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
"""Bits at which the codes of eight columns begin in a word."""
BLOCKS = (128, 32, 64, 16, 256)
"""Block sizes in the order they are tried: a grid of scales shows only the number of blocks."""
UNUSED = (
    ".input_scale", ".input_global_scale", ".output_scale", ".q_scale", ".k_scale", ".v_scale",
    ".kv_scale",
)  # fmt: skip
"""Suffixes of scales of activations, which stay in the engine's dtype, and of keys and values; for
these see `kv_scales`."""


@dataclass(frozen=True)
class Form:
    """How one weight is stored. sources: its tensors with the shapes that the module needs. read:
    makes the weight from them, in this order, on a device. blocks, checks: see `WeightPart`. block:
    rows and columns that share a scale of values of 8 bits."""

    scheme: Scheme
    sources: dict[str, Shape]
    read: Callable[[Sequence[Tensor]], StoredWeight]
    blocks: Mapping[str, Blocks] = field(default_factory=dict[str, Blocks])
    block: tuple[int, int] | None = None
    checks: Mapping[str, Check] = field(default_factory=dict[str, Check])


def form_of(
    name: str, shape: Shape, tensors: CheckpointTensors, declared: Scheme | None
) -> Form | None:
    """Return the form of a weight whose name and shape the module asks for; None if it is not
    quantized. declared: by the config. Raises ValueError for a form that is not supported."""
    stem = name.removesuffix(".weight")
    if stem == name or len(shape) != 2:
        return None
    weight = _Weight(stem=stem, shape=shape, tensors=tensors, declared=declared)
    if weight.dtype("weight_g_idx") is not None:
        raise weight.error(
            "weight_g_idx", "orders its groups by activations, which is not supported"
        )
    if weight.dtype("qweight") is not None:
        return _transposed(weight)
    packed = weight.dtype("weight_packed")
    if packed == "I32":
        return _packed_integers(weight)
    if packed == "U8":
        return _packed_floats(weight, "weight_packed", "weight_global_scale", is_divisor=True)
    if packed is not None:
        raise weight.error("weight_packed", f"holds {packed} values, but must hold I32 or U8")
    dtype = weight.dtype("weight")
    if dtype == "U8":
        return _packed_floats(weight, "weight", "weight_scale_2", is_divisor=False)
    if dtype in ("F8_E4M3", "I8"):
        return _grid(weight, FP8 if dtype == "F8_E4M3" else Scheme(kind="int", bits=8))
    return None


def read_weight(form: Form, tensors: Iterator[Tensor], device: torch.device) -> StoredWeight:
    """Read a weight from the next tensors."""
    return form.read([next(tensors).to(device) for _ in form.sources])


@dataclass(frozen=True)
class _Weight:
    """A weight of the module and the checkpoint's tensors for it."""

    stem: str
    shape: Shape
    tensors: CheckpointTensors
    declared: Scheme | None

    def dtype(self, leaf: str) -> str | None:
        return self.tensors.dtypes.get(f"{self.stem}.{leaf}")

    def stored(self, leaf: str) -> Shape:
        return self.tensors.shapes[f"{self.stem}.{leaf}"]

    def error(self, leaf: str, problem: str) -> ValueError:
        name = f"{self.stem}.{leaf}"
        return ValueError(
            f"{self.tensors.source}: tensor {name} {problem}; use another checkpoint of the model."
        )

    def need(self, leaf: str, dtypes: Sequence[str]) -> None:
        """Raises ValueError unless the checkpoint has the tensor in one of the dtypes."""
        dtype = self.dtype(leaf)
        if dtype is None:
            raise ValueError(
                f"{self.tensors.source}: tensor {self.stem}.{leaf} is missing; download or save "
                "the checkpoint again."
            )
        if dtype not in dtypes:
            raise self.error(leaf, f"holds {dtype} values, but must hold {' or '.join(dtypes)}")

    def need_matrix(self, leaf: str) -> None:
        """Raises ValueError unless a tensor has rows and columns."""
        if len(self.stored(leaf)) != 2:
            raise self.error(leaf, f"has shape {list(self.stored(leaf))}, but must be a matrix")

    def need_number(self, leaf: str) -> None:
        """Raises ValueError unless a tensor is one number in float32."""
        self.need(leaf, ["F32"])
        if prod(self.stored(leaf)) != 1:
            raise self.error(leaf, f"has shape {list(self.stored(leaf))}, but must be one number")

    def group(self, inputs: int) -> int:
        """Return the number of inputs that share a scale. inputs: of the whole weight."""
        shape = self.stored("weight_scale")
        if len(shape) != 2 or not shape[1] or inputs % shape[1]:
            raise self.error(
                "weight_scale", f"has shape {list(shape)}, which does not divide {inputs} inputs"
            )
        return inputs // shape[1]

    def sources(self, **shapes: Shape) -> dict[str, Shape]:
        return {f"{self.stem}.{leaf}": shape for leaf, shape in shapes.items()}

    def checks(self, **checks: Check) -> dict[str, Check]:
        """Return the checks by the names of the tensors."""
        return {f"{self.stem}.{leaf}": check for leaf, check in checks.items()}


def _packed_integers(weight: _Weight) -> Form:
    """compressed-tensors' pack-quantized: words of 32 bits, codes offset to be positive."""
    outputs, inputs = weight.shape
    width = weight.stored("weight_packed")[-1]
    declared = weight.declared
    bits = declared.bits if declared else None
    if bits is None:
        bits = next((b for b in BITS if -(-inputs * b // 32) == width), None)
    if bits not in BITS:
        raise weight.error("weight_packed", f"has codes of {bits} bits, which is not supported")
    weight.need("weight_scale", FLOATS)
    whole = inputs if -(-inputs * bits // 32) == width else width * 32 // bits
    group = weight.group(whole)
    groups = -(-inputs // group)
    sources = weight.sources(
        weight_packed=(outputs, -(-inputs * bits // 32)),
        weight_scale=(outputs, groups),
    )
    has_zero = weight.dtype("weight_zero_point") is not None
    if has_zero or (declared is not None and declared.asymmetric):
        weight.need("weight_zero_point", ["I32"])
        sources |= weight.sources(weight_zero_point=(-(-outputs * bits // 32), groups))
    checks = weight.checks(weight_scale=check_signed_scales)
    if weight.dtype("weight_shape") is not None:
        weight.need("weight_shape", ["I64", "I32"])
        sources |= weight.sources(weight_shape=(2,))
        size = [weight.stored("weight_packed")[0], whole]
        checks |= weight.checks(weight_shape=check_size(size))

    def read(tensors: Sequence[Tensor]) -> GroupWeight:
        by_name = dict(zip(sources, tensors, strict=True))
        zero = by_name.get(f"{weight.stem}.weight_zero_point")
        if zero is not None:  # packed along N
            words = zero.t().contiguous()
            zero = unpacked(as_bytes(words), bits)[:, :outputs].t()
        return GroupWeight(
            codes=as_bytes(tensors[0]),
            scale=tensors[1],
            bits=bits,
            group=group,
            inputs=inputs,
            zero=zero,
        )

    scheme = Scheme(
        kind="int", bits=bits, group=group if group < whole else None, asymmetric=has_zero
    )
    return Form(scheme=scheme, sources=sources, read=read, checks=checks)


@dataclass(frozen=True)
class _TransposedLayout:
    """GPTQ's layout, [K, N] packed along K, or AWQ's, packed along N in an order of its own.

    group: inputs that share a scale; whole: inputs of the whole weight. asymmetric: whether zero
    points count. leaves: its tensors, in the order in which they are read."""

    weight: _Weight
    is_awq: bool
    bits: int
    group: int
    whole: int
    asymmetric: bool
    leaves: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        """The tensors' shapes that the module needs."""
        outputs, inputs = self.weight.shape
        words_of_inputs = -(-inputs * self.bits // 32)
        words_of_outputs = -(-outputs * self.bits // 32)
        groups = -(-inputs // self.group)
        shapes: dict[str, Shape] = {
            "qweight": (inputs, words_of_outputs) if self.is_awq else (words_of_inputs, outputs),
            "scales": (groups, outputs),
            "qzeros": (groups, words_of_outputs),
            "g_idx": (inputs,),
        }
        return {leaf: shapes[leaf] for leaf in self.leaves}

    def read(self, tensors: Sequence[Tensor]) -> GroupWeight:
        by_leaf = dict(zip(self.leaves, tensors, strict=True))
        words = by_leaf["qweight"]
        groups = by_leaf.get("g_idx")
        return GroupWeight(
            codes=_pairs(_awq_codes(words).t()) if self.is_awq else as_bytes(words.t()),
            scale=by_leaf["scales"].t(),
            bits=self.bits,
            group=self.group,
            inputs=self.weight.shape[1],
            zero=self._zero(by_leaf["qzeros"]) if self.asymmetric else None,
            index=_index(groups, self.group),
        )

    @property
    def zero_offset(self) -> int:
        """What is added to stored zeros."""
        declared = self.weight.declared
        return declared.zero_offset if declared is not None else 0

    def _zero(self, zeros: Tensor) -> Tensor:
        """Zero points as they are stored -> [N, G]."""
        zero = _awq_codes(zeros) if self.is_awq else unpacked(as_bytes(zeros), self.bits)
        return (zero[:, : self.weight.shape[0]].int() + self.zero_offset).t()

    @property
    def checks(self) -> dict[str, Check]:
        """See `WeightPart`."""
        outputs, _ = self.weight.shape
        num_groups = self.whole // self.group
        checks: dict[str, Check] = {"scales": check_signed_scales}
        if self.asymmetric and self.zero_offset:
            checks["qzeros"] = check_zeros(self.bits, outputs)
        if "g_idx" in self.leaves:
            checks["g_idx"] = check_groups(self.group, num_groups)
        return self.weight.checks(**checks)


def _transposed(weight: _Weight) -> Form:
    """Words of 32 bits, as `_TransposedLayout` has them."""
    bits = weight.declared.bits if weight.declared is not None else 4
    for leaf, dtypes in (("qweight", ("I32",)), ("scales", FLOATS)):
        weight.need(leaf, dtypes)
        weight.need_matrix(leaf)
    if weight.declared is not None and weight.declared.indexed:
        weight.need("g_idx", ["I32", "I64"])
    stored = weight.stored("qweight")
    groups, columns = weight.stored("scales")
    is_awq = stored[1] != columns
    if bits not in BITS or (is_awq and bits != 4):
        raise weight.error("qweight", f"has codes of {bits} bits, which is not supported")
    whole = stored[0] if is_awq else stored[0] * 32 // bits
    if whole % groups:
        raise weight.error("scales", f"has {groups} groups, which do not divide {whole} inputs")
    asymmetric = weight.declared is None or weight.declared.asymmetric
    leaves = ["qweight", "scales"]
    if asymmetric or weight.dtype("qzeros") is not None:
        weight.need("qzeros", ["I32"])
        leaves.append("qzeros")
    if weight.dtype("g_idx") is not None:
        weight.need("g_idx", ["I32", "I64"])
        leaves.append("g_idx")
    layout = _TransposedLayout(
        weight=weight,
        is_awq=is_awq,
        bits=bits,
        group=whole // groups,
        whole=whole,
        asymmetric=asymmetric,
        leaves=tuple(leaves),
    )
    scheme = Scheme(
        kind="int",
        bits=bits,
        group=layout.group if layout.group < whole else None,
        asymmetric=asymmetric,
    )
    return Form(
        scheme=scheme,
        sources=weight.sources(**layout.shapes),
        read=layout.read,
        checks=layout.checks,
    )


def _index(groups: Tensor | None, group: int) -> Tensor | None:
    """Return the group of each input; None if groups are consecutive inputs."""
    if groups is None or is_consecutive(groups, group):
        return None
    return groups.long()


def _awq_codes(words: Tensor) -> Tensor:
    """words [R, C / 8] int32 -> codes [R, C] uint8."""
    shifts = torch.tensor(AWQ_SHIFTS, device=words.device)
    return (words[..., None] >> shifts & 15).to(torch.uint8).flatten(1)


def _pairs(codes: Tensor) -> Tensor:
    """codes [N, K] of 4 bits -> [N, K / 2], the first in the low bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def _packed_floats(weight: _Weight, codes: str, global_scale: str, *, is_divisor: bool) -> Form:
    """E2M1 values, two a byte: NVFP4 with scales in e4m3 and a global one, or MXFP4."""
    outputs, inputs = weight.shape
    weight.need("weight_scale", ("F8_E4M3", *EXPONENTS))
    is_nvfp4 = weight.dtype("weight_scale") == "F8_E4M3"
    group = weight.group(weight.stored(codes)[-1] * 2)
    scheme = NVFP4 if is_nvfp4 else MXFP4
    if group != scheme.group:
        raise weight.error(
            "weight_scale", f"has groups of {group}, but {scheme} has groups of {scheme.group}"
        )
    shapes: dict[str, Shape] = {
        codes: (outputs, inputs // 2),
        "weight_scale": (outputs, inputs // group),
    }
    checks: dict[str, Check] = {"weight_scale": check_scales}
    if is_nvfp4:
        weight.need_number(global_scale)
        shapes[global_scale] = weight.stored(global_scale)
        checks[global_scale] = check_global_scale

    def read(tensors: Sequence[Tensor]) -> GroupWeight:
        return GroupWeight(
            codes=tensors[0],
            scale=tensors[1] if is_nvfp4 else powers_of_two(tensors[1]),
            bits=4,
            group=group,
            inputs=inputs,
            global_scale=tensors[2].float() if is_nvfp4 else None,
            is_divisor=is_divisor,
            is_float=True,
        )

    return Form(
        scheme=scheme,
        sources=weight.sources(**shapes),
        read=read,
        checks=weight.checks(**checks),
    )


def _grid(weight: _Weight, scheme: Scheme) -> Form:
    """Values of 8 bits: a scale per weight, row or block, or in MXFP8 per 32 values of a row."""
    outputs, inputs = weight.shape
    leaf = "weight_scale"
    if weight.dtype("weight_scale_inv") is not None:
        leaf = "weight_scale_inv"
    weight.need(leaf, (*FLOATS, *EXPONENTS))
    weight.need_matrix("weight")
    is_exponent = weight.dtype(leaf) in EXPONENTS
    shape = weight.stored(leaf)
    whole = weight.stored("weight")
    blocks: dict[str, Blocks] = {}
    if all(size == 1 for size in shape):
        block = (outputs, inputs)
        wanted = shape
    elif shape in ((whole[0],), (whole[0], 1)):
        block = (1, inputs)
        wanted = (outputs, *shape[1:])
    elif is_exponent and shape == (whole[0], -(-whole[1] // 32)):
        block = (1, 32)
        wanted = (outputs, -(-inputs // 32))
        scheme = MXFP8
    else:
        declared = weight.declared
        block = _block(whole, shape, declared.block if declared else None)
        if block is None:
            by = f" in blocks of {list(declared.block)}" if declared and declared.block else ""
            raise weight.error(leaf, f"has shape {list(shape)} for a weight of {list(whole)}{by}")
        wanted = (-(-outputs // block[0]), -(-inputs // block[1]))
        blocks[f"{weight.stem}.{leaf}"] = Blocks(f"{weight.stem}.weight", block)
    shapes: dict[str, Shape] = {"weight": weight.shape, leaf: wanted}
    if scheme.kind == "int" and weight.dtype("weight_zero_point") is not None:
        weight.need("weight_zero_point", ["I8"])
        shapes["weight_zero_point"] = wanted
        scheme = replace(scheme, asymmetric=True)

    def read(tensors: Sequence[Tensor]) -> GridWeight:
        scale = powers_of_two(tensors[1]) if is_exponent else tensors[1]
        columns = scale.shape[-1] if scale.ndim == 2 else 1
        zero = tensors[2].reshape(-1, columns) if len(tensors) > 2 else None
        scale = scale.reshape(-1, columns)
        return GridWeight(values=tensors[0], scale=scale, block=block, zero=zero)

    return Form(
        scheme=scheme,
        sources=weight.sources(**shapes),
        read=read,
        blocks=blocks,
        block=block,
        checks=weight.checks(
            **{leaf: check_signed_scales if scheme.kind == "int" else check_scales}
        ),
    )


def _block(weight: Shape, scale: Shape, declared: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if the shapes do not fit."""
    if len(scale) != 2:
        return None
    if declared is not None:
        fits = [-(-size // b) for size, b in zip(weight, declared, strict=True)] == [*scale]
        return declared if fits else None
    sizes = list[int]()
    for size, count in zip(weight, scale, strict=True):
        fits = [b for b in BLOCKS if -(-size // b) == count]
        sizes.append(size if count == 1 and not fits else next(iter(fits), 0))
    return (sizes[0], sizes[1]) if all(sizes) else None


def as_bytes(words: Tensor) -> Tensor:
    """words [N, W] int32 -> [N, 4 W] uint8, the low byte first."""
    words = words.contiguous()
    if words.stride(-1) != 1:  # one column is contiguous with any stride
        words = words.clone(memory_format=torch.contiguous_format)
    return words.view(torch.uint8)
