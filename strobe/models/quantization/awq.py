"""Checkpoints of AWQ in its layout gemm: `qweight` [K, N / 8], eight columns of 4 bits a word in an
order of their own, and `scales` and `qzeros` per group of inputs."""

from __future__ import annotations

from strobe.models.config_readers.fields import Fields
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization.compressed_tensors import read_names
from strobe.models.quantization.detected import apply, describe, experts_format
from strobe.models.quantization.gptq import HARMLESS
from strobe.models.quantization.rules import LINEAR, Rule, Rules, Scheme

__all__ = ["apply", "describe", "experts_format", "read"]

_HARMLESS = (*HARMLESS, "do_fuse", "fuse_max_seq_len")
"""AutoRound writes this format, too."""


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError for other layouts and sizes of codes."""
    why = "use a checkpoint of AWQ in 4 bits with version gemm."
    version = str(fields.get("version", "gemm")).lower()
    bits = fields.get("bits", fields.get("w_bit"))
    for key, value, wanted in (("version", version, "gemm"), ("bits", bits, 4)):
        if value != wanted:
            raise ValueError(f"{fields.path}: {key} is {value!r}, which is not supported; {why}")
    group = fields.get("group_size", fields.get("q_group_size"))
    scheme = Scheme(
        kind="int",
        bits=4,
        group=group if isinstance(group, int) and group > 0 else None,
        asymmetric=fields.flag("zero_point", True),
    )
    fields.only("data_type", "int", why=why)
    fields.only("sym", not scheme.asymmetric, why="it must contradict zero_point.")
    ignored = ("lm_head", *read_names(fields, "modules_to_not_convert"))
    fields.finish(_HARMLESS)
    rules = Rules(rules=(Rule(LINEAR, scheme),), ignored=ignored, loose=True)
    return Quantization(method="awq", block=(1, 1), rules=rules)
