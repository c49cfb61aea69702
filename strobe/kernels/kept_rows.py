"""When a recurrent layer's state stays as it is, and rows' changes are kept next to it."""

from __future__ import annotations

import torch
from torch import Tensor

SINGLE_ROWS = 4
"""Maximum number of rows after a state while single rows do not write it. Applying more rows takes
longer than writing the state."""


def rows_fit(accepted: Tensor, sizes: Tensor, starts_fresh: Tensor, pending: int) -> Tensor:
    """Whether spans leave their states as they are, and keep their rows' changes next to those
    of the accepted rows [S]. pending: rows that there is room for."""
    room = torch.where(sizes == 1, SINGLE_ROWS, pending)
    return ~starts_fresh & (accepted + sizes <= room)


def add_changes(state: Tensor, decay: Tensor, k: Tensor, changes: Tensor) -> Tensor:
    """Return the state [L, Hv, Dk, Dv] after N rows with known changes [L, N, Hv, Dv], log decay
    [L, N, Hv] and keys k [L, N, Hk, Dk], not normalized, by one GEMM. Rows without decay, key and
    change leave the state's bits as they are."""
    k = k.float()
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    k = k.repeat_interleave(state.shape[1] // k.shape[2], 2)
    total = decay.cumsum(1)
    k = k * (total[:, -1:] - total).exp()[..., None]
    faded = state * total[:, -1].exp()[..., None, None]
    return faded + k.permute(0, 2, 3, 1) @ changes.permute(0, 2, 1, 3)
