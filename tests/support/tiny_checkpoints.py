"""Tiny random targets, drafters and tokenizers, on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3ForCausalLM

VOCAB = 61
HIDDEN = 32
LAYERS = 5
MASK_TOKEN = VOCAB - 1
EOS_IDS = [7, 23]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_IDS,
}
"""Defaults of every tiny target."""


def make_target(
    directory: Path,
    family: Any = Qwen3ForCausalLM,
    *,
    seed: int = 0,
    shards: str | None = None,
    wrapper: Mapping[str, Any] | None = None,
    embedding: float = 0.5,
    **changes: Any,
):
    """Write a random target with widely spread logits; return transformers' model of it.

    family: transformers' class. changes: fields of its config, or, with `wrapper` (the fields of an
    outer config), of its text_config. embedding: standard deviation of the embeddings. shards: a
    size such as "20KB" that splits the weights over several files.
    """
    values = {**SHAPE, "rope_theta": 10000.0, **changes}
    kind = family.config_class
    config = kind(**values) if wrapper is None else kind(text_config=values, **wrapper)
    model = family(config).float().eval()
    noise = torch.Generator().manual_seed(seed)
    normed = any("q_norm" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = embedding if "embed" in name or "lm_head" in name else 0.3
            if not normed and ("q_proj" in name or "k_proj" in name or "qkv_proj" in name):
                scale = 0.1  # else attention is so sharp that float32's own rounding shows
            parameter.data.normal_(0, scale, generator=noise)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=noise)
        else:
            parameter.data.normal_(0, 0.3, generator=noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=noise)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    options = {"max_shard_size": shards} if shards else {}
    model.save_pretrained(directory, **options)
    return model


LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-_+ \n'
MERGES = ("a b", "b a", "n o", "e s", "y es", '" :', '{ "', "t r", "u e")


def make_tokenizer(directory: Path) -> Path:
    """Write a tokenizer.json for the tiny vocabulary (characters, some words, three special tokens)
    and return its path."""
    special = {EOS_IDS[0]: "<|end|>", EOS_IDS[1]: "<|stop|>", MASK_TOKEN: "<|mask|>"}
    blank = LETTERS.replace(" ", "Ġ").replace("\n", "Ċ")
    texts = iter([*blank, *(merge.replace(" ", "") for merge in MERGES)])
    names = {special[i] if i in special else next(texts): i for i in range(VOCAB)}
    assert not list(texts), "the vocabulary is too small"
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def join_experts(directory: Path) -> None:
    """Store every layer's experts as two tensors, as transformers 5 does, and also their FP8
    scales."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for end in ("", "_scale_inv"):
        last = f"_proj.weight{end}"
        for first in [name for name in tensors if name.endswith(f".experts.0.gate{last}")]:
            prefix = first.removesuffix(f"0.gate{last}")
            count = sum(n.startswith(prefix) and n.endswith(f"down{last}") for n in tensors)
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}{e}.{name}{last}") for e in range(count)])
                for name in ("gate", "up", "down")
            )
            tensors[f"{prefix}gate_up_proj{end}"] = torch.cat([gate, up], 1)
            tensors[f"{prefix}down_proj{end}"] = down
    save_file(tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    """Change or, with None, delete keys of a JSON file."""
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def draft_tensors(
    *,
    layers: int,
    captured: int,
    seed: int,
    bias: bool = False,
    sinks: bool = False,
    width: int = 16,
    intermediate: int = 48,
    hidden: int = HIDDEN,
) -> dict[str, torch.Tensor]:
    """Return random drafter weights under z-lab's names: 4 heads, 2 key-value heads."""
    noise = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * 0.3

    def scale(size: int) -> torch.Tensor:
        return torch.rand(size, generator=noise) + 0.5

    tensors = {
        "fc.weight": matrix(hidden, captured * hidden),
        "hidden_norm.weight": scale(hidden),
        "norm.weight": scale(hidden),
    }
    outs = {"q_proj": 4 * width, "k_proj": 2 * width, "v_proj": 2 * width}
    for i in range(layers):
        layer = f"layers.{i}."
        for name, rows in outs.items():
            tensors[f"{layer}self_attn.{name}.weight"] = matrix(rows, hidden)
            if bias:
                tensors[f"{layer}self_attn.{name}.bias"] = matrix(rows)
        tensors[f"{layer}self_attn.o_proj.weight"] = matrix(hidden, 4 * width)
        if bias:
            tensors[f"{layer}self_attn.o_proj.bias"] = matrix(hidden)
        if sinks:
            tensors[f"{layer}self_attn.attention_sink_bias"] = matrix(4) * 5
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{name}.weight"] = scale(width)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{layer}mlp.{name}.weight"] = matrix(intermediate, hidden)
        tensors[f"{layer}mlp.down_proj.weight"] = matrix(hidden, intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = scale(hidden)
    return tensors


def make_draft(
    directory: Path,
    *,
    layer_types: Sequence[str] | None = None,
    window: int | None = None,
    block: int = 8,
    layer_ids: Sequence[int] = (0, 1, 3),
    mask_token: int = MASK_TOKEN,
    target_layers: int = LAYERS,
    seed: int = 1,
    bias: bool = False,
    sinks: bool = False,
    width: int = 16,
    intermediate: int = 48,
    hidden: int = HIDDEN,
    vocab: int = VOCAB,
    top: Mapping[str, Any] | None = None,
    nested: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random DFlash drafter in z-lab's format. width: a head's size; intermediate: the
    MLPs'; hidden, vocab: the target's sizes; top, nested: extra keys of the config."""
    layers = len(layer_types) if layer_types else 2
    directory.mkdir(parents=True, exist_ok=True)
    tensors = draft_tensors(
        layers=layers,
        captured=len(layer_ids),
        seed=seed,
        bias=bias,
        sinks=sinks,
        width=width,
        intermediate=intermediate,
        hidden=hidden,
    )
    save_file(tensors, directory / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "block_size": block,
        "num_target_layers": target_layers,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": list(layer_ids),
            **({"attention_sink_bias": True} if sinks else {}),
            **(nested or {}),
        },
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width,
        "attention_bias": bias,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        **({"layer_types": list(layer_types)} if layer_types else {}),
        **({"sliding_window": window, "use_sliding_window": True} if window else {}),
        **(top or {}),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def windowed(draft: Path, window: int) -> Path:
    """Write a copy of a drafter whose layers have a sliding window."""
    directory = draft.with_name(f"{draft.name}_window_{window}")
    shutil.copytree(draft, directory)
    config = json.loads((draft / "config.json").read_text())
    config["layer_types"] = ["sliding_attention"] * config["num_hidden_layers"]
    config |= {"sliding_window": window, "use_sliding_window": True}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def pool_bytes(pages: int, page_size: int, *, drafter_layers: int = 0, width: int = 16) -> int:
    """Return the kv_cache_memory of a tiny pair that fits `pages` pages and the reserved one."""
    per_token = 2 * 2 * width * 4 * (LAYERS + drafter_layers)
    return (pages + 1) * page_size * per_token
