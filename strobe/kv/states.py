"""States of recurrent layers: one per sequence instead of keys and values.

                          length          the next forward's start
    ... window: kernel - 1 | up to `pending` rows        |
                 state ----^    accepted ---^

A state cannot be truncated as keys and values can. So the stored state is an older one, together
with each later row's change to it, which no row after that affects. The start of the next forward
shows the number of accepted rows, whose changes it applies first. It writes the state only if its
own rows would not fit next to them. Rows of a longer span, a prefill chunk, update the state at
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strobe.kernels.kept_rows import SINGLE_ROWS, add_changes
from strobe.step import StateCopy

STATES_IN_A_COPY = 4
"""States that a copy to a kept row holds at once, in tensors of its own."""


@dataclass(frozen=True)
class StateSpec:
    """The shape of a target's recurrent layers: a causal convolution over `kernel` rows, then the
    gated delta rule (Yang et al., arXiv 2412.06464). A key head serves heads / key_heads value
    heads."""

    layers: int
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def channels(self) -> int:
        """C: queries, keys and values concatenated, the convolution's input."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def values(self) -> int:
        """Elements of one sequence's states over all layers."""
        return self.layers * self.heads * self.key_dim * self.value_dim

    def bytes_per_kept_state(self, dtype: torch.dtype) -> int:
        """Bytes of a kept state: of all layers, with the convolution's window."""
        window = self.layers * (self.kernel - 1) * self.channels
        return 4 * self.values + dtype.itemsize * window

    def bytes_per_slot(self, pending: int, dtype: torch.dtype) -> int:
        """Bytes of a `StateStore` per sequence."""
        store = StateStore(
            self, num_slots=0, pending=pending, dtype=dtype, device=torch.device("meta")
        )
        return sum(tensor.nbytes for tensor in (*store.tensors, store.length))


class StateStore:
    """The tensors of L layers and N slots plus the spare one.

    state [L, N + 1, heads, key_dim, value_dim]. window [L, N + 1, kernel - 1 + pending, C]: the
    convolution's inputs up to the state and after it. Of the rows after it: gates [L, N + 1,
    pending, 2, heads], log decay and learning rate; keys [L, N + 1, pending, key_heads, key_dim],
    not normalized; changes [L, N + 1, pending, heads, value_dim], each added to the state as the
    outer product with its key. length [N + 1]: positions in each slot's state.

    Of K kept states, whose slot may have gone on: kept_state [K, L, heads, key_dim, value_dim] and
    kept_window [K, L, kernel - 1, C]."""

    def __init__(
        self,
        spec: StateSpec,
        num_slots: int,
        pending: int,
        dtype: torch.dtype,
        device: torch.device,
        num_kept: int = 0,
    ):
        """pending: maximum rows of a block, whose changes are kept; raised to SINGLE_ROWS if it is
        lower. num_kept: rows for kept states."""
        self.pending = max(pending, SINGLE_ROWS)
        self.spec = spec
        self.taps = spec.kernel - 1
        stored = (spec.layers, num_slots + 1)
        state = (*stored, spec.heads, spec.key_dim, spec.value_dim)
        window = (*stored, spec.kernel - 1 + self.pending, spec.channels)
        gates = (*stored, self.pending, 2, spec.heads)
        keys = (*stored, self.pending, spec.key_heads, spec.key_dim)
        changes = (*stored, self.pending, spec.heads, spec.value_dim)
        self.state = torch.zeros(state, dtype=torch.float32, device=device)
        self.window = torch.zeros(window, dtype=dtype, device=device)
        self.gates = torch.zeros(gates, dtype=torch.float32, device=device)
        self.keys = torch.zeros(keys, dtype=torch.float32, device=device)
        self.changes = torch.zeros(changes, dtype=torch.float32, device=device)
        self.length = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        kept = (num_kept, spec.layers)
        kept_state = (*kept, *state[2:])
        kept_window = (*kept, spec.kernel - 1, spec.channels)
        self.kept_state = torch.zeros(kept_state, dtype=torch.float32, device=device)
        self.kept_window = torch.zeros(kept_window, dtype=dtype, device=device)
        self.tensors = self.state, self.window, self.gates, self.keys, self.changes

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states between slots and kept rows, in order. A slot that is kept has reached the
        copy's length; the kept row stays unchanged if the slot's state is already past it."""
        for copy in copies:
            if copy.keeps:
                self._keep(copy)
            else:
                self.state[:, copy.slot].copy_(self.kept_state[copy.row])
                self.window[:, copy.slot, : self.taps].copy_(self.kept_window[copy.row])
                self.length[copy.slot] = copy.length

    def _keep(self, copy: StateCopy) -> None:
        """Keep a slot's state with the changes of its next rows, up to the copy's length. The host
        does not know the number of these rows."""
        missing = copy.length - self.length[copy.slot]
        is_covered = missing >= 0
        index = torch.arange(self.pending, device=self.length.device)
        rows = (index < missing).view(1, -1, 1, 1)
        # Mask by value: rows that do not belong to the sequence may be NaN.
        gates, keys, changes = (
            part[:, copy.slot].where(rows, 0.0) for part in (self.gates, self.keys, self.changes)
        )
        state = add_changes(self.state[:, copy.slot], gates[:, :, 0], keys, changes)
        taps = torch.arange(self.taps, device=self.length.device) + missing.clamp(0, self.pending)
        window = self.window[:, copy.slot].index_select(1, taps)
        for kept, value in ((self.kept_state, state), (self.kept_window, window)):
            kept[copy.row] = torch.where(is_covered, value, kept[copy.row])

    def save(self, slot: int) -> list[tuple[Tensor, Tensor]]:
        """Return views of a slot's tensors with copies of them, for `restore`."""
        views = [self.length[slot], *[part[:, slot] for part in self.tensors]]
        return [(view, view.clone()) for view in views]

    def restore(self, saved: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy the saved values back."""
        for view, copy in saved:
            view.copy_(copy)
