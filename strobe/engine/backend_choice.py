"""Chooses attention backends, kernels and dtypes for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from strobe.attention.backend import AttentionBackend
from strobe.attention.reference import ReferenceBackend
from strobe.attention.triton import TritonBackend, unsupported_reason
from strobe.config import EngineConfig
from strobe.models.model_config import DecoderConfig, DraftConfig, TargetConfig
from strobe.models.quantization import rounding
from strobe.models.quantization.fp8 import unsupported_reason as fp8_unsupported
from strobe.models.quantization.packed import packed_format

FP8 = torch.float8_e4m3fn


class BackendChoice(NamedTuple):
    """attention, draft_attention: "triton" or "reference"; kernels: whether triton kernels run the
    models' operations and sampling; graphs: whether steps are captured; overlap: steps in flight;
    kv_dtype: dtype of keys and values; fp8: whether linear layers are held in FP8;
    packed: the format they are packed in for a CPU; rounded: the one they are rounded to for a
    GPU."""

    attention: str
    draft_attention: str
    kernels: bool
    graphs: bool
    overlap: int
    kv_dtype: torch.dtype
    fp8: bool
    packed: str | None
    rounded: str | None


def choose_backends(
    config: EngineConfig,
    target: TargetConfig,
    drafts: Sequence[DraftConfig],
    device: torch.device,
    dtype: torch.dtype,
) -> BackendChoice:
    """Choose what runs on the device. Raises ValueError for a setting that cannot run there, with
    the reason."""
    requested = config.attention_backend
    unsupported = _unsupported(target.decoder, device, dtype)
    attention = _backend("attention_backend", requested, unsupported)
    option = "attention_backend"
    if drafts and config.draft_attention_backend is not None:
        requested = config.draft_attention_backend
        option = "draft_attention_backend"
    reasons = [_unsupported(model.decoder, device, dtype) for model in drafts or (target,)]
    draft_unsupported = next((reason for reason in reasons if reason is not None), None)
    draft_attention = _backend(option, requested, draft_unsupported)
    no_fp8 = fp8_unsupported(device) if "triton" in (attention, draft_attention) else None
    if config.kv_cache_dtype == "fp8" and no_fp8 is not None:
        raise ValueError(f"kv_cache_dtype is 'fp8', but {no_fp8}; use kv_cache_dtype auto.")
    if unsupported is None and "reference" in (attention, draft_attention):
        unsupported = "the kernels need attention_backend triton"
    kernels = config.kernels != "torch" and unsupported is None
    if config.kernels == "triton" and unsupported is not None:
        raise ValueError(f"kernels is 'triton', but {unsupported}; use kernels auto.")
    unsupported = unsupported or (None if kernels else "kernels is 'torch'")
    unsupported = unsupported or no_fp8
    if config.weight_dtype == "fp8" and unsupported is not None:
        raise ValueError(f"weight_dtype is 'fp8', but {unsupported}; use weight_dtype auto.")
    is_rounded = device.type == "cuda" and config.weight_dtype in rounding.NAMES
    quantization = target.quantization
    in_rows = quantization is not None and quantization.method == "fp8" and not quantization.held
    return BackendChoice(
        attention=attention,
        draft_attention=draft_attention,
        kernels=kernels,
        graphs=attention == draft_attention == "triton" and config.cuda_graphs,
        overlap=config.overlap or (2 if device.type == "cuda" else 1),
        kv_dtype=FP8 if config.kv_cache_dtype == "fp8" else dtype,
        fp8=config.weight_dtype == "fp8" or (in_rows and unsupported is None),
        packed=packed_format(
            config.weight_dtype, target=target, drafts=drafts, device=device, dtype=dtype
        ),
        rounded=config.weight_dtype if is_rounded else None,
    )


def _backend(option: str, name: str, unsupported: str | None) -> str:
    """Return the attention backend that `name` asks for. unsupported: why triton cannot run."""
    if name == "triton" and unsupported is not None:
        raise ValueError(f"{option} is 'triton', but {unsupported}; use auto or reference.")
    return "reference" if name == "reference" or unsupported is not None else "triton"


def _unsupported(decoder: DecoderConfig, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason that triton's kernels cannot run, None if they can."""
    reasons = [unsupported_reason(width, dtype, device) for width in decoder.head_dims]
    return next((reason for reason in reasons if reason is not None), None)


def make_backends(
    choice: BackendChoice,
    target: TargetConfig,
    drafts: Sequence[DraftConfig],
    device: torch.device,
) -> tuple[AttentionBackend, AttentionBackend]:
    """Make the target's and the drafters' attention backends."""
    backends: dict[str, AttentionBackend] = {"reference": ReferenceBackend()}
    if "triton" in (choice.attention, choice.draft_attention):
        widths = [width for model in (target, *drafts) for width in model.decoder.head_dims]
        backends["triton"] = TritonBackend(device, max(widths))
    return backends[choice.attention], backends[choice.draft_attention]
