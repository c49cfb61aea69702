"""Values between host and device, without waiting for what the device is doing; and zeros."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(
    values: Sequence[Any] | np.ndarray, device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Numbers, or rows of them, as a tensor on the device. To a GPU through pinned memory, whose
    copy is queued behind what runs there; from pageable memory it would wait for all of that."""
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else None
    if host is None or host.dtype != dtype:
        host = torch.tensor(values, dtype=dtype)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete once the stream has come to it; a CPU's tensor is itself."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[count]. On a CPU memory is taken only where something is written."""
    if device.type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, np.uint8)).view(dtype)
