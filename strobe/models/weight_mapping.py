"""Mapping of a module's parameters to the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from strobe.models.linear import Linear

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of unquantized tensors, by safetensors' names."""


Fill = Callable[..., None]
"""(out, *tensors): writes a part of a parameter, on its device, from the checkpoint's tensors."""


def copy(out: Tensor, value: Tensor) -> None:
    """Copy. If `out` is stored column by column, transpose on the device first, which takes a third
    of the time."""
    if out.ndim == 2 and out.stride(0) == 1 < out.stride(1):
        out.t().copy_(value.to(out.dtype).t().contiguous())
    else:
        out.copy_(value)


Check = Callable[[Tensor, bool], str | None]
"""(tensor, is_part): returns what is wrong with a tensor's values, and what to do, to follow the
tensor's name in a sentence; None if nothing is wrong. is_part: whether it is only a rank's part of
the checkpoint's tensor."""


class Blocks(NamedTuple):
    """The blocks of a grid of scales: a weight's tensor, and the rows and columns of it that share
    a scale."""

    weight: str
    size: tuple[int, int]


class CheckpointTensors(NamedTuple):
    """Dtypes and shapes of a checkpoint's tensors before they are read. source: names it in
    errors. types: of the quantized tensors of a GGUF file; coded: those that can be read as
    codes."""

    source: object
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    types: Mapping[str, str] = MappingProxyType({})
    coded: Collection[str] = ()


NO_TENSORS = CheckpointTensors(source="", dtypes={}, shapes={})
"""Of a checkpoint that has all that its config says."""


class WeightPart(NamedTuple):
    """A part of a parameter, and the checkpoint's tensors that it is built from.

    sources: names and required shapes of the tensors. at: index of the part in the parameter. fill:
    writes the part from the tensors, which are on the CPU as stored, in the order of `sources`, and
    valid only during the call. dtypes: allowed dtypes of the tensors. stacked: numbers of outputs
    of the layers that each tensor stacks, if there are several. blocks: of the sources that are
    grids of scales, each after its weight. checks: of the sources whose values are checked before
    any weight is read. as_codes: whether `fill` takes a GGUF file's tensors as codes.
    """

    sources: Mapping[str, tuple[int, ...]]
    at: tuple[int | slice, ...] = ()
    fill: Fill = copy
    dtypes: tuple[str, ...] = FLOATS
    stacked: tuple[int, ...] = ()
    blocks: Mapping[str, Blocks] = MappingProxyType({})
    checks: Mapping[str, Check] = MappingProxyType({})
    as_codes: bool = False

    def under(self, prefix: str) -> WeightPart:
        return self._replace(sources={prefix + n: shape for n, shape in self.sources.items()})


WeightMapping = dict[str, list[WeightPart]]
"""The parts of each parameter. A module's `weight_mapping()` names parameters and tensors relative
to that module. A parameter without a mapping is the one tensor of its own name."""


def stacked(name: str, linear: Linear) -> WeightMapping:
    """Map the linear layer `name`, whose `parts` are separate layers in the checkpoint, relative to
    the module around it."""
    mapping: WeightMapping = {}
    for leaf, parameter in linear.named_parameters():
        start = 0
        parts = mapping.setdefault(f"{name}.{leaf}", [])
        for source, count in linear.parts.items():
            shape = (count, *parameter.shape[1:])
            rows = slice(start, start + count)
            parts.append(WeightPart(sources={f"{source}.{leaf}": shape}, at=(rows,)))
            start += count
    return mapping


def own_mapping(module: Any) -> WeightMapping:
    """Return the mapping of a module whose parameters have other names or shapes in checkpoints,
    which has a method `weight_mapping`; empty for others."""
    maps = hasattr(type(module), "weight_mapping")
    return module.weight_mapping() if maps else {}


def mapping_of(module: nn.Module, names: Collection[str] = ()) -> WeightMapping:
    """Return the parts of every parameter, as the outermost module with a mapping for it says. A
    parameter whose own name is in `names`, a checkpoint's tensors, is read whole: its parts are
    already stacked. Stacked experts are named without `.weight`."""
    mapped: WeightMapping = {}
    for path, submodule in module.named_modules():
        around, _, name = path.rpartition(".")
        submodule_mapping = own_mapping(submodule)
        if isinstance(submodule, Linear) and submodule.parts:
            path = around
            submodule_mapping = stacked(name, submodule)
        prefix = f"{path}." if path else ""
        for name, parts in submodule_mapping.items():
            mapped.setdefault(prefix + name, [part.under(prefix) for part in parts])
    mapping: WeightMapping = {}
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        stacks = tuple(owner.parts.values()) if isinstance(owner, Linear) else ()
        whole = next((n for n in (name, name.removesuffix(".weight")) if n in names), name)
        plain_parts = [WeightPart(sources={whole: tuple(parameter.shape)}, stacked=stacks)]
        parts = mapped.get(name, plain_parts)
        stacked_there = whole in names and not any(whole in part.sources for part in parts)
        mapping[name] = plain_parts if stacked_there else parts
    return mapping
