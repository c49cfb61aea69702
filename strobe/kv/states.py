"""The state of recurrent layers, which keep one per sequence instead of keys and values.

                          length          the next forward's start
    ... window: kernel - 1 | block: up to `pending` rows |
                 state ----^    accepted ---^

A state cannot be cut back as keys and values can. So it stands before the newest block, and what
each of the block's rows changes in it is kept beside it, which no later row has a part in; the next
forward, which knows where it starts, first takes in those that were accepted. Rows of a longer
span, a prefill chunk's, are taken in at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateSpec:
    """The shape of a target's recurrent layers: gated delta rule (Yang et al., arXiv 2412.06464)
    behind a causal convolution over `kernel` rows. A key head serves heads / key_heads others."""

    layers: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """C: queries, keys and values side by side, as the convolution takes them."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def values(self) -> int:
        """Numbers in the states of all layers of one sequence."""
        return self.layers * self.heads * self.key_dim * self.value_dim

    def bytes_per_slot(self, pending: int, dtype: torch.dtype) -> int:
        """Bytes that one sequence takes: all in fp32 but the convolution's inputs, in dtype."""
        rows = self.layers * (self.kernel - 1 + pending) * self.channels * dtype.itemsize
        row = 2 * self.heads + self.key_heads * self.key_dim + self.heads * self.value_dim
        return 4 * self.values + rows + 4 * self.layers * pending * row + 8


class StateStore:
    """Per layer and slot, the spare one included: state [L, N + 1, heads, key_dim, value_dim];
    window [L, N + 1, kernel - 1 + pending, C], the convolution's inputs before the block and in it.
    Of the block's rows gates [L, N + 1, pending, 2, heads], logarithm of the decay and learning
    rate; keys [L, N + 1, pending, key_heads, key_dim], not yet of length 1; and changes [L, N + 1,
    pending, heads, value_dim], which each adds to the state by its key. length [N + 1]: positions
    that the states have taken in."""

    def __init__(
        self,
        spec: StateSpec,
        num_slots: int,
        pending: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """pending: rows of the longest block."""
        self.spec, self.pending = spec, pending
        slots = spec.layers, num_slots + 1
        shape = (*slots, spec.heads, spec.key_dim, spec.value_dim)
        self.state = torch.zeros(shape, dtype=torch.float32, device=device)
        rows = spec.kernel - 1 + pending
        self.window = torch.zeros((*slots, rows, spec.channels), dtype=dtype, device=device)
        gates = (*slots, pending, 2, spec.heads)
        self.gates = torch.zeros(gates, dtype=torch.float32, device=device)
        keys = (*slots, pending, spec.key_heads, spec.key_dim)
        self.keys = torch.zeros(keys, dtype=torch.float32, device=device)
        changes = (*slots, pending, spec.heads, spec.value_dim)
        self.changes = torch.zeros(changes, dtype=torch.float32, device=device)
        self.length = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.tensors = self.state, self.window, self.gates, self.keys, self.changes

    def save(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Return a slot's states and copies of them, for `restore`."""
        views = [self.length[slot], *[part[:, slot] for part in self.tensors]]
        return [(view, view.clone()) for view in views]

    def restore(self, saved: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put back what was saved."""
        for view, copy in saved:
            view.copy_(copy)
