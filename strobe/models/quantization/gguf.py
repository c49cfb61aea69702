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
    "ffn_gate_inp": "mlp.gate",
}
"""Names of modules by their names in GGUF files."""
EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
"""Names of each expert's modules by the name of the tensor that stacks them."""
SCALES = (".scale", ".input_scale")
"""Suffixes of what NVFP4 has beside a tensor: a factor of its values, and one of activations, which
stay in the engine's dtype."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are read as they are."""
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<leaf>weight|bias)")


class GGUFTensor(NamedTuple):
    """stored: its place in the file. heads: number of heads whose rows llama.cpp reordered; 0 if it
    did not. factor: of all values."""

    stored: StoredTensor
    heads: int
    factor: float = 1.0

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
        if self.factor != 1.0:
            value = value * self.factor
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
        self.tensors: dict[str, GGUFTensor] = {}
        for name, stored in header.tensors.items():
            if not name.endswith(SCALES):
                self._add(name, stored, header)

    def _add(self, name: str, stored: StoredTensor, header: GGUFHeader) -> None:
        """Add a tensor by the module's name; one of stacked experts as a tensor of each."""
        factors = self._factors(header.tensors.get(name.removesuffix("weight") + "scale"))
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in EXPERTS:
            factor = factors[0] if factors else 1.0
            heads = _reordered_heads(header, name)
            self.tensors[own_name(name)] = GGUFTensor(stored, heads, factor)
            return
        path = f"layers.{match['layer']}.mlp.experts"
        leaf = f"{EXPERTS[match['module']]}.{match['leaf']}"
        count = stored.shape[0]
        size = (stored.end - stored.start) // count
        for expert in range(count):
            start = stored.start + expert * size
            part = stored._replace(shape=stored.shape[1:], start=start, end=start + size)
            factor = factors[expert % len(factors)] if factors else 1.0
            self.tensors[f"{path}.{expert}.{leaf}"] = GGUFTensor(part, 0, factor)

    def _factors(self, stored: StoredTensor | None) -> list[float]:
        """Return the values of a tensor of factors in fp32, if there is one."""
        if stored is None:
            return []
        return self.bytes[stored.start : stored.end].clone().view(torch.float32).tolist()


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
