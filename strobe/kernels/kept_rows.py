"""When a recurrent layer's state stays as it is, and rows' changes are kept next to it."""

from __future__ import annotations

import torch
from torch import Tensor

SINGLE_ROWS = 4
"""Rows after a state, at most, when single rows leave it as it is. More take longer to apply than
writing the state takes."""


def rows_fit(accepted: Tensor, sizes: Tensor, starts_fresh: Tensor, pending: int) -> Tensor:
    """Whether spans leave their states as they are, and keep their rows' changes next to those
    of the accepted rows [S]. pending: rows that there is room for."""
    room = torch.where(sizes == 1, SINGLE_ROWS, pending)
    return ~starts_fresh & (accepted + sizes <= room)
