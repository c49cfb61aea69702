"""The device of each rank."""

from __future__ import annotations

import torch


def choose_device(name: str, rank: int = 0, size: int = 1) -> torch.device:
    """Return the device of that name for one of `size` ranks; "auto" is a CUDA GPU if there is one.
    Raises ValueError."""
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
        if name == "cpu" and size > 1:
            raise ValueError(
                f"tensor_parallel_size is {size}, but this machine has no CUDA devices; ask for "
                "device cpu to run the ranks on the CPU."
            )
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device(kind)
    if size > 1 and number:
        raise ValueError(
            f"device is {name!r}, but tensor_parallel_size is {size}, and each rank has a GPU of "
            "its own; ask for cuda, and choose GPUs by CUDA_VISIBLE_DEVICES."
        )
    if size > max(count, 1):
        hint = f"at most {count}" if count else "device cpu"
        raise ValueError(
            f"tensor_parallel_size is {size}, but this machine has {count} CUDA devices; ask for "
            f"{hint}."
        )
    index = int(number or rank)
    if index >= count:
        hint = f"ask for cuda:0 to cuda:{count - 1}" if count else "ask for cpu"
        raise ValueError(f"device is {name!r}, but this machine has {count} CUDA devices; {hint}.")
    kinds = {torch.cuda.get_device_name(i): i for i in range(size)} if size > 1 else {}
    if len(kinds) > 1:
        both = " and ".join(f"cuda:{i} a {kind}" for kind, i in kinds.items())
        raise ValueError(
            f"tensor_parallel_size is {size}, but {both}; choose GPUs of one kind by "
            "CUDA_VISIBLE_DEVICES."
        )
    return torch.device(kind, index)
