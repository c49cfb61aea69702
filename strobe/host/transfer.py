"""Copies between host and device that do not wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(
    values: Sequence[Any] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Copy numbers, or rows of numbers, to a tensor on the device. A copy to a GPU goes through
    pinned memory, so that it is queued on the stream; from pageable memory it would synchronize."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else None
    if host is None or host.dtype != dtype:
        host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Queue a copy to host memory, complete once the stream reaches it; return CPU tensors as they
    are."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
