"""The tensors behind the pages. Target and drafter are two stores on the same page ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVSpec:
    """The shape of one KV group: its layers, key-value heads and head size."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def bytes_per_page(self, page_size: int) -> int:
        """Bytes one page of `page_size` tokens takes in this group, keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * page_size * self.dtype.itemsize


class KVStore:
    """Keys and values of one group: [layers, slots, 2, Hkv, D]; slot = page * page_size + offset.

    Zero-filled, so that a masked read of a slot never written is finite.
    """

    def __init__(self, spec: KVSpec, num_pages: int, page_size: int, device: torch.device):
        self.spec = spec
        shape = (spec.layers, num_pages * page_size, 2, spec.kv_heads, spec.head_dim)
        self.data = torch.zeros(shape, dtype=spec.dtype, device=device)
        self._largest = torch.finfo(spec.dtype).max if spec.dtype.itemsize == 1 else None
        # torch has few operations on FP8: there rows are moved as bytes.
        plain = self.data if self._largest is None else self.data.view(torch.uint8)
        self._plain = plain
        self._flat = [layer.flatten(1) for layer in plain]
        self._keys, self._values = [list(part) for part in plain.unbind(2)]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values [T, Hkv, D] to slots [T]."""
        self._keys[layer].index_copy_(0, slots, self._stored(keys))
        self._values[layer].index_copy_(0, slots, self._stored(values))

    def write_all(self, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """keys, values [T, L, Hkv, D] of every layer to slots [T]."""
        rows = torch.stack([keys, values], 2).transpose(0, 1)
        self._plain.index_copy_(1, slots, self._stored(rows))

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """slots [G, N] -> keys, values [G, Hkv, N, D] as views of one gathered copy."""
        rows = self._flat[layer].index_select(0, slots.flatten())
        if self._largest is not None:
            rows = rows.view(self.spec.dtype)
        rows = rows.view(*slots.shape, 2, self.spec.kv_heads, self.spec.head_dim)
        return rows[:, :, 0].transpose(1, 2), rows[:, :, 1].transpose(1, 2)

    def _stored(self, values: Tensor) -> Tensor:
        """As they lie in memory; what FP8 cannot hold becomes its largest value."""
        if self._largest is None:
            return values
        return values.clamp(-self._largest, self._largest).to(self.spec.dtype).view(torch.uint8)
