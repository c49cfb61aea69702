"""Qwen3.5, text: https://huggingface.co/Qwen/Qwen3.5-9B, with experts Qwen3.5-35B-A3B, and their
siblings, Qwen3.6's among them.

Three layers in four have no attention but a gated delta rule (Yang et al., arXiv 2412.06464) over a
state per sequence. Legend as in `strobe.models.layers`; Hv value heads of Dv, C channels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.attention.mask import LayerMask
from strobe.kv.states import StateSpec
from strobe.models.config import DecoderConfig, ExpertShape, TargetConfig
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_layer_types,
    read_target,
)
from strobe.models.config_readers.fields import MEND, Fields, positive
from strobe.models.config_readers.fp8 import read_quantization
from strobe.models.config_readers.rope import read_rope
from strobe.models.families.experts import Experts, Router, SparseMLP, gated_silu, read_counts
from strobe.models.layers import MLP, RMSNorm, Rope, RotaryTable, add_linear, rotate
from strobe.models.target import Target

logger = logging.getLogger(__name__)

BESIDE = ("dtype", "torch_dtype", "eos_token_id", "quantization_config")
"""Keys that count for text where text_config leaves them out."""
OUTER = (
    "vision_config", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id",
)  # fmt: skip
"""Keys beside text_config that text does not need."""
INNER = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mlp_only_layers")
"""Keys of heads that draft, which are not used here, and of layers without experts, where none has
any."""
SPARSE = ("qwen3_5_moe", "qwen3_5_moe_text")
"""The model types whose layers all have experts."""


@dataclass(frozen=True)
class Qwen35Config(TargetConfig):
    """layer_types: of every layer; rotary_dim: how much of a head is turned."""

    layer_types: tuple[str, ...] = ()
    rotary_dim: int = 0


class Mix(Protocol):
    """What layers are called with: attention and, for those that have none, `mix`."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...

    def mix(self, layer: int, x: Tensor, decay: Tensor, rate: Tensor, weight: Tensor) -> Tensor:
        """x [T, C]: queries, keys and values before the convolution of weight [C, kernel]; decay
        (its logarithm) and rate [T, Hv] -> [T, Hv, Dv]. layer: counts recurrent ones only."""
        ...


def read(fields: Fields, directory: Path) -> TargetConfig:
    inner = fields
    if fields.object("text_config"):
        inner = fields.inner("text_config", BESIDE, first=("tie_word_embeddings",))
        fields.finish(OUTER)
    sparse = fields.get("model_type") in SPARSE
    return _read_text(inner, directory, fields.get("architectures"), sparse=sparse)


def _read_text(fields: Fields, directory: Path, names: Any, *, sparse: bool) -> Qwen35Config:
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    experts = _read_experts(fields) if sparse else None
    why = "use a checkpoint of Qwen3.5."
    fields.only("attn_output_gate", True, why=why)
    fields.only("output_gate_type", "swish", "silu", why=why)
    fields.only("mamba_ssm_dtype", "float32", why=why)
    types = _layer_types(fields)
    rope, rotary_dim = _read_rope(fields)
    full = types.count("full_attention")
    decoder = read_decoder(
        fields,
        (LayerMask(True, None),) * full,
        theta=1e7,
        head_dim=256,
        kv_heads=2 if experts else 4,
        intermediate_size=experts.shared if experts else None,
        rope=rope,
        output_gate=True,
        unfused="no kernels run layers of this family whole",
        experts=experts,
    )
    return read_target(
        fields,
        directory,
        names[0] if names else f"Qwen3_5{'Moe' if sparse else ''}ForCausalLM",
        decoder,
        kind=Qwen35Config,
        harmless=INNER,
        quantization=read_quantization(fields),
        states=_read_states(fields, len(types) - full),
        layer_types=tuple(types),
        rotary_dim=rotary_dim,
    )


def _read_experts(fields: Fields) -> ExpertShape:
    why = "use a checkpoint of Qwen3.5, whose layers all have experts, their weights normalized."
    fields.only("mlp_only_layers", [], why=why)
    fields.only("decoder_sparse_step", 1, why=why)
    fields.only("norm_topk_prob", True, why=why)
    count, chosen = read_counts(fields, 256, 8)
    layers = (True,) * fields.integer("num_hidden_layers")
    size = fields.integer("moe_intermediate_size", 512)
    shared = fields.integer("shared_expert_intermediate_size", 512)
    return ExpertShape(count, chosen, size, layers, shared=shared)


def _layer_types(fields: Fields) -> list[str]:
    """Where none are listed, every `full_attention_interval`-th layer has attention."""
    known = ("linear_attention", "full_attention")
    interval = fields.integer("full_attention_interval", 4)
    if fields.get("layer_types"):
        return read_layer_types(fields, known)
    count = fields.integer("num_hidden_layers")
    return [known[(i + 1) % interval == 0] for i in range(count)]


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
            f"linear_num_key_heads {spec.key_heads}; {MEND}"
        )
    return spec


def _read_rope(fields: Fields) -> tuple[Any, int]:
    """The rope, and how much of a head it turns. Text stands on one line: the three positions of
    multimodal rope are one, so that how they share the head means nothing."""
    parameters = fields.object("rope_parameters") or fields.object("rope_scaling")
    fields.object("rope_scaling")
    theta = parameters.get("rope_theta", fields.get("rope_theta", 1e7))
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor", 0.25))
    size = positive(share, "partial_rotary_factor", fields.path) * fields.integer("head_dim", 256)
    if size % 2 or size > fields.integer("head_dim", 256):
        raise ValueError(
            f"{fields.path}: partial_rotary_factor {share!r} turns {size:g} of a head's "
            f"{fields.integer('head_dim', 256)} numbers, but must turn an even number; {MEND}"
        )
    longest = fields.integer("max_position_embeddings", 32768)
    theta = positive(theta, "rope_theta", fields.path)
    return read_rope(parameters, theta, longest, fields.path, drafter=True), int(size)


