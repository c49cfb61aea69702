"""What llama.cpp changes in the weights of Qwen3-Next and Qwen3.5 to 3.8, and the way back.

Value heads of recurrent layers stand side by side per key head in a checkpoint: k0v0, k0v1, k1v0,
k1v1. llama.cpp takes them from each key head in turn: k0v0, k1v0, k0v1, k1v1. It adds 1 to
norms but the recurrent layers', and stores the negative exponential of A_log. In Qwen3-Next value
heads stay in their order, and b and a are stacked by key heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
"""Names of parameters that are no module's weight or bias."""
NORMS = ("output_norm", "attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm")


class Heads(NamedTuple):
    """Numbers of key and value heads of a recurrent layer, and their sizes."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


def heads_of(metadata: Mapping[str, Any]) -> Heads:
    """Return the heads that a file's metadata name. Raises KeyError."""
    prefix = f"{metadata['general.architecture']}.ssm."
    values = metadata[f"{prefix}time_step_rank"]
    return Heads(
        keys=metadata[f"{prefix}group_count"],
        values=values,
        key_dim=metadata[f"{prefix}state_size"],
        value_dim=metadata[f"{prefix}inner_size"] // values,
    )


def restore_of(metadata: Mapping[str, Any], module: str) -> Callable[[Tensor], Tensor] | None:
    """Return what makes the checkpoint's tensor of a module's, by its name in the file; None if it
    is the same."""
    if module in NORMS:
        return _minus_one
    if module == "ffn_gate_inp_shexp":
        return _as_row
    heads = heads_of(metadata)
    if metadata["general.architecture"] == "qwen3next":
        own: dict[str, Callable[[Tensor], Tensor]] = {
            "ssm_ba": partial(_by_part, heads=heads),
            "ssm_conv1d": _taps,
            "ssm_a": _own_logarithms,
        }
        return own.get(module)
    ways: dict[str, Callable[..., Tensor]] = {
        "attn_qkv": _values_last,
        "ssm_conv1d": _convolution,
        "attn_gate": _rows,
        "ssm_beta": _rows,
        "ssm_alpha": _rows,
        "ssm_dt": _rows,
        "ssm_a": _logarithms,
        "ssm_out": _columns,
    }
    return partial(ways[module], heads=heads) if module in ways else None


def _minus_one(value: Tensor) -> Tensor:
    return value - 1


def _by_part(value: Tensor, heads: Heads) -> Tensor:
    """Put b of all key heads before a."""
    shared = heads.values // heads.keys
    return value.unflatten(0, (heads.keys, 2, shared)).transpose(0, 1).flatten(0, 2)


def _as_row(value: Tensor) -> Tensor:
    """[H] -> [1, H]."""
    return value.reshape(1, -1)


def _rows(value: Tensor, heads: Heads) -> Tensor:
    """Put the rows of value heads back, of any size."""
    shape = value.shape
    by_head = value.reshape(heads.values // heads.keys, heads.keys, -1)
    return by_head.transpose(0, 1).reshape(shape)


def _columns(value: Tensor, heads: Heads) -> Tensor:
    return _rows(value.t(), heads).t().contiguous()


def _values_last(value: Tensor, heads: Heads) -> Tensor:
    """Put back the value heads, which follow the queries and keys."""
    first = 2 * heads.keys * heads.key_dim
    return torch.cat([value[:first], _rows(value[first:], heads)])


def _taps(value: Tensor) -> Tensor:
    """[C, taps] -> [C, 1, taps]."""
    return value[:, None]


def _convolution(value: Tensor, heads: Heads) -> Tensor:
    return _taps(_values_last(value, heads))


def _own_logarithms(value: Tensor) -> Tensor:
    return value.neg().log()


def _logarithms(value: Tensor, heads: Heads) -> Tensor:
    return _own_logarithms(_rows(value, heads))


MOVES_ROWS = (_rows, _values_last, _by_part)
"""Ways back that only reorder outputs."""
MOVES_COLUMNS = (_columns,)
"""Ways back that only reorder inputs."""
