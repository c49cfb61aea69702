"""How a module's parameters are made of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from torch import Tensor, nn

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


class Piece(NamedTuple):
    """A part of a parameter, and the tensors that make it.

    sources: their names, with the shapes they must have. at: where the part is, as an index into
    the parameter. fill: gets the tensors on the CPU, as they are stored, in the order of `sources`;
    they last no longer than the call. dtypes: those that they may have.
    """

    sources: Mapping[str, tuple[int, ...]]
    at: tuple[int | slice, ...] = ()
    fill: Fill = copy
    dtypes: tuple[str, ...] = FLOATS

    def under(self, prefix: str) -> Piece:
        return self._replace(sources={prefix + n: shape for n, shape in self.sources.items()})


Pieces = dict[str, list[Piece]]
"""Of each parameter. What a module's method `pieces()` returns names parameters and sources as seen
from that module; a parameter that no module speaks of is the one tensor of its name."""


def stacked(name: str, linear: nn.Linear, rows: Mapping[str, int]) -> Pieces:
    """A product `name` whose rows are those of several, one after another: their names, and how
    many each has."""
    found: Pieces = {}
    for leaf, parameter in linear.named_parameters():
        start, parts = 0, found.setdefault(f"{name}.{leaf}", [])
        for source, count in rows.items():
            shape = (count, *parameter.shape[1:])
            parts.append(Piece({f"{source}.{leaf}": shape}, (slice(start, start + count),)))
            start += count
    return found


def pieces_of(module: nn.Module, names: Collection[str] = ()) -> Pieces:
    """Of every parameter: what the outermost module says of it that says anything. One of `names`,
    which are a checkpoint's, that is a parameter's own is taken as it is, parts joined already."""
    said: Pieces = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        own: Callable[[], Pieces] = getattr(part, "pieces", dict)
        for name, pieces in own().items():
            said.setdefault(prefix + name, [piece.under(prefix) for piece in pieces])
    found: Pieces = {}
    for name, parameter in module.named_parameters():
        whole = [Piece({name: tuple(parameter.shape)})]
        parts = said.get(name, whole)
        joined = name in names and not any(name in piece.sources for piece in parts)
        found[name] = whole if joined else parts
    return found
