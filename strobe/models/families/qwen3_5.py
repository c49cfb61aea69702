"""Qwen3.5's text decoder: https://huggingface.co/Qwen/Qwen3.5-9B, with experts Qwen3.5-35B-A3B, and
their siblings, including Qwen3.6's.

Three in four layers have no attention but a gated delta rule (Yang et al., arXiv 2412.06464) with
one state per sequence. Legend as in `strobe.models.layers`; Hv value heads of Dv, C channels.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from strobe.attention.mask import LayerMask
from strobe.kernels.reference_recurrent import DeltaInput
from strobe.kv.states import StateSpec
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_layer_types,
    read_rope_parameters,
    read_target,
)
from strobe.models.config_readers.fields import HINT, Fields, positive
from strobe.models.config_readers.rope import RopeConfig, read_rope
from strobe.models.families.experts import Experts, Router, SparseMLP, read_counts
from strobe.models.layers import MLP, DecoderLayer, Layer
from strobe.models.linear import Linear, LinearView
from strobe.models.model_config import DecoderConfig, ExpertShape, TargetConfig
from strobe.models.modules import Attention, RMSNorm
from strobe.models.ops.torch_ops import ExpertsLayer, ForwardRows, Residual, TorchOps
from strobe.models.quantization.kernel_weights import join_linears
from strobe.models.target import Target
from strobe.models.weight_mapping import WeightMapping, WeightPart, copy, stacked

logger = logging.getLogger(__name__)

IGNORED_FIELDS = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""Keys that the text decoder inherits if text_config lacks them."""
OUTER = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id",
)  # fmt: skip
"""Keys outside text_config without effect on the text decoder."""
INNER = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")
"""Keys of drafting heads, which are not used, and of layers without experts, of which there are
none."""
SPARSE = ("qwen3_5_moe", "qwen3_5_moe_text")
"""Model types in which all layers have experts."""


@dataclass(frozen=True)
class Qwen35Config(TargetConfig):
    """layer_types: of every layer."""

    layer_types: tuple[str, ...] = ()


def read(fields: Fields, directory: Path) -> TargetConfig:
    inner = fields
    if fields.object("text_config"):
        inner = fields.inner("text_config", IGNORED_FIELDS, first=("tie_word_embeddings",))
        fields.finish(OUTER)
    sparse = fields.get("model_type") in SPARSE
    names = fields.get("architectures")
    return read_text(
        inner,
        directory,
        names[0] if names else f"Qwen3_5{'Moe' if sparse else ''}ForCausalLM",
        experts=read_experts(inner, 256, 8) if sparse else None,
    )


def read_text(
    fields: Fields,
    directory: Path,
    architecture: str,
    *,
    experts: ExpertShape | None,
    theta: float = 1e7,
) -> Qwen35Config:
    """Read the text decoder. theta: the default base of the rope."""
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    why = "use a checkpoint of Qwen3.5."
    fields.only("attn_output_gate", True, why=why)
    fields.only("output_gate_type", "swish", "silu", why=why)
    fields.only("mamba_ssm_dtype", "float32", why=why)
    types = _layer_types(fields)
    full = types.count("full_attention")
    decoder = read_decoder(
        fields,
        (LayerMask(True, None),) * full,
        theta=theta,
        head_dim=256,
        kv_heads=2 if experts else 4,
        intermediate_size=experts.shared if experts else None,
        rope=_read_rope(fields, theta),
        output_gate=True,
        norm_offset=1.0,
        experts=experts,
    )
    return read_target(
        fields,
        directory,
        architecture,
        decoder,
        kind=Qwen35Config,
        harmless=INNER,
        states=_read_states(fields, len(types) - full),
        layer_types=tuple(types),
    )


def read_experts(fields: Fields, count: int, top_k: int) -> ExpertShape:
    """Read the experts. count, top_k: their default numbers in a layer and for a row."""
    why = "use a checkpoint of Qwen3.5, whose layers all have experts, their weights normalized."
    fields.only("mlp_only_layers", [], why=why)
    fields.only("decoder_sparse_step", 1, why=why)
    fields.only("norm_topk_prob", True, why=why)
    count, top_k = read_counts(fields, count, top_k)
    layers = (True,) * fields.integer("num_hidden_layers")
    size = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    return ExpertShape(
        count=count,
        top_k=top_k,
        moe_intermediate_size=size,
        layers=layers,
        shared=shared,
    )


def _layer_types(fields: Fields) -> list[str]:
    """Return the layers' types. By default every `full_attention_interval`-th layer has
    attention."""
    supported = ("linear_attention", "full_attention")
    interval = fields.integer("full_attention_interval", 4)
    if fields.get("layer_types"):
        return read_layer_types(fields, supported)
    count = fields.integer("num_hidden_layers")
    return [supported[(i + 1) % interval == 0] for i in range(count)]


