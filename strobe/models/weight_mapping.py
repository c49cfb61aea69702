"""How a module's parameters are made of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from strobe.models.linear import Linear

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of tensors that are taken as they are, under safetensors' names."""


Fill = Callable[..., None]
"""(out, *tensors): writes what they come to into `out`, part of a parameter on its device."""


def copy(out: Tensor, value: Tensor) -> None:
    """As it is. Where `out` is stored column by column, the device's own order is made first: that
    takes a third of the time that copying across it does."""
    if out.ndim == 2 and out.stride(0) == 1 < out.stride(1):
        out.t().copy_(value.to(out.dtype).t().contiguous())
    else:
        out.copy_(value)


class WeightPart(NamedTuple):
    """A part of a parameter, and the checkpoint's tensors that it is made of.

    sources: their names, with the shapes they must have. at: where the part lies, as an index into
    the parameter. fill: writes it, given the tensors on the CPU as they are stored, in the order of
    `sources`; they last no longer than the call. dtypes: those that the tensors may have.
    """

    sources: Mapping[str, tuple[int, ...]]
    at: tuple[int | slice, ...] = ()
    fill: Fill = copy
    dtypes: tuple[str, ...] = FLOATS

    def under(self, prefix: str) -> WeightPart:
        return self._replace(sources={prefix + n: shape for n, shape in self.sources.items()})


WeightMapping = dict[str, list[WeightPart]]
"""The parts of each parameter. A module's method `weight_mapping()` names parameters and tensors
relative to that module; a parameter that no module maps is the one tensor of its own name."""


def stacked(name: str, linear: Linear) -> WeightMapping:
    """The mapping of a linear layer called `name`, for the module around it: several layers of the
    checkpoint, stacked."""
    mapping: WeightMapping = {}
    for leaf, parameter in linear.named_parameters():
        start, parts = 0, mapping.setdefault(f"{name}.{leaf}", [])
        for source, count in linear.parts.items():
            shape = (count, *parameter.shape[1:])
            parts.append(WeightPart({f"{source}.{leaf}": shape}, (slice(start, start + count),)))
            start += count
    return mapping


@runtime_checkable
class MapsWeights(Protocol):
    """A module whose parameters have other names or shapes in checkpoints."""

    def weight_mapping(self) -> WeightMapping: ...


def mapping_of(module: nn.Module, names: Collection[str] = ()) -> WeightMapping:
    """The parts of every parameter, by the outermost module that maps it. Where a parameter's own
    name is one of `names`, a checkpoint's tensors, it is read whole: its parts come stacked.
    Stacked experts are named without `.weight`."""
    mapped: WeightMapping = {}
    for path, submodule in module.named_modules():
        around, _, name = path.rpartition(".")
        submodule_mapping = submodule.weight_mapping() if isinstance(submodule, MapsWeights) else {}
        if isinstance(submodule, Linear) and submodule.parts:
            path, submodule_mapping = around, stacked(name, submodule)
        prefix = f"{path}." if path else ""
        for name, parts in submodule_mapping.items():
            mapped.setdefault(prefix + name, [part.under(prefix) for part in parts])
    mapping: WeightMapping = {}
    for name, parameter in module.named_parameters():
        whole = next((n for n in (name, name.removesuffix(".weight")) if n in names), name)
        plain_parts = [WeightPart({whole: tuple(parameter.shape)})]
        parts = mapped.get(name, plain_parts)
        stacked_there = whole in names and not any(whole in part.sources for part in parts)
        mapping[name] = plain_parts if stacked_there else parts
    return mapping
