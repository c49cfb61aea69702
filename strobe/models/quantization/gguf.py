"""Tensors of a GGUF file: their names in a checkpoint, dequantization, and the order of rope."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strobe.host.mapped_file import MappedFile
from strobe.hub.gguf_file import TYPES, GGUFHeader, StoredTensor, read_header
from strobe.models.quantization import (
    gguf_dflash,
    gguf_gemma4,
    gguf_gpt_oss,
    gguf_phi3,
    gguf_qwen35,
)
from strobe.models.quantization.gguf_codes import CODES, group_order, read_codes, with_groups
from strobe.models.quantization.grouped import GroupWeight

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
IN_PAIRS = ("llama", "mistral3", "smollm3")
"""Architectures whose heads are reordered as Llama's."""
UNUSED = ("rope_freqs.weight",)
"""Tensors that config.json describes."""
EXPERTS_PATHS = {"gemma4": "experts"}
"""Where experts are in a layer, if not in its MLP."""
EXPERTS = {
    "ffn_gate_exps": ("gate_proj",),
    "ffn_up_exps": ("up_proj",),
    "ffn_gate_up_exps": ("gate_proj", "up_proj"),
    "ffn_down_exps": ("down_proj",),
}
"""Names of each expert's modules by the name of the tensor that stacks them."""
SCALES = (".scale", ".input_scale")
"""Suffixes of NVFP4's further tensors for a weight: a factor of its values, and one of activations,
which stay in the engine's dtype."""
BLOCKS = {name: (values, size) for name, values, size in TYPES.values()}
"""Values and bytes of a block by the type's name."""
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types that are read as they are."""
DIALECTS: dict[str, ModuleType] = {
    "dflash": gguf_dflash,
    "gemma4": gguf_gemma4,
    "gpt-oss": gguf_gpt_oss,
    "phi3": gguf_phi3,
    "qwen35": gguf_qwen35,
    "qwen35moe": gguf_qwen35,
    "qwen3next": gguf_qwen35,
}
"""Modules for architectures with names of their own: NAMES adds modules to those above, PARAMETERS
has tensors that are no module's weight or bias, and `restore_of` returns what undoes a change."""
_NAME = re.compile(r"(blk\.(?P<layer>\d+)\.)?(?P<module>\w+)(\.(?P<leaf>weight|bias|scale))?")
_EXTRA_LAYERS = "nextn_predict_layers"
"""Layers after the model's own, which predict further tokens."""


