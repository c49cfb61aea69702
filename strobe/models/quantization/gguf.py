"""Tensors of a GGUF file: their names in a checkpoint, dequantization, and the order of rope."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.host.mapped_file import MappedFile
from strobe.hub.gguf_file import GGUFHeader, StoredTensor, read_header
from strobe.models.quantization import gguf_qwen35

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
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""Names of each expert's modules by the name of the tensor that stacks them."""
SCALES = (".scale", ".input_scale")
"""Suffixes of what NVFP4 has beside a tensor: a factor of its values, and one of activations, which
stay in the engine's dtype."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are read as they are."""
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>\w+)(\.(?P<leaf>weight|bias))?")
_EXTRA_LAYERS = "nextn_predict_layers"
"""Layers after the model's own, which predict further tokens."""


class GGUFTensor(NamedTuple):
    """stored: its place in the file. restore: makes the checkpoint's tensor of one that llama.cpp
    changed. factor: of all values."""

    stored: StoredTensor
    restore: Callable[[Tensor], Tensor] | None = None
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint's."""
        if self.restore is None:
            return self.stored.shape
        return tuple(self.restore(torch.empty(self.stored.shape, device="meta")).shape)

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
        return value if self.restore is None else self.restore(value)


def _dequantized(data: Tensor, kind: str) -> Tensor:
    dequantize, types = _library()
    return torch.from_numpy(dequantize(data.numpy(), types[kind]))


def own_name(name: str, architecture: str) -> str:
    """Return the module's name for a tensor; an unknown one as it is, which loading rejects."""
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    names = NAMES
    if architecture in gguf_qwen35.ARCHITECTURES:
        names = NAMES | gguf_qwen35.NAMES
    layer = "" if match["layer"] is None else f"layers.{match['layer']}."
    parameter = gguf_qwen35.PARAMETERS.get(name.removeprefix(f"blk.{match['layer']}."))
    if parameter is not None:
        return layer + parameter
    if match["module"] not in names or match["leaf"] is None:
        return name
    return f"{layer}{names[match['module']]}.{match['leaf']}"


class GGUFFile(MappedFile):
    """A GGUF file. tensors: by the module's names. Raises ValueError if it is damaged, or if it is
    quantized and the package gguf is missing."""

    def __init__(self, path: Path):
        header = read_header(path)
        if any(tensor.type not in FLOATS for tensor in header.tensors.values()):
            _library()
        super().__init__(path)
        self.tensors: dict[str, GGUFTensor] = {}
        skipped = tuple(f"blk.{layer}." for layer in _extra_layers(header.metadata))
        for name, stored in header.tensors.items():
            if not name.endswith(SCALES) and not name.startswith(skipped):
                self._add(name, stored, header)

    def _add(self, name: str, stored: StoredTensor, header: GGUFHeader) -> None:
        """Add a tensor by the module's name; one of stacked experts as a tensor of each."""
        factors = self._factors(header.tensors.get(name.removesuffix("weight") + "scale"))
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in EXPERTS:
            factor = factors[0] if factors else 1.0
            own = own_name(name, header.metadata["general.architecture"])
            self.tensors[own] = GGUFTensor(stored, _restore(header, name), factor)
            return
        path = f"layers.{match['layer']}.mlp.experts"
        names = EXPERTS[match["module"]]
        count, outputs, inputs = stored.shape
        size = (stored.end - stored.start) // count // len(names)
        for expert in range(count):
            factor = factors[expert % len(factors)] if factors else 1.0
            for place, module in enumerate(names):
                start = stored.start + (expert * len(names) + place) * size
                shape = (outputs // len(names), inputs)
                part = stored._replace(shape=shape, start=start, end=start + size)
                own = f"{path}.{expert}.{module}.{match['leaf']}"
                self.tensors[own] = GGUFTensor(part, factor=factor)

    def _factors(self, stored: StoredTensor | None) -> list[float]:
        """Return the values of a tensor of factors in fp32, if there is one."""
        if stored is None:
            return []
        return self.bytes[stored.start : stored.end].clone().view(torch.float32).tolist()


def _extra_layers(metadata: Mapping[str, Any]) -> range:
    """Return the numbers of layers that predict further tokens, which are not used."""
    prefix = metadata["general.architecture"]
    count = metadata.get(f"{prefix}.block_count", 0)
    return range(count - metadata.get(f"{prefix}.{_EXTRA_LAYERS}", 0), count)


def _restore(header: GGUFHeader, name: str) -> Callable[[Tensor], Tensor] | None:
    """Return what makes the checkpoint's tensor of one that llama.cpp changed; None if it did not.
    It reorders heads of Llama and of models converted as it is."""
    metadata = header.metadata
    architecture = metadata["general.architecture"]
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    module = match["module"]
    if architecture in gguf_qwen35.ARCHITECTURES:
        return gguf_qwen35.restore_of(metadata, module)
    if architecture not in ("llama", "smollm3") or module not in ("attn_q", "attn_k"):
        return None
    count = metadata[f"{architecture}.attention.head_count"]
    if module == "attn_k":
        count = metadata.get(f"{architecture}.attention.head_count_kv", count)
    return partial(_pairs_apart, heads=count)


def _pairs_apart(value: Tensor, heads: int) -> Tensor:
    """Put the two dimensions of each of rope's pairs apart, which llama.cpp puts side by side."""
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)


def _library() -> tuple[Callable[..., Any], Any]:
    """Return the package's `dequantize` and its enumeration of types. It takes half a second to
    import."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize, GGMLQuantizationType
