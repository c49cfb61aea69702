"""The operations that decoder layers and the drafter are made of.

`TorchOps` has every operation in plain torch, which is the definition of right; `TritonOps` has the
same signatures and runs kernels where these serve a call, plain torch where they do not. A model
holds one of them as `ops`, and its layers say everything through it, once.
"""

from __future__ import annotations

import torch

from strobe.models.ops.torch_ops import TorchOps


def make_ops(device: torch.device, dtype: torch.dtype, *, kernels: bool) -> TorchOps:
    """The operations of models on `device` in `dtype`; models of one stream may share them.
    kernels: whether triton's run there (`strobe.engine.device` knows)."""
    if not kernels:
        return TorchOps()
    from strobe.models.ops.triton_ops import TritonOps

    return TritonOps(device, dtype)
