"""Qwen3-Next: https://huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct and Qwen3-Coder-Next.

It has Qwen3.5's layers with experts. Checkpoints stack the projections of a recurrent layer by key
heads: the queries, keys, values and z of the first, then of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from strobe.kv.states import StateSpec
from strobe.models.config_readers.fields import Fields
from strobe.models.families import qwen3_5
from strobe.models.families.qwen3_5 import GatedDeltaNet, Qwen35Config
from strobe.models.linear import Linear
from strobe.models.modules import RMSNorm
from strobe.models.ops.torch_ops import Residual, TorchOps
from strobe.models.target import Target
from strobe.models.weight_mapping import WeightMapping, WeightPart, copy


def read(fields: Fields, directory: Path) -> Qwen35Config:
    experts = qwen3_5.read_experts(fields, 512, 10)
    return qwen3_5.read_text(
        fields, directory, "Qwen3NextForCausalLM", experts=experts, theta=10000.0
    )


def by_part(out: Tensor, value: Tensor, *, sizes: Sequence[int]) -> None:
    """Copy rows that are stacked by key heads, of which each has so many of each part, one part
    after another."""
    heads = value.unflatten(0, (-1, sum(sizes)))
    parts = [part.flatten(0, 1) for part in heads.split(sizes, 1)]
    copy(out, torch.cat(parts))


class StackedDeltaNet(GatedDeltaNet):
    """A gated delta rule whose queries, keys, values and z are one layer."""

    def make_projections(self, hidden: int, spec: StateSpec) -> None:
        values = spec.heads * spec.value_dim
        shared = spec.heads // spec.key_heads  # value heads of a key head
        wide = shared * spec.value_dim
        self.in_proj_qkvz = Linear(hidden, spec.channels + values)
        self.sizes_of_qkvz = [spec.key_dim, spec.key_dim, wide, wide]
        self.sizes_of_ba = [shared, shared]

    @property
    def linears(self) -> list[Linear]:
        return [self.in_proj_qkvz, self.in_proj_ba]

    def weight_mapping(self) -> WeightMapping:
        shape = tuple(self.conv1d.weight.shape)
        conv = WeightPart(sources={"conv1d.weight": shape}, stacked=self.channels)
        mapping: WeightMapping = {"conv1d.weight": [conv]}
        for name, linear, sizes in (
            ("in_proj_qkvz.weight", self.in_proj_qkvz, self.sizes_of_qkvz),
            ("in_proj_ba.weight", self.in_proj_ba, self.sizes_of_ba),
        ):
            sources = {name: tuple(linear.weight.shape)}
            mapping[name] = [WeightPart(sources=sources, fill=partial(by_part, sizes=sizes))]
        return mapping

    def project(self, ops: TorchOps, x: Residual, norm: RMSNorm) -> Sequence[Tensor]:
        if self.joined is not None:
            return super().project(ops, x, norm)
        qkvz, ba = super().project(ops, x, norm)
        return [*qkvz.split(self.outputs[:2], 1), ba]


def make(config: Qwen35Config, max_positions: int) -> Target:
    return qwen3_5.make(config, max_positions, StackedDeltaNet)