def _read_states(fields: Fields, layers: int) -> StateSpec:
    spec = StateSpec(
        layers=layers,
        heads=fields.integer("linear_num_value_heads", 32),
        key_heads=fields.integer("linear_num_key_heads", 16),
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        kernel=fields.integer("linear_conv_kernel_dim", 4, low=2),
    )
    if spec.heads % spec.key_heads:
        raise ValueError(
            f"{fields.path}: linear_num_value_heads {spec.heads} is not a multiple of "
            f"linear_num_key_heads {spec.key_heads}; {HINT}"
        )
    return spec


def _read_rope(fields: Fields, default: float) -> RopeConfig:
    """Read the rope, which rotates a part of each head. In text the three positions of multimodal
    rope are equal, so mrope_section has no effect."""
    parameters = read_rope_parameters(fields, default)
    theta = parameters.get("rope_theta", fields.get("rope_theta", default))
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    size = positive(share, "partial_rotary_factor", fields.path) * fields.integer("head_dim", 256)
    if size % 2 or size > fields.integer("head_dim", 256):
        raise ValueError(
            f"{fields.path}: partial_rotary_factor {share!r} turns {size:g} of a head's "
            f"{fields.integer('head_dim', 256)} numbers, but must turn an even number; {HINT}"
        )
    max_position = fields.integer("max_position_embeddings", 32768)
    theta = positive(theta, "rope_theta", fields.path)
    rope = read_rope(parameters, theta, max_position, fields.path, drafter=True)
    return replace(rope, share=size / fields.integer("head_dim", 256))


class GatedNorm(nn.Module):
    """The weight of x / rms(x) * weight * silu(gate)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps


class GatedDeltaNet(nn.Module):
    """layer: index among the recurrent layers."""

    def __init__(self, config: DecoderConfig, spec: StateSpec, layer: int):
        super().__init__()
        self.layer = layer
        hidden = config.hidden_size
        width = spec.heads * spec.value_dim
        keys = spec.key_heads * spec.key_dim
        self.channels = keys, keys, width
        self.make_projections(hidden, spec)
        # Never quantized: they are small, and their errors accumulate in the states.
        parts = {"in_proj_b": spec.heads, "in_proj_a": spec.heads}
        self.in_proj_ba = Linear(hidden, parts, fixed=True)
        self.outputs = spec.channels, width, 2 * spec.heads
        self.conv1d = nn.Conv1d(
            spec.channels, spec.channels, spec.kernel, groups=spec.channels, bias=False
        )
        self.dt_bias = nn.Parameter(torch.ones(spec.heads))
        self.A_log = nn.Parameter(torch.ones(spec.heads))
        self.norm = GatedNorm(spec.value_dim, config.rms_norm_eps)
        self.out_proj = Linear(width, hidden, split="inputs")
        self.joined: LinearView | None = None

    def make_projections(self, hidden: int, spec: StateSpec) -> None:
        """Make the layers of queries, keys and values, and of z."""
        self.in_proj_qkv = Linear(hidden, spec.channels)
        self.in_proj_z = Linear(hidden, spec.heads * spec.value_dim)

    @property
    def linears(self) -> list[Linear]:
        """The layers whose outputs are qkv, z and ba."""
        return [self.in_proj_qkv, self.in_proj_z, self.in_proj_ba]

    def join(self) -> None:
        if self.joined is None:
            self.joined = join_linears(*self.linears)

    def weight_mapping(self) -> WeightMapping:
        """Queries, keys and values are one layer, in checkpoints as well."""
        names = {"in_proj_qkv.weight": self.in_proj_qkv.weight, "conv1d.weight": self.conv1d.weight}
        return {
            name: [WeightPart(sources={name: tuple(weight.shape)}, stacked=self.channels)]
            for name, weight in names.items()
        }

    def project(self, ops: TorchOps, x: Residual, norm: RMSNorm) -> Sequence[Tensor]:
        """Residual stream -> qkv, z and ba; see `DeltaInput`."""
        if self.joined is not None:
            return ops.norm_linear(x, norm, self.joined).split(self.outputs, 1)
        y = ops.norm(x.value, norm)
        return [ops.linear(y, linear) for linear in self.linears]

    def forward(self, ops: TorchOps, x: Residual, norm: RMSNorm, rows: ForwardRows) -> Tensor:
        """Residual stream -> normed and gated outputs of the states [T, Hv Dv]."""
        qkv, z, ba = self.project(ops, x, norm)
        delta = DeltaInput(
            qkv=qkv,
            z=z,
            ba=ba,
            conv=self.conv1d.weight[:, 0],
            a_log=self.A_log,
            dt_bias=self.dt_bias,
            gain=self.norm.weight,
            eps=self.norm.eps,
        )
        return ops.delta_rule(delta, self.layer, rows)


class SharedMLP(SparseMLP):
    """Experts, and a shared MLP for all rows whose output is multiplied by a gate. joined: their
    weights in one layer each, the shared one last."""

    def __init__(self, config: DecoderConfig, shape: ExpertShape):
        size = config.hidden_size
        super().__init__(Router(size, shape), Experts(size, shape), called="gate")
        self.shared_expert = MLP(replace(config, intermediate_size=shape.shared))
        self.shared_expert_gate = Linear(size, 1)
        self.joined: tuple[LinearView, LinearView] | None = None

    def join(self) -> None:
        """Make the shared MLP one more expert, if it is as large as one and no rank has whole
        experts."""
        experts = self.experts
        shared = self.shared_expert
        if experts.held is not None or self.joined is not None:
            return
        count, size = self.router.weight.shape
        # cuBLAS has fast kernels for rows of logits that are multiples of 16 bytes.
        zeros = LinearView(weight=self.router.weight.new_zeros(-(count + 1) % 8, size))
        router = join_linears(self.router.linear, self.shared_expert_gate, zeros)
        gate_up = join_linears(experts.gate_up_proj, shared.gate_up_proj)
        down = join_linears(experts.down_proj, shared.down_proj)
        if router and gate_up and down:
            self.router.joined = router
            self.joined = (gate_up, down)

    @property
    def layer(self) -> ExpertsLayer:
        layer = super().layer
        gate_up, down = self.joined or (layer.gate_up, layer.down)
        return layer._replace(gate_up=gate_up, down=down)

    def forward(self, ops: TorchOps, x: Residual, norm: RMSNorm, rows: ForwardRows) -> None:
        if self.joined is not None:
            return super().forward(ops, x, norm, rows)
        y = ops.norm(x.value, norm)
        shared = self.shared_expert
        inner = ops.linear(y, shared.gate_up_proj, "silu")
        gate = ops.linear(y, self.shared_expert_gate)
        output = ops.gates.gate(ops.linear(inner, shared.down_proj), gate, x.value)
        x.value = ops.experts(y, self.router.logits(ops, y), self.layer, onto=output, rows=rows)


class GatedAttention(Attention):
    """In checkpoints each head's gate follows its query; here all gates come first."""

    def weight_mapping(self) -> WeightMapping:
        mapping = stacked("qkv_proj", self.qkv_proj)
        for parts in mapping.values():
            parts[0] = parts[0]._replace(fill=self._fill)
        return mapping

    def _fill(self, out: Tensor, value: Tensor) -> None:
        heads = value.unflatten(0, (-1, 2, self.head_dim))
        copy(out, heads.transpose(0, 1).flip(0).flatten(0, 2))


