"""gpt-oss's tensors in GGUF files. llama.cpp takes gate and up apart, which take turns in the
checkpoint's rows, and puts the first 16 values of a block of MXFP4 in the low halves of its bytes,
where the checkpoint has every second value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.hub.gguf_file import StoredTensor

NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
PARAMETERS = {"attn_sinks.weight": "self_attn.sinks"}
_GATE = "ffn_gate_exps.weight"


class Joined(NamedTuple):
    """A `GGUFTensor` whose sources are still names in the file."""

    sources: tuple[str, ...]
    restore: Callable[..., Tensor] | None
    is_raw: bool = False


def restore_of(metadata: Mapping[str, Any], module: str) -> Callable[[Tensor], Tensor] | None:
    """Return None: llama.cpp changes no values but the experts'."""
    return None


def holds_mxfp4(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether all experts are stored in MXFP4."""
    types = {t.type for name, t in tensors.items() if name.endswith("_exps.weight")}
    return types == {"MXFP4"}


def experts(tensors: Mapping[str, StoredTensor]) -> dict[str, Joined]:
    """Return the tensors of the layers' experts by the module's names."""
    result: dict[str, Joined] = {}
    is_mxfp4 = holds_mxfp4(tensors)
    for name in tensors:
        if not name.endswith(_GATE):
            continue
        prefix = name.removesuffix(_GATE)
        own = f"layers.{prefix.split('.')[1]}.mlp.experts."
        gate_up = tuple(f"{prefix}ffn_{part}_exps" for part in ("gate", "up"))
        for path, sources in (
            ("gate_up_proj", gate_up),
            ("down_proj", (f"{prefix}ffn_down_exps",)),
        ):
            weights = tuple(f"{source}.weight" for source in sources)
            biases = tuple(f"{source}.bias" for source in sources)
            if is_mxfp4:
                result[f"{own}{path}_blocks"] = Joined(
                    sources=weights, restore=_blocks, is_raw=True
                )
                result[f"{own}{path}_scales"] = Joined(
                    sources=weights, restore=_scales, is_raw=True
                )
            else:
                result[f"{own}{path}"] = Joined(sources=weights, restore=_transposed)
            result[f"{own}{path}_bias"] = Joined(sources=biases, restore=_in_turns)
    return result


def _in_turns(*values: Tensor) -> Tensor:
    """[E, N, ...] of gate and up -> [E, 2 N, ...]."""
    return values[0] if len(values) == 1 else torch.stack(values, 2).flatten(1, 2)


def _transposed(*values: Tensor) -> Tensor:
    return _in_turns(*values).transpose(1, 2)


def _blocks(*values: Tensor) -> Tensor:
    """[E, N, blocks, 17] -> [E, N, blocks, 16], two neighboring values a byte."""
    codes = [value[..., 1:] for value in values]
    halves = [(code & 15, code >> 4) for code in codes]
    joined = [
        torch.cat([low[..., ::2] | low[..., 1::2] << 4, high[..., ::2] | high[..., 1::2] << 4], -1)
        for low, high in halves
    ]
    return _in_turns(*joined)


def _scales(*values: Tensor) -> Tensor:
    """[E, N, blocks, 17] -> [E, N, blocks]."""
    return _in_turns(*(value[..., 0] for value in values))
