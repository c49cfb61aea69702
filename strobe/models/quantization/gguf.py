"""Tensors of a GGUF file: their names in a checkpoint, dequantization, and the order of rope."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.host.mapped_file import MappedFile
from strobe.hub.gguf_file import GGUFHeader, StoredTensor, read_header

NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Names of modules by their names in GGUF files."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are read as they are."""
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<leaf>weight|bias)")


class GGUFTensor(NamedTuple):
    """stored: its place in the file. heads: number of heads whose rows llama.cpp reordered; 0 if it
    did not."""

    stored: StoredTensor
    heads: int

    @property
    def dtype(self) -> str:
        """The dtype after dequantization, by safetensors' name."""
        return self.stored.type if self.stored.type in FLOATS else "F32"

    def decode(self, data: Tensor) -> Tensor:
        """Return the tensor from its bytes in the file."""
        shape = self.stored.shape
        if self.stored.type in FLOATS:
            value = data.clone().view(FLOATS[self.stored.type]).view(shape)
        else:
            value = _dequantized(data, self.stored.type).view(shape)
        if not self.heads:
            return value
        # llama.cpp puts the two dimensions of each of rope's pairs side by side.
        pairs = value.view(self.heads, -1, 2, *shape[1:])
        return pairs.transpose(1, 2).reshape(shape)


def _dequantized(data: Tensor, kind: str) -> Tensor:
    dequantize, types = _library()
    return torch.from_numpy(dequantize(data.numpy(), types[kind]))


def own_name(name: str) -> str:
    """Return the module's name for a tensor; an unknown one as it is, which loading rejects."""
    match = _NAME.fullmatch(name)
    if match is None or match["module"] not in NAMES:
        return name
    layer = "" if match["layer"] is None else f"layers.{match['layer']}."
    return f"{layer}{NAMES[match['module']]}.{match['leaf']}"


class GGUFFile(MappedFile):
    """A GGUF file. tensors: by the module's names. Raises ValueError if it is damaged, or if it is
    quantized and the package gguf is missing."""

    def __init__(self, path: Path):
        header = read_header(path)
        if any(tensor.type not in FLOATS for tensor in header.tensors.values()):
            _library()
        super().__init__(path)
        self.tensors = {
            own_name(name): GGUFTensor(tensor, _reordered_heads(header, name))
            for name, tensor in header.tensors.items()
        }


def _reordered_heads(header: GGUFHeader, name: str) -> int:
    """Return the number of heads in a tensor that llama.cpp reordered, which it does for Llama and
    models converted as it is."""
    metadata = header.metadata
    architecture = metadata["general.architecture"]
    module = name.split(".")[-2:-1]
    if architecture not in ("llama", "smollm3") or module not in (["attn_q"], ["attn_k"]):
        return 0
    count = metadata[f"{architecture}.attention.head_count"]
    if module == ["attn_q"]:
        return count
    return metadata.get(f"{architecture}.attention.head_count_kv", count)


def _library() -> tuple[Callable[..., Any], Any]:
    """Return the package's `dequantize` and its enumeration of types. It takes half a second to
    import."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize, GGMLQuantizationType
