"""FP8 with one scale per weight, as published for Ministral 3: `X.weight` in e4m3 and one number in
`X.weight_scale_inv` or `X.weight_scale`, which multiplies it.

quantization_config is `{"quant_method": "fp8", "activation_scheme": "static", "weight_block_size":
null, "modules_to_not_convert": [...]}`. Scales of activations (`activation_scale`, `input_scale`)
are not used.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import nn

from strobe.models.config_readers.fields import Fields
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization import detected
from strobe.models.quantization.compressed_tensors import read_names
from strobe.models.quantization.detected import experts_format
from strobe.models.quantization.rules import FP8, LINEAR, Rule, Rules
from strobe.models.weight_mapping import CheckpointTensors, WeightMapping

__all__ = ["METHOD", "apply", "describe", "experts_format", "read"]

METHOD = "fp8 without blocks"
"""Its name among `quantization.methods`; config.json has the one of FP8 by blocks."""
LABEL = "FP8 with one scale per weight"
SCALES = (".weight_scale", ".weight_scale_inv")


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError for other activations than in FP8."""
    fields.only(
        "activation_scheme",
        "static",
        "dynamic",
        why="use a checkpoint with one of these.",
    )
    fields.only("fmt", "e4m3", why="use a checkpoint in e4m3.")
    unquantized = read_names(fields, "modules_to_not_convert", "ignored_layers")
    fields.finish(("dequantize", "weight_block_size"))
    rules = Rules(rules=(Rule(LINEAR, FP8),), ignored=tuple(unquantized), loose=True)
    return Quantization(method=METHOD, block=(1, 1), rules=rules, activations=True)


def apply(
    module: nn.Module,
    mapping: WeightMapping,
    tensors: CheckpointTensors,
    quantization: Quantization,
) -> WeightMapping:
    """See `Method.apply`. Raises ValueError for scales that are not one number."""
    for name, shape in tensors.shapes.items():
        if name.endswith(SCALES) and prod(shape) != 1:
            raise ValueError(
                f"{tensors.source}: tensor {name} has shape {list(shape)}, but without "
                "weight_block_size in quantization_config a weight has one scale; weights and "
                "config.json must come from one checkpoint."
            )
    return detected.apply(module, mapping, tensors, replace(quantization, label=LABEL))


def describe(quantization: Quantization, decoder: DecoderConfig) -> str:
    """See `Method.describe`."""
    return detected.describe(replace(quantization, label=LABEL), decoder)
