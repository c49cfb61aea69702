"""Quantization methods of checkpoints, by their names in config.json."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from strobe.hub.files import GGUF_LINK
from strobe.models.config_readers.fields import Fields
from strobe.models.linear import Format
from strobe.models.model_config import DecoderConfig, DraftConfig, Quantization, TargetConfig
from strobe.models.quantization import (
    awq,
    compressed_tensors,
    forms,
    fp8,
    fp8_tensors,
    gguf_held,
    gptq,
    modelopt,
    mxfp4,
)
from strobe.models.quantization.published import check_format, format_name, method_name
from strobe.models.weight_mapping import CheckpointTensors, WeightMapping


class Method(Protocol):
    """The functions of a method's module."""

    def read(self, fields: Fields, decoder: DecoderConfig) -> Quantization:
        """Read quantization_config. Raises ValueError for unsupported values."""
        ...

    def apply(
        self,
        module: nn.Module,
        mapping: WeightMapping,
        tensors: CheckpointTensors,
        quantization: Quantization,
    ) -> WeightMapping:
        """Return the mapping to the checkpoint's quantized tensors, and set the formats of the
        module's linear layers. mapping: of the same module, unquantized; tensors: the
        checkpoint's."""
        ...

    def experts_format(self, quantization: Quantization, inputs: int) -> Format | None:
        """Return the format in which experts with so many inputs are held; None if they are
        dequantized."""
        ...

    def describe(self, quantization: Quantization, decoder: DecoderConfig) -> str:
        """Describe the weights' form in the checkpoint and in memory."""
        ...


METHODS: dict[str, Method] = {
    "auto-round": gptq,
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    fp8_tensors.METHOD: fp8_tensors,
    "gptq": gptq,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
}
HINT = (
    "use a checkpoint of compressed-tensors, of ModelOpt in FP8 or NVFP4, of GPTQ, AutoRound or "
    "AWQ, in FP8 with scales by blocks or one per weight, with experts in MXFP4, or an unquantized "
    "one."
)


Config = TypeVar("Config", TargetConfig, DraftConfig)

UNUSED = {
    "compressed-tensors": forms.UNUSED,
    "fp8": (".q_scale", ".k_scale", ".v_scale", ".kv_scale"),
    fp8_tensors.METHOD: (*forms.UNUSED, ".activation_scale"),
    "modelopt": forms.UNUSED,
}
"""Suffixes of tensors that loading leaves out, by method."""


def read_quantization(fields: Fields, decoder: DecoderConfig) -> Quantization | None:
    """Read quantization_config; None if there is none. Raises ValueError."""
    values = fields.object("quantization_config")
    if not values:
        return None
    config = {"quantization_config": values}
    check_format(config, fields.path, hint=HINT, running=METHODS)
    inner = Fields(values, fields.path)
    inner.get("quant_method")
    quantization = METHODS[method_name(values)].read(inner, decoder)
    return replace(quantization, label=format_name(config) or "")


def apply_quantization(
    module: nn.Module,
    mapping: WeightMapping,
    tensors: CheckpointTensors,
    quantization: Quantization | None,
) -> WeightMapping:
    """Apply the method of `quantization`; return the mapping unchanged if it is None."""
    if quantization is None:
        return mapping
    if quantization.method != gguf_held.METHOD:
        method = METHODS[quantization.method]
        mapping = method.apply(module, mapping, tensors, quantization)
    return gguf_held.hold(module, mapping, tensors) if quantization.held else mapping


def hold_stored(config: Config, directory: Path) -> Config:
    """Return a model's config whose linear layers keep quantized weights as stored."""
    quantization = config.quantization
    if quantization is None and (directory / GGUF_LINK).exists():
        quantization = Quantization(method=gguf_held.METHOD, block=(1, 1), label="GGUF")
    if quantization is None:
        return config
    return replace(config, quantization=replace(quantization, held=True))


def experts_format(quantization: Quantization, decoder: DecoderConfig) -> Format | None:
    """Return the format in which experts are held; None if they are dequantized."""
    if quantization.method == gguf_held.METHOD:
        return None
    return METHODS[quantization.method].experts_format(quantization, decoder.hidden_size)


def describe(quantization: Quantization, decoder: DecoderConfig) -> str:
    """Describe the weights' form in the checkpoint and in memory."""
    return METHODS[quantization.method].describe(quantization, decoder)