class Norm(RMSNorm):
    """x / rms(x) * (1 + weight), in fp32."""

    def fuse(self) -> None:
        """After loading: keep 1 + weight."""
        self.scale = 1.0 + self.weight.float()

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.scale.shape, self.scale, self.eps).to(x.dtype)


class GatedNorm(nn.Module):
    """x / rms(x) * weight * silu(gate)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)
        return (x * F.silu(gate.float())).to(gate.dtype)


class GatedAttention(nn.Module):
    """Attention whose answer is multiplied with a gate of its own; a part of each head is turned.
    layer: counts layers with attention only."""

    def __init__(self, config: DecoderConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        width, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(hidden, 2 * width, bias=bias)  # per head: the query, then the gate
        self.k_proj = nn.Linear(hidden, kv, bias=bias)
        self.v_proj = nn.Linear(hidden, kv, bias=bias)
        self.o_proj = nn.Linear(width, hidden, bias=bias)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, residual: Tensor, rope: Rope, attend: Mix) -> Tensor:
        """x, residual [T, H] -> residual + attention(x)."""
        rows, size = x.shape[0], self.head_dim
        q, gate = self.q_proj(x).view(rows, -1, 2 * size).split(size, -1)
        k, v = (product(x).view(rows, -1, size) for product in (self.k_proj, self.v_proj))
        q, k = (_turn(norm(y), rope) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        out = attend(self.layer, q, k, v)
        return add_linear(residual, out * gate.reshape(rows, -1).sigmoid(), self.o_proj)


def _turn(x: Tensor, rope: Rope) -> Tensor:
    """x [T, heads, D]: the first of each head's numbers, as many as rope has, are turned."""
    size = rope[0].shape[-1]
    return torch.cat([rotate(x[..., :size], rope), x[..., size:]], -1)


class GatedDeltaNet(nn.Module):
    """layer: counts recurrent layers only."""

    def __init__(self, config: DecoderConfig, spec: StateSpec, layer: int):
        super().__init__()
        self.layer, hidden, width = layer, config.hidden_size, spec.heads * spec.value_dim
        self.in_proj_qkv = nn.Linear(hidden, spec.channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, width, bias=False)
        self.in_proj_b = nn.Linear(hidden, spec.heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, spec.heads, bias=False)
        self.conv1d = nn.Conv1d(
            spec.channels, spec.channels, spec.kernel, groups=spec.channels, bias=False
        )
        self.dt_bias = nn.Parameter(torch.ones(spec.heads))
        self.A_log = nn.Parameter(torch.ones(spec.heads))
        self.norm = GatedNorm(spec.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor, attend: Mix) -> Tensor:
        """x, residual [T, H] -> residual + what the state answers."""
        time = F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        decay, rate = -self.A_log.float().exp() * time, self.in_proj_b(x).sigmoid().float()
        out = attend.mix(self.layer, self.in_proj_qkv(x), decay, rate, self.conv1d.weight[:, 0])
        out = self.norm(out, self.in_proj_z(x).view(out.shape))
        return add_linear(residual, out.flatten(1), self.out_proj)


class SharedMLP(SparseMLP):
    """Experts, and beside them one that every row goes through, as much as a gate lets."""

    def __init__(self, config: DecoderConfig, shape: ExpertShape):
        size = config.hidden_size
        super().__init__(Router(size, shape), Experts(size, shape), called="gate")
        self.shared_expert = MLP(replace(config, intermediate_size=shape.shared))
        self.shared_expert_gate = nn.Linear(size, 1, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """x, residual [T, H] -> residual + mlp(x). What is added up is small beside the residual
        stream, so that this comes last."""
        inner = gated_silu(self.shared_expert.gate_up_proj(x))
        gate = self.shared_expert_gate(x).sigmoid()
        return residual + super().forward(x, gate * self.shared_expert.down_proj(inner))


class Layer(nn.Module):
    """index: counts layers of the same type."""

    def __init__(self, config: Qwen35Config, kind: str, index: int):
        super().__init__()
        decoder = config.decoder
        self.input_layernorm = Norm(decoder.hidden_size, decoder.rms_norm_eps)
        if kind == "full_attention":
            self.self_attn = GatedAttention(decoder, index)
        else:
            assert config.states is not None
            self.linear_attn = GatedDeltaNet(decoder, config.states, index)
        self.recurrent = kind != "full_attention"
        self.post_attention_layernorm = Norm(decoder.hidden_size, decoder.rms_norm_eps)
        experts = decoder.experts
        self.mlp = MLP(decoder) if experts is None else SharedMLP(decoder, experts)

    def forward(self, x: Tensor, rope: Rope, attend: Mix) -> Tensor:
        normed = self.input_layernorm(x)
        if self.recurrent:
            x = self.linear_attn(normed, x, attend)
        else:
            x = self.self_attn(normed, x, rope, attend)
        return self.mlp(self.post_attention_layernorm(x), x)


def make(config: TargetConfig, max_positions: int) -> Target:
    assert isinstance(config, Qwen35Config)
    decoder, types = config.decoder, config.layer_types
    layers = [Layer(config, kind, types[:i].count(kind)) for i, kind in enumerate(types)]
    target = Target(config, layers, max_positions)
    target.norm = Norm(decoder.hidden_size, decoder.rms_norm_eps)
    target.skipped += ("visual.", "model.visual.", "mtp.")
    target.rope = RotaryTable(config.rotary_dim, decoder.rope, max_positions)
    return target