class GatedLayer(DecoderLayer):
    """A layer whose attention output is multiplied by a gate. layer: index among such layers."""

    def __init__(self, config: DecoderConfig, layer: int, mlp: nn.Module | None):
        super().__init__(config, layer, mlp)
        self.self_attn = GatedAttention(config, layer)

    def forward(self, ops: TorchOps, x: Residual, rows: ForwardRows) -> None:
        attention = self.self_attn
        qkv = ops.norm_linear(x, self.input_layernorm, attention.qkv_proj)
        gate, qkv = qkv.tensor_split([attention.gate_heads * attention.head_dim], 1)
        mixed = ops.gates.gate(ops.attention(qkv, attention, rows), gate)
        ops.add_linear(x, mixed, attention.o_proj, next_norm=self.post_attention_layernorm)
        self.mlp(ops, x, self.post_attention_layernorm, rows)


class RecurrentLayer(Layer):
    """A layer whose rows are mixed by a gated delta rule."""

    def __init__(self, config: DecoderConfig, mixer: GatedDeltaNet, mlp: nn.Module | None):
        super().__init__()
        self.input_layernorm = RMSNorm.of_stream(config)
        self.linear_attn = mixer
        self.post_attention_layernorm = RMSNorm.of_stream(config)
        self.mlp = mlp or MLP(config)

    def forward(self, ops: TorchOps, x: Residual, rows: ForwardRows) -> None:
        mixed = self.linear_attn(ops, x, self.input_layernorm, rows)
        ops.add_linear(x, mixed, self.linear_attn.out_proj, next_norm=self.post_attention_layernorm)
        self.mlp(ops, x, self.post_attention_layernorm, rows)


def make(
    config: Qwen35Config, max_positions: int, mixer: type[GatedDeltaNet] = GatedDeltaNet
) -> Target:
    decoder = config.decoder
    types = config.layer_types
    layers = list[Layer]()
    for i, kind in enumerate(types):
        index = types[:i].count(kind)  # among layers of the same type
        mlp = None if decoder.experts is None else SharedMLP(decoder, decoder.experts)
        if kind == "full_attention":
            layers.append(GatedLayer(decoder, index, mlp))
        else:
            assert config.states is not None
            layers.append(RecurrentLayer(decoder, mixer(decoder, config.states, index), mlp))
    target = Target(config, layers, max_positions)
    target.skipped += ("visual.", "model.visual.", "mtp.")
    return target
