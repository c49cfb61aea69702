"""The K/V tensors. Target and drafter each have a store, indexed by the same page ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVSpec:
    """The shape of one KV group: key-value heads and head size of each layer."""

    shapes: tuple[tuple[int, int], ...]
    dtype: torch.dtype

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes of keys and values in a page of `page_size` tokens."""
        values = sum(heads * width for heads, width in self.shapes)
        return 2 * values * page_size * self.dtype.itemsize


class KVStore:
    """Keys and values of one group, in slots page * page_size + offset.

    layers: each layer's [slots, 2, Hkv, D]. data: all of them, [layers, slots, 2, Hkv, D] if their
    shapes are equal, else flat. Zero-filled, so that a masked read of an unwritten slot is finite,
    and so that a CPU's memory is taken here, not when pages are first used.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device):
        self.spec = spec
        slots = num_pages * page_size
        values = [slots * 2 * heads * width for heads, width in spec.shapes]
        self.data = torch.zeros(sum(values), dtype=spec.dtype, device=device)
        shapes = [(slots, 2, *shape) for shape in spec.shapes]
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

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [T, Hkv, D] in slots [T]."""
        self._keys[layer].index_copy_(0, slots, self._stored(keys))
        self._values[layer].index_copy_(0, slots, self._stored(values))

    def write_all(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys, values [T, L, Hkv, D] of all layers, of equal shape, in slots [T]."""
        rows = torch.stack([keys, values], 2).transpose(0, 1)
        self._data_bytes.index_copy_(1, slots, self._stored(rows))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots [G, N] -> keys, values [G, Hkv, N, D] as views of one gathered copy."""
        rows = self._flat[layer].index_select(0, slots.flatten())
        if self._largest is not None:
            rows = rows.view(self.spec.dtype)
        rows = rows.view(*slots.shape, *self.layers[layer].shape[1:])
        return rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)

    def _bytes(self, values: Tensor) -> Tensor:
        return values if self._largest is None else values.view(torch.uint8)

    def _stored(self, values: Tensor) -> Tensor:
        """Convert to the stored form; FP8 saturates at its largest value."""
        if self._largest is None:
            return values
        return values.clamp(-self._largest, self._largest).to(self.spec.dtype).view(torch.uint8)
