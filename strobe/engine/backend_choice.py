"""Chooses attention backends, kernels and dtypes for a device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from strobe.attention.backend import AttentionBackend
from strobe.attention.compiled import CompiledBackend
from strobe.attention.reference import ReferenceBackend
from strobe.attention.triton import TritonBackend, unsupported_reason
from strobe.config import EngineConfig
from strobe.kernels.cpu.calls import CpuCalls
from strobe.kernels.cpu.library import find_compiler
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.quantization import rounding
from strobe.models.quantization.fp8 import unsupported_reason as fp8_unsupported
from strobe.models.quantization.packed import packed_format

FP8 = torch.float8_e4m3fn


class WeightFormat(NamedTuple):
    """How linear layers are held. fp8: in FP8; packed: the format they are packed in for a CPU;
    rounded: the one they are rounded to for a GPU."""

    fp8: bool
    packed: str | None
    rounded: str | None


class BackendChoice(NamedTuple):
    """attention, draft_attention: "triton", "compiled" or "reference"; kernels: whether triton
    kernels run the models' operations and sampling; compiled: whether C runs the models' operations
    on a CPU; graphs: whether steps are captured; overlap: steps in flight; kv_dtype: dtype of keys
    and values; weights, draft_weights: storage of the target's and the drafters' weights in
    memory."""

    attention: str
    draft_attention: str
    kernels: bool
    compiled: bool
    graphs: bool
    overlap: int
    kv_dtype: torch.dtype
    weights: WeightFormat
    draft_weights: WeightFormat


def choose_backends(
    config: EngineConfig,
    target: TargetConfig,
    drafts: Sequence[DraftConfig],
    device: torch.device,
    dtype: torch.dtype,
) -> BackendChoice:
    """Choose what runs on the device. Raises ValueError for a setting that cannot run there, with
    the reason."""
    unsupported = _unsupported([target], device, dtype)
    attention = _backend("attention_backend", config.attention_backend, unsupported)
    draft_attention = attention
    if drafts:
        draft_attention = _draft_backend(config, _unsupported(drafts, device, dtype))
    if config.compile:
        _check_compile(device, dtype)
    no_fp8 = fp8_unsupported(device) if "triton" in (attention, draft_attention) else None
    if config.kv_cache_dtype == "fp8" and no_fp8 is not None:
        raise ValueError(f"kv_cache_dtype is 'fp8', but {no_fp8}; use kv_cache_dtype auto.")
    if unsupported is None and "reference" in (attention, draft_attention):
        unsupported = "the kernels need attention_backend triton"
    no_kernels = _no_kernels(config.kernels, unsupported)
    formats = _weight_formats(
        config, target, drafts, device=device, dtype=dtype, no_fp8=no_kernels or no_fp8
    )
    return BackendChoice(
        attention=_compiled(attention, config),
        draft_attention=_compiled(draft_attention, config),
        kernels=no_kernels is None,
        compiled=config.compile,
        graphs=attention == draft_attention == "triton" and config.cuda_graphs,
        overlap=config.overlap or (2 if device.type == "cuda" else 1),
        kv_dtype=FP8 if config.kv_cache_dtype == "fp8" else dtype,
        weights=formats["weight_dtype"],
        draft_weights=formats.get("draft_weight_dtype", formats["weight_dtype"]),
    )


def _check_compile(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if no compiled operation can run."""
    if device.type != "cpu":
        raise ValueError(
            f"compile is set, but the device is {device}, where steps run as kernels and captured "
            "graphs already; leave compile out."
        )
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"compile is set, but dtype is {name!r}, and its operations are in float32; use dtype "
            "auto or leave compile out."
        )
    find_compiler()


def _compiled(attention: str, config: EngineConfig) -> str:
    """Return the attention backend in the place of the reference, if that was not asked for."""
    asked = config.draft_attention_backend or config.attention_backend
    return "compiled" if config.compile and asked == "auto" else attention


