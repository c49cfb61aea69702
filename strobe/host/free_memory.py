"""A device's free memory."""

from __future__ import annotations

import torch

from strobe.host.host_memory import free_host_memory


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory()