class GGUFTensor(NamedTuple):
    """sources: its places in the file, of which the checkpoint's format may have several in one.
    restore: rebuilds the checkpoint's tensor from sources that llama.cpp changed or split. factor:
    of all values. is_raw: sources are read as bytes, [..., blocks of a row, bytes of a block]."""

    sources: tuple[StoredTensor, ...]
    restore: Callable[..., Tensor] | None = None
    factor: float | None = None
    is_raw: bool = False

    @property
    def stored(self) -> StoredTensor:
        """The first source."""
        return self.sources[0]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return sum(source.end - source.start for source in self.sources)

    @property
    def shape(self) -> tuple[int, ...]:
        """The checkpoint's."""
        if self.restore is None:
            return self.stored.shape
        dtype = torch.uint8 if self.is_raw else torch.float32
        empty = [
            torch.empty(self._own_shape(source), dtype=dtype, device="meta")
            for source in self.sources
        ]
        return tuple(self.restore(*empty).shape)

    @property
    def dtype(self) -> str:
        """The dtype after dequantization, by safetensors' name."""
        if self.is_raw:
            return "U8"
        types = {source.type for source in self.sources}
        return self.stored.type if len(types) == 1 and types <= FLOATS.keys() else "F32"

    def decode(self, *data: Tensor) -> Tensor:
        """Return the tensor from its sources' bytes in the file."""
        values = [self._decode(*pair) for pair in zip(self.sources, data, strict=True)]
        return values[0] if self.restore is None else self.restore(*values)

    @property
    def has_codes(self) -> bool:
        """Whether the tensor can be read as codes, in the checkpoint's order."""
        form = CODES.get(self.stored.type)
        if form is None or self.is_raw or len(self.sources) > 1 or len(self.stored.shape) != 2:
            return False
        if self._moves(gguf_qwen35.MOVES_COLUMNS):
            return group_order(self._order(1), form.group) is not None
        return self.restore is None or self._moves((_pairs_apart, *gguf_qwen35.MOVES_ROWS))

    def codes(self, data: Tensor) -> GroupWeight:
        """Return the tensor as codes from its bytes in the file; see `has_codes`."""
        outputs, inputs = self.stored.shape
        weight = read_codes(self.stored.type, data, (outputs, inputs), self.factor)
        if self.restore is None:
            return weight
        if not self._moves(gguf_qwen35.MOVES_COLUMNS):
            return weight.take(self._order(0))
        order = group_order(self._order(1), weight.group)
        assert order is not None
        return with_groups(weight, order)

    def _moves(self, ways: Sequence[Callable[..., Tensor]]) -> bool:
        return isinstance(self.restore, partial) and self.restore.func in ways

    def _order(self, dim: int) -> Tensor:
        """Return the place in the file of each row or column."""
        assert self.restore is not None
        places = torch.arange(self.stored.shape[dim])
        return self.restore(places[None] if dim else places[:, None]).flatten()

    def _own_shape(self, source: StoredTensor) -> tuple[int, ...]:
        """Return the shape in which a source is read."""
        if not self.is_raw:
            return source.shape
        values, size = BLOCKS[source.type]
        return (*source.shape[:-1], source.shape[-1] // values, size)

    def _decode(self, source: StoredTensor, data: Tensor) -> Tensor:
        if self.is_raw:
            return data.view(self._own_shape(source))
        if source.type in FLOATS:
            value = data.clone().view(FLOATS[source.type]).view(source.shape)
        else:
            value = _dequantized(data, source.type).view(source.shape)
        return value if self.factor is None else value * self.factor


def _dequantized(data: Tensor, kind: str) -> Tensor:
    dequantize, types = _library()
    return torch.from_numpy(dequantize(data.numpy(), types[kind]))


def own_name(name: str, architecture: str) -> str:
    """Return the module's name for a tensor; an unknown one as it is, which loading rejects."""
    match = _NAME.fullmatch(name)
    dialect = DIALECTS.get(architecture)
    parameters = {} if dialect is None else dialect.PARAMETERS
    if match is None:
        return parameters.get(name, name)
    names = NAMES if dialect is None else NAMES | dialect.NAMES
    layer = "" if match["layer"] is None else f"layers.{match['layer']}."
    parameter = parameters.get(name.removeprefix(f"blk.{match['layer']}."))
    if parameter is not None:
        return layer + parameter
    if match["module"] not in names or match["leaf"] not in ("weight", "bias"):
        return name
    return f"{layer}{names[match['module']]}.{match['leaf']}"


class GGUFFile:
    """A GGUF file, or the parts of a split model. tensors: by the module's names. Raises ValueError
    if it is damaged, or if it is quantized and the package gguf is missing."""

    def __init__(self, path: Path):
        header = read_header(path)
        for name, tensor in header.tensors.items():
            if tensor.type not in BLOCKS:
                raise ValueError(
                    f"{path}: tensor {name} holds {tensor.type} values, which is not supported; "
                    "use the checkpoint in safetensors."
                )
        if any(tensor.type not in FLOATS for tensor in header.tensors.values()):
            _library()
        self._files = [MappedFile(file) for file in header.files]
        self._header = header
        self._architecture = header.metadata["general.architecture"]
        dialect = DIALECTS.get(self._architecture)
        self._parameters: dict[str, str] = {} if dialect is None else dialect.PARAMETERS
        self.tensors: dict[str, GGUFTensor] = {}
        skipped = (*UNUSED, *(f"blk.{layer}." for layer in _extra_layers(header.metadata)))
        joined = set[str]()
        if self._architecture == "gpt-oss":
            for name, (sources, restore, is_raw) in gguf_gpt_oss.experts(header.tensors).items():
                stored = tuple(header.tensors[source] for source in sources)
                self.tensors[name] = GGUFTensor(sources=stored, restore=restore, is_raw=is_raw)
                joined.update(sources)
        for name, stored in header.tensors.items():
            is_scale = name.endswith(SCALES) and not self._is_parameter(name)
            if not is_scale and not name.startswith(skipped) and name not in joined:
                self._add(name, stored)

    def read(self, name: str) -> Tensor:
        """Return a tensor as the checkpoint's format has it."""
        tensor = self.tensors[name]
        return tensor.decode(*map(self._bytes, tensor.sources))

    def codes(self, name: str) -> GroupWeight:
        """Return a tensor as codes, in memory of its own; see `GGUFTensor.has_codes`."""
        tensor = self.tensors[name]
        return tensor.codes(self._bytes(tensor.stored))

    def chunks(self, name: str, size: int) -> Iterator[Tensor]:
        """Yield a tensor in pieces of rows of about `size` bytes in fp32, and release the pages of
        each; whole if llama.cpp changed it."""
        tensor = self.tensors[name]
        rows = tensor.stored.shape[0]
        if tensor.restore is not None or len(tensor.stored.shape) != 2:
            yield self.read(name)
            self.release(name)
            return
        stored = tensor.stored
        bytes_of_row = (stored.end - stored.start) // rows
        count = max(size // (4 * stored.shape[1]), 1)
        for first in range(0, rows, count):
            last = min(first + count, rows)
            part = stored._replace(
                shape=(last - first, stored.shape[1]),
                start=stored.start + first * bytes_of_row,
                end=stored.start + last * bytes_of_row,
            )
            yield tensor._replace(sources=(part,)).decode(self._bytes(part))
            self._files[part.file].release(part.start, part.end)

    def release(self, name: str) -> None:
        """Release a tensor's pages after reading it."""
        for source in self.tensors[name].sources:
            self._files[source.file].release(source.start, source.end)

    def file_of(self, name: str) -> MappedFile:
        """Return the file of a tensor's first source."""
        return self._files[self.tensors[name].stored.file]

    def _bytes(self, stored: StoredTensor) -> Tensor:
        return self._files[stored.file].bytes[stored.start : stored.end]

    def _is_parameter(self, name: str) -> bool:
        """Whether a tensor is one of the model's by its own name, and no factor of another."""
        match = _NAME.fullmatch(name)
        return match is not None and name.removeprefix(f"blk.{match['layer']}.") in self._parameters

    def _add(self, name: str, stored: StoredTensor) -> None:
        """Add a tensor by the module's name; one of stacked experts as a tensor of each."""
        factors = self._factors(name.removesuffix("weight") + "scale")
        match = _NAME.fullmatch(name)
        if match is None or match["module"] not in EXPERTS or self._is_parameter(name):
            factor = factors[0] if factors else None
            own = own_name(name, self._architecture)
            self.tensors[own] = GGUFTensor(
                sources=(stored,), restore=_restore(self._header, name), factor=factor
            )
            return
        path = f"layers.{match['layer']}.{EXPERTS_PATHS.get(self._architecture, 'mlp.experts')}"
        names = EXPERTS[match["module"]]
        count, outputs, inputs = stored.shape
        size = (stored.end - stored.start) // count // len(names)
        for expert in range(count):
            factor = factors[expert % len(factors)] if factors else None
            for place, module in enumerate(names):
                start = stored.start + (expert * len(names) + place) * size
                shape = (outputs // len(names), inputs)
                part = stored._replace(shape=shape, start=start, end=start + size)
                own = f"{path}.{expert}.{module}.{match['leaf']}"
                self.tensors[own] = GGUFTensor(sources=(part,), factor=factor)

    def _factors(self, name: str) -> list[float]:
        """Return the values of a tensor of factors in fp32, if there is one."""
        if name not in self._header.tensors or self._is_parameter(name):
            return []
        return self._header.floats(name)


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
    dialect = DIALECTS.get(architecture)
    if dialect is not None:
        return dialect.restore_of(metadata, module)
    if architecture not in IN_PAIRS or module not in ("attn_q", "attn_k"):
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
