"""The K/V tensors. Target and drafter each have a store, whose layers have the page ids of their
page group."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVSpec:
    """The shape of one model's K/V: key-value heads and head size of each layer. groups: the page
    group of each layer, whose page ids its slots have; empty: the first one."""

    shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    groups: tuple[int, ...] = ()

    def group_of(self, layer: int) -> int:
        """Return the page group of a layer."""
        return self.groups[layer] if self.groups else 0

    def bytes_per_page(self, page_size: int, group: int | None = None) -> int:
        """Bytes of keys and values in a page of `page_size` tokens: of all layers, or of the layers
        of one page group."""
        values = [
            heads * width
            for layer, (heads, width) in enumerate(self.shapes)
            if group is None or self.group_of(layer) == group
        ]
        return 2 * sum(values) * page_size * self.dtype.itemsize


class KVScale(NamedTuple):
    """Divisors of a layer's keys and values, applied before they are stored."""

    keys: float = 1.0
    values: float = 1.0


NO_SCALE = KVScale()


class SeenPages(NamedTuple):
    """Pages [G, C] of `size` tokens that the rows of G spans read. unseen: the tokens in them, of
    G * C * size, that are none of the spans' own, or not written yet."""

    pages: Tensor
    size: int
    unseen: Tensor


class KVStore:
    """Keys and values of one model, in slots page * page_size + offset.

    layers: each layer's [slots, 2, Hkv, D]. data: all of them, [layers, slots, 2, Hkv, D] if their
    shapes are equal, else flat. Zero-filled, so that a masked read of an unwritten slot is finite,
    and so that a CPU allocates the memory here, not when pages are first used. scales: of each
    layer, for FP8: the values of `layers` and `gather` are divided by them. slot_bytes: of a slot's
    keys and values, in the layer where they are largest.
    """

    def __init__(
        self, spec: KVSpec, num_pages: Sequence[int], page_size: int, device: torch.device
    ):
        """num_pages: of each page group."""
        self.spec = spec
        self.scales = [NO_SCALE] * len(spec.shapes)
        self.slot_bytes = 2 * max(map(math.prod, spec.shapes)) * spec.dtype.itemsize
        slots = [num_pages[spec.group_of(i)] * page_size for i in range(len(spec.shapes))]
        shapes = [(n, 2, *shape) for n, shape in zip(slots, spec.shapes, strict=True)]
        values = [math.prod(shape) for shape in shapes]
        self.data = torch.zeros(sum(values), dtype=spec.dtype, device=device)
        parts = self.data.split(values)
        self.layers = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        if len(set(shapes)) == 1:
            self.data = self.data.view(len(shapes), *shapes[0])
        self._largest = torch.finfo(spec.dtype).max if spec.dtype.itemsize == 1 else None
        # torch has few operations on FP8, so FP8 rows are moved as bytes.
        layer_bytes = [self._bytes(layer) for layer in self.layers]
        self._data_bytes = self._bytes(self.data)
        self._flat = [layer.flatten(1) for layer in layer_bytes]
        self._keys, self._values = zip(*(layer.unbind(1) for layer in layer_bytes), strict=True)

    def by_page(self, page_size: int, group: int) -> list[Tensor]:
        """Return views of a page group's data as bytes by page, [layers, pages, bytes]: of all
        layers at once if there is one group and their shapes are equal."""
        own = [i for i in range(len(self.layers)) if self.spec.group_of(i) == group]
        parts = [self.layers[i][None] for i in own]
        if len(own) == len(self.layers) and self.data.dim() == 5:
            parts = [self.data]
        return [
            part.view(torch.uint8).view(len(part), part.shape[1] // page_size, -1) for part in parts
        ]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [T, Hkv, D] in slots [T]."""
        scale = self.scales[layer]
        self._keys[layer].index_copy_(0, slots, self._stored(keys, scale.keys))
        self._values[layer].index_copy_(0, slots, self._stored(values, scale.values))

    def write_joined(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store rows [T, 2 * Hkv * D], keys and then values, in slots [T]."""
        if self.scales[layer] != NO_SCALE:
            keys, values = rows.view(-1, *self.layers[layer].shape[1:]).unbind(1)
            self.write(layer, slots, keys, values)
            return
        self._flat[layer].index_copy_(0, slots, self._stored(rows))

    def write_all(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [T, L, Hkv, D] of all layers, of equal shape and without scales, in
        slots [T]."""
        rows = torch.stack([keys, values], 2).transpose(0, 1)
        self._data_bytes.index_copy_(1, slots, self._stored(rows))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots [G, N] -> keys, values [G, Hkv, N, D] as views of one gathered copy."""
        rows = self._flat[layer].index_select(0, slots.view(-1))
        return self._by_head(layer, rows, slots.shape[0])

    def _by_head(self, layer: int, rows: Tensor, spans: int) -> tuple[Tensor, Tensor]:
        """rows [G * N, 2 * Hkv * D] as stored -> keys, values [G, Hkv, N, D], views."""
        if self._largest is not None:
            rows = rows.view(self.spec.dtype)
        heads, width = self.spec.shapes[layer]
        rows = rows.view(spans, -1, 2, heads, width)
        keys, values = rows.permute(2, 0, 3, 1, 4).unbind()
        return keys, values

    def page_buffer(self, layer: int, seen: SeenPages, buffer: Tensor | None) -> Tensor:
        """Return memory for `gather_pages`: the buffer, if it is large enough."""
        rows = self._flat[layer]
        count = seen.pages.numel() * seen.size * rows.shape[1]
        if buffer is None or buffer.numel() < count:
            return rows.new_empty(count)
        return buffer

    def gather_pages(self, layer: int, seen: SeenPages, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys, values [G, Hkv, C * size, D] as views of the buffer, with zeros for unseen
        tokens. By pages, since a CPU copies few long rows faster than many short ones."""
        rows = self._flat[layer]
        pages = rows.view(-1, seen.size * rows.shape[1])
        count = seen.pages.numel()
        copy = buffer[: count * pages.shape[1]].view(count, -1)
        torch.index_select(pages, 0, seen.pages.view(-1), out=copy)
        tokens = copy.view(-1, rows.shape[1]).index_fill_(0, seen.unseen, 0)
        return self._by_head(layer, tokens, seen.pages.shape[0])

    def run(self, first: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return each layer's keys, values [1, Hkv, N, D] in slots first to first + N - 1, without
        a copy."""
        if self.data.dim() > 1:
            rows = self.data[:, None, first : first + count].permute(3, 0, 1, 4, 2, 5)
            return list(zip(rows[0].unbind(), rows[1].unbind(), strict=True))
        views = list[tuple[Tensor, Tensor]]()
        for layer in self.layers:
            keys, values = layer[None, first : first + count].permute(2, 0, 3, 1, 4).unbind()
            views.append((keys, values))
        return views

    def _bytes(self, values: Tensor) -> Tensor:
        return values if self._largest is None else values.view(torch.uint8)

    def _stored(self, values: Tensor, scale: float = 1.0) -> Tensor:
        """Convert to the stored form; FP8 is divided by `scale`, and saturates at its largest
        value."""
        if self._largest is None:
            return values
        if scale != 1.0:
            values = values.float() / scale
        return values.clamp(-self._largest, self._largest).to(self.spec.dtype).view(torch.uint8)
