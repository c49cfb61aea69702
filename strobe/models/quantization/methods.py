"""Quantization methods of checkpoints, by their names in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from strobe.models.config_readers.fields import Fields
from strobe.models.linear import Format
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization import fp8, mxfp4
from strobe.models.quantization.published import check_format
from strobe.models.weight_mapping import WeightMapping


class Method(Protocol):
    """The functions of a method's module."""

    def read(self, fields: Fields, decoder: DecoderConfig) -> Quantization:
        """Read quantization_config. Raises ValueError for unsupported values."""
        ...

    def apply(
        self,
        module: nn.Module,
        mapping: WeightMapping,
        dtypes: Mapping[str, str],
        quantization: Quantization,
    ) -> WeightMapping:
        """Return the mapping to the checkpoint's quantized tensors, and set the formats of the
        module's linear layers. mapping: of the same module, unquantized; dtypes: of the
        checkpoint's tensors."""
        ...

    def experts_format(self, quantization: Quantization, inputs: int) -> Format:
        """Return the format in which experts with so many inputs are held."""
        ...

    def describe(self, quantization: Quantization, decoder: DecoderConfig) -> str:
        """Say how the checkpoint stores the weights, and how they are held in memory."""
        ...


METHODS: dict[str, Method] = {"fp8": fp8, "mxfp4": mxfp4}
HINT = "use a checkpoint in FP8 with scales by blocks, experts in MXFP4, or an unquantized one."


def read_quantization(fields: Fields, decoder: DecoderConfig) -> Quantization | None:
    """Read quantization_config; None if there is none. Raises ValueError."""
    values = fields.object("quantization_config")
    if not values:
        return None
    check_format({"quantization_config": values}, fields.path, hint=HINT, running=METHODS)
    inner = Fields(values, fields.path)
    return METHODS[str(inner.get("quant_method"))].read(inner, decoder)


def apply_quantization(
    module: nn.Module,
    mapping: WeightMapping,
    dtypes: Mapping[str, str],
    quantization: Quantization | None,
) -> WeightMapping:
    """Apply the method of `quantization`; return the mapping unchanged if it is None."""
    if quantization is None:
        return mapping
    return METHODS[quantization.method].apply(module, mapping, dtypes, quantization)


def experts_format(quantization: Quantization, decoder: DecoderConfig) -> Format:
    """Return the format in which experts are held."""
    return METHODS[quantization.method].experts_format(quantization, decoder.hidden_size)


def describe(quantization: Quantization, decoder: DecoderConfig) -> str:
    """Say how the checkpoint stores the weights, and how they are held in memory."""
    return METHODS[quantization.method].describe(quantization, decoder)
