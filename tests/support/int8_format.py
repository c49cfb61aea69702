"""A weight format that Strobe does not have: int8 values with one scale for each tensor.

It is read from a checkpoint, held in memory and dequantized by ops. Nothing in layers or families
knows it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strobe.models.config_readers.fields import Fields
from strobe.models.linear import Linear
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.weight_mapping import CheckpointTensors, WeightMapping, WeightPart
from tests.support.quantized_checkpoints import is_linear
from tests.support.tiny_checkpoints import edit_json


class Int8:
    """Entry of `METHODS`, and the format of linear layers whose tensors are all stored so."""

    bits_per_value = 8.0

    def read(self, fields: Fields, decoder: DecoderConfig) -> Quantization:
        fields.finish(())
        return Quantization("int8", (1, 1))

    def apply(
        self,
        module: nn.Module,
        mapping: WeightMapping,
        tensors: CheckpointTensors,
        quantization: Quantization,
    ) -> WeightMapping:
        mapping = dict(mapping)
        for path, linear in module.named_modules():
            if not isinstance(linear, Linear):
                continue
            parts = mapping[f"{path}.weight"]
            sources = [name for part in parts for name in part.sources]
            if not tensors.dtypes or all(tensors.dtypes.get(name) == "I8" for name in sources):
                values = torch.empty_like(linear.weight, dtype=torch.int8)
                linear.weight = nn.Parameter(values, requires_grad=False)
                linear.scale = torch.empty(values.shape[:-1], device=values.device)
                linear.format = self
                linear.fixed = True
                mapping[f"{path}.weight"] = [part._replace(dtypes=("I8",)) for part in parts]
                mapping[f"{path}.scale"] = [scale_of(part) for part in parts]
        return mapping

    def dequantize(self, values: Tensor, scale: Tensor) -> Tensor:
        return values.float() * scale[..., None]

    def fill_random(self, values: Tensor, generator: torch.Generator) -> None:
        values.random_(-127, 128, generator=generator)

    def fill_scale(self, scale: Tensor) -> None:
        scale.fill_(2.0**-12)

    def experts_format(self, quantization: Quantization, inputs: int) -> Int8:
        return self

    def describe(self, quantization: Quantization, decoder: DecoderConfig) -> str:
        return "int8, a scale per tensor, kept as they are"


def scale_of(part: WeightPart) -> WeightPart:
    """The scale of a part's tensor, for each of its outputs."""
    sources = {f"{name}_scale": (1,) for name in part.sources}
    return WeightPart(sources, part.at, lambda out, scale: out.copy_(scale))


def to_int8(path: Path, plain: Path, stored: Callable[[str], bool] = is_linear) -> None:
    """Put the checkpoint in `path` into int8; `plain` becomes one of the same values."""
    shutil.copytree(path, plain)
    values = load_file(path / "model.safetensors")
    small = dict(values)
    for name in filter(stored, values):
        scale = values[name].abs().max() / 127
        small[name] = (values[name] / scale).round().to(torch.int8)
        small[f"{name}_scale"] = scale[None]
        values[name] = small[name].float() * scale
    save_file(small, path / "model.safetensors")
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    edit_json(path / "config.json", quantization_config={"quant_method": "int8"})
