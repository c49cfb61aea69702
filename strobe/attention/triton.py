"""Attention by our own Triton kernel, without gathering keys or syncing with the host."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.mask import LayerMask
from strobe.kv.kv_store import KVScale, KVStore

MIN_CAPABILITY = (8, 0)
"""Of 8.0, 8.9 and 12.0, kernels are compiled in tests; only on 9.0 have they run."""
HEAD_DIMS = (64, 128, 256, 512)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def unsupported_reason(head_dim: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why the kernel cannot serve a model of this head size and dtype, or None."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return f"the device is {device}, and triton needs a CUDA device"
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if (capability := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        return "it needs compute capability 8.0 or above, but the device has {}.{}".format(
            *capability
        )
    if head_dim not in HEAD_DIMS:
        return f"it has no head size {head_dim}, only 64, 128, 256 and 512"
    if dtype not in DTYPES:
        return f"it has no {str(dtype).removeprefix('torch.')}, only bfloat16, float16 and float32"
    return None


class TritonPlan:
    """The spans of one forward, for the kernel that every layer launches."""

    def __init__(
        self,
        backend: TritonBackend,
        batch: Batch,
        store: KVStore,
        masks: Sequence[LayerMask],
    ):
        self.batch = batch
        self.store = store
        self.masks = masks
        self.sizes = batch.sizes
        self._starts = batch.starts.contiguous()  # may be a column of the state's
        self._backend = backend

    def kv(self, layer: int) -> Tensor:
        """The layer's keys and values, [slots, 2, Hkv, D]."""
        return self.store.layers[layer]

    def slots(self, layer: int) -> Tensor:
        """Each row's slot in the layer's keys and values, [T]."""
        return self.batch.kv_slots[self.store.spec.group_of(layer)]

    def scale(self, layer: int) -> KVScale:
        """See `PagedPlan`."""
        return self.store.scales[layer]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, Hq, D], k, v [T, Hkv, D], sinks [Hq] -> [T, Hq * D]: store K/V, then attend."""
        self.store.write(layer, self.slots(layer), k, v)
        scale = self.scale(layer).keys
        return self.over(layer, q if scale == 1.0 else q * scale, sinks)

    def over(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q [T, Hq, D], times the keys' scale -> [T, Hq * D]: attend to K/V stored before."""
        batch = self.batch
        return self._backend.attention(
            q,
            self.kv(layer),
            starts=self._starts,
            sizes=batch.sizes,
            row_starts=batch.row_starts,
            tables=batch.tables[self.store.spec.group_of(layer)],
            table_rows=batch.slots,
            page_size=batch.page_size,
            mask=self.masks[layer],
            longest=batch.longest,
            limit=batch.limit,
            sinks=sinks,
            value_scale=self.scale(layer).values,
            workspace=self._backend.workspace,
        )


class TritonBackend:
    """Reads the paged cache in place; steps can be captured in CUDA graphs."""

    def __init__(self, device: torch.device, head_dim: int):
        """head_dim: maximum over the models that share this backend and its workspace."""
        from strobe.kernels.attention import AttentionWorkspace, paged_attention

        self.attention = paged_attention
        self.workspace = AttentionWorkspace(device, head_dim)

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> TritonPlan:
        return TritonPlan(self, batch, store, masks)
