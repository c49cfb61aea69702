"""Sums of few rows over GPUs of one machine, through memory that all of them can read.

Each rank writes its tensor to a buffer, then reads everyone's and adds them up in the order of
ranks: one launch, in captured graphs too. Of a large tensor every rank would read all copies in
whole; NCCL exchanges each part once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

LIMITS = {1: 1 << 22, 2: 1 << 22, 4: 1 << 19, 8: 1 << 18}
"""The largest tensors, in bytes, by number of ranks. Not measured."""
_ALIGNMENT = 16


class SymmetricMemory:
    """Raises RuntimeError unless the GPUs can read each other's memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._name = group.group_name
        buffer = symmetric.empty(LIMITS[group.size()], dtype=torch.uint8, device=device)
        symmetric.rendezvous(buffer, group)
        self._buffers = {dtype: buffer.view(dtype) for dtype in (torch.bfloat16, torch.float32)}

    def fits(self, x: Tensor) -> bool:
        """Whether the kernel takes a tensor of this size, dtype and alignment."""
        buffer = self._buffers.get(x.dtype)
        if buffer is None or x.nbytes > buffer.nbytes:
            return False
        return not (x.nbytes % _ALIGNMENT or x.data_ptr() % _ALIGNMENT)

    def sum(self, x: Tensor) -> Tensor:
        """Add up the ranks' contiguous tensors of one shape."""
        own = self._buffers[x.dtype][: x.numel()].view(x.shape)
        return torch.ops.symm_mem.one_shot_all_reduce_copy(own, x, "sum", self._name)