def _weight_formats(
    config: EngineConfig,
    target: TargetConfig,
    drafts: Sequence[DraftConfig],
    *,
    device: torch.device,
    dtype: torch.dtype,
    no_fp8: str | None,
) -> dict[str, WeightFormat]:
    """Return the formats of weights in memory, by option: weight_dtype, and draft_weight_dtype if
    it is set. no_fp8: why products of FP8 weights cannot run. Raises ValueError for a format that
    cannot."""
    names = {"weight_dtype": config.weight_dtype}
    if config.draft_weight_dtype is not None:
        names["draft_weight_dtype"] = config.draft_weight_dtype
    for option, name in names.items():
        if name == "fp8" and no_fp8 is not None:
            raise ValueError(f"{option} is 'fp8', but {no_fp8}; use {option} auto.")
    formats = {
        option: WeightFormat(
            fp8=name == "fp8",
            packed=packed_format(
                name,
                target,
                _models(option, names, target, drafts),
                device=device,
                dtype=dtype,
                option=option,
            ),
            rounded=name if device.type == "cuda" and name in rounding.NAMES else None,
        )
        for option, name in names.items()
    }
    quantization = target.quantization
    in_blocks = quantization is not None and quantization.method == "fp8" and not quantization.held
    if in_blocks and no_fp8 is None:
        formats["weight_dtype"] = formats["weight_dtype"]._replace(fp8=True)
    return formats


def _models(
    option: str, options: Collection[str], target: TargetConfig, drafts: Sequence[DraftConfig]
) -> Sequence[TargetConfig | DraftConfig]:
    """Return the models that an option among `options` is about."""
    if option == "draft_weight_dtype":
        return drafts
    return (target,) if "draft_weight_dtype" in options else (target, *drafts)


def _draft_backend(config: EngineConfig, unsupported: str | None) -> str:
    """Return the drafters' attention backend. unsupported: why triton cannot run for them."""
    if config.draft_attention_backend is None:
        return _backend("attention_backend", config.attention_backend, unsupported)
    return _backend("draft_attention_backend", config.draft_attention_backend, unsupported)


def _backend(option: str, name: str, unsupported: str | None) -> str:
    """Return the attention backend that `name` asks for. unsupported: why triton cannot run."""
    if name == "triton" and unsupported is not None:
        raise ValueError(f"{option} is 'triton', but {unsupported}; use auto or reference.")
    return "reference" if name == "reference" or unsupported is not None else "triton"


def _no_kernels(name: str, unsupported: str | None) -> str | None:
    """Return the reason that the models run without triton kernels, None if they run with them.
    name: of the setting `kernels`; unsupported: why they cannot run."""
    if name == "triton" and unsupported is not None:
        raise ValueError(f"kernels is 'triton', but {unsupported}; use kernels auto.")
    if unsupported is None and name == "torch":
        return "kernels is 'torch'"
    return unsupported


def _unsupported(
    models: Sequence[TargetConfig | DraftConfig], device: torch.device, dtype: torch.dtype
) -> str | None:
    """Return the reason that triton's kernels cannot run for some of the models, None if they
    can."""
    widths = [width for model in models for width in model.decoder.head_dims]
    reasons = [unsupported_reason(width, dtype, device) for width in widths]
    return next((reason for reason in reasons if reason is not None), None)


def make_backends(
    choice: BackendChoice,
    target: TargetConfig,
    drafts: Sequence[DraftConfig],
    device: torch.device,
) -> tuple[AttentionBackend, AttentionBackend]:
    """Make the target's and the drafters' attention backends."""
    backends: dict[str, AttentionBackend] = {"reference": ReferenceBackend()}
    if "compiled" in (choice.attention, choice.draft_attention):
        backends["compiled"] = CompiledBackend(CpuCalls())
    if "triton" in (choice.attention, choice.draft_attention):
        widths = [width for model in (target, *drafts) for width in model.decoder.head_dims]
        backends["triton"] = TritonBackend(device, max(widths))
    return backends[choice.attention], backends[choice.draft_attention]
