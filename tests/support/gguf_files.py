"""Tiny GGUF files, written as llama.cpp converts models of transformers."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    LlamaConfig,
    Ministral3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
)

from strobe.models.quantization import gguf_qwen35
from strobe.models.quantization.gguf import DIALECTS, IN_PAIRS, NAMES

WORDS = ("<|end|>", "<|start|>", "th", "he")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*WORDS[:2], *ALPHABET, *WORDS[2:]]
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


LLAMA3 = {
    "rope_parameters": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
}
MISTRAL3 = {
    "pad_token_id": 0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    },
}
# llama.cpp rounds the pairs between which the rope is stretched by and by; here they are whole.
GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 6,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1048950.0,
        "factor": 4.0,
        "original_max_position_embeddings": 6435,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
}
GEMMA4 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 30.0,
    "rope_theta": None,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
GEMMA4_EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
OWN_METADATA: dict[str, dict[str, Any]] = {
    "llama3": {"rope.freq_base": 500000.0},
    "mistral3": YARN
    | {
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 8,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.5,
    },
    "phi3": {
        "attention.sliding_window": 0,
        "attention.key_length": None,
        "attention.value_length": None,
    },
    "gpt-oss": YARN
    | {
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 6435,
        "rope.freq_base": 1048950.0,
        "expert_count": 6,
        "expert_used_count": 2,
        "expert_feed_forward_length": 32,
        "feed_forward_length": 32,
        "attention.sliding_window": 6,
    },
    "gemma4": {
        "block_count": 3,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.key_length_swa": 16,
        "attention.value_length_swa": 16,
        "attention.head_count_kv": [2, 1, 1],
        "attention.sliding_window": 6,
        "attention.sliding_window_pattern": [True, False, False],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "rope.dimension_count": 32,
        "rope.dimension_count_swa": 16,
    },
}
OWN_METADATA["gemma4 with experts"] = OWN_METADATA["gemma4"] | {
    "expert_count": 6,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
}
"""Metadata of an architecture beside or in the place of those of SHAPE."""


def llama3_factors() -> list[float]:
    """Return what divides the frequency of each pair."""
    factors: list[float] = []
    for pair in range(SHAPE["head_dim"] // 2):
        wave = 2 * math.pi * 500000.0 ** (2 * pair / SHAPE["head_dim"])
        smooth = min(max((8192 / wave - 1) / 3, 0), 1)
        factors.append(1 / ((1 - smooth) / 8 + smooth))
    return factors


FREQUENCIES = {
    "llama3": llama3_factors(),
    "gemma4": [1.0] * 4 + [1e30] * 12,
    "gemma4 with experts": [1.0] * 4 + [1e30] * 12,
}
"""The tensor rope_freqs."""


CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama3": (LlamaConfig, LLAMA3),
    "mistral3": (Ministral3Config, MISTRAL3),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "qwen3moe": (Qwen3MoeConfig, EXPERTS),
    "smollm3": (SmolLM3Config, {"pad_token_id": 0}),
    "phi3": (Phi3Config, {"pad_token_id": 0, "sliding_window": None}),
    "gpt-oss": (GptOssConfig, GPT_OSS),
    "gemma4": (Gemma4TextConfig, GEMMA4),
    "gemma4 with experts": (Gemma4TextConfig, GEMMA4 | GEMMA4_EXPERTS),
}
"""transformers' config and its values beside or in the place of SHAPE's."""


def model_of(kind: str, **changes: Any) -> Any:
    """Return a transformers model with random weights."""
    torch.manual_seed(0)
    config_class, own = CONFIGS[kind]
    config = config_class(**SHAPE | own | changes)
    config.eos_token_id = 0
    model = AutoModelForCausalLM.from_config(config).float()
    for name, value in model.state_dict().items():
        if value.dim() == 1 and value.numel() > 1:
            torch.nn.init.uniform_(value, 0.5, 1.5)
        elif "layer_scalar" in name:
            value.fill_(0.7)
        elif value.dim() > 1:
            torch.nn.init.normal_(value, 0, 0.5 if "embed" in name else 0.1)
    return model


def metadata_of(kind: str) -> dict[str, Any]:
    """Return the metadata of `model_of(kind)`."""
    own = OWN_METADATA.get(kind, {})
    kind = {"llama3": "llama", "gemma4 with experts": "gemma4"}.get(kind, kind)
    metadata = _metadata_of_shape(kind) | {
        key if "." in key and key.split(".")[0] in ("general", "tokenizer") else f"{kind}.{key}": v
        for key, v in own.items()
    }
    return {key: value for key, value in metadata.items() if value is not None}


def expert_metadata(kind: str) -> dict[str, Any]:
    return {
        f"{kind}.expert_count": EXPERTS["num_experts"],
        f"{kind}.expert_used_count": EXPERTS["num_experts_per_tok"],
        f"{kind}.expert_feed_forward_length": EXPERTS["moe_intermediate_size"],
    }


def _metadata_of_shape(kind: str) -> dict[str, Any]:
    experts = expert_metadata(kind) if kind.endswith("moe") else {}
    return experts | {
        "general.architecture": kind,
        f"{kind}.block_count": SHAPE["num_hidden_layers"],
        f"{kind}.context_length": SHAPE["max_position_embeddings"],
        f"{kind}.embedding_length": SHAPE["hidden_size"],
        f"{kind}.feed_forward_length": SHAPE["intermediate_size"],
        f"{kind}.attention.head_count": SHAPE["num_attention_heads"],
        f"{kind}.attention.head_count_kv": SHAPE["num_key_value_heads"],
        f"{kind}.attention.key_length": SHAPE["head_dim"],
        f"{kind}.attention.value_length": SHAPE["head_dim"],
        f"{kind}.rope.dimension_count": SHAPE["head_dim"],
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{kind}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
        "tokenizer.ggml.merges": ["t h", "h e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def tensors_of(kind: str, model: Any) -> dict[str, NDArray[np.float32]]:
    """Return a model's weights as llama.cpp converts them: with its names, and for Llama with the
    rows of each head of q and k in pairs."""
    architecture = metadata_of(kind)["general.architecture"]
    dialect = DIALECTS.get(architecture)
    names = {ours: theirs for theirs, ours in (NAMES | getattr(dialect, "NAMES", {})).items()}
    parameters = {ours: theirs for theirs, ours in getattr(dialect, "PARAMETERS", {}).items()}
    tensors: dict[str, NDArray[np.float32]] = {}
    if kind in FREQUENCIES:
        tensors["rope_freqs.weight"] = np.array(FREQUENCIES[kind], np.float32)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        path, _, leaf = name.removeprefix("model.").rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", path + ".")
        prefix = "" if layer is None else f"blk.{layer[1]}."
        inner = name.removeprefix("model.")[len(layer[0]) :] if layer else name
        array = value.numpy()
        if inner in parameters:
            tensors[prefix + parameters[inner]] = array
        elif leaf.startswith(("gate_up_proj", "down_proj")):  # of stacked experts
            is_turned = architecture == "gpt-oss"
            tensors |= experts_of(prefix, leaf, array, is_turned=is_turned)
        else:
            module = names[path[len(layer[0]) :] if layer else path]
            if architecture in IN_PAIRS and module in ("attn_q", "attn_k"):
                key = "num_attention_heads" if module == "attn_q" else "num_key_value_heads"
                halves = array.reshape(SHAPE[key], 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
            tensors[f"{prefix}{module}.{leaf}"] = array
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
    "tie_word_embeddings": False,
}
SHARED = {"shared_expert_intermediate_size": 40}
HYBRIDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen35": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {}),
    "qwen35moe": (Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, EXPERTS | SHARED),
    "qwen3next": (Qwen3NextForCausalLM, Qwen3NextConfig, EXPERTS | SHARED),
}
"""transformers' classes of models with recurrent layers, and values of their configs."""


def hybrid(
    kind: str,
    *,
    value_dim: int = 12,
    layer_types: list[str] | None = None,
    extra_layers: int = 1,
) -> tuple[Any, dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return a random model with recurrent layers, and its metadata and tensors as llama.cpp
    converts it. extra_layers: that predict further tokens; value_dim: of a value head."""
    torch.manual_seed(0)
    model_class, config_class, own = HYBRIDS[kind]
    values = {**SHAPE, **RECURRENT, **own, "linear_value_head_dim": value_dim}
    model: Any = model_class(config_class(**values, layer_types=layer_types))
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name or "A_log" in name:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        elif parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 0.5 if "embed" in name else 0.1)
    model.generation_config.eos_token_id = 0
    metadata = metadata_of(kind) | {
        f"{kind}.block_count": 4 + extra_layers,
        f"{kind}.nextn_predict_layers": extra_layers,
        f"{kind}.rope.dimension_count": 8,
        f"{kind}.ssm.conv_kernel": 4,
        f"{kind}.ssm.group_count": 2,
        f"{kind}.ssm.inner_size": 6 * value_dim,
        f"{kind}.ssm.state_size": 8,
        f"{kind}.ssm.time_step_rank": 6,
    }
    if kind != "qwen3next":
        metadata[f"{kind}.rope.dimension_sections"] = [2, 1, 1, 0]
    if own:
        size = SHARED["shared_expert_intermediate_size"]
        metadata |= expert_metadata(kind)
        metadata[f"{kind}.expert_shared_feed_forward_length"] = size
    if layer_types is not None:
        recurrent = [name == "linear_attention" for name in layer_types]
        metadata[f"{kind}.attention.recurrent_layers"] = recurrent + [False] * extra_layers
    names = {ours: theirs for theirs, ours in (NAMES | gguf_qwen35.NAMES).items()}
    is_tiled = kind != "qwen3next"
    extra = np.zeros((64, 128), np.float32)
    tensors = {f"blk.{4 + i}.nextn.eh_proj.weight": extra for i in range(extra_layers)}
    for name, value in model.float().state_dict().items():
        path, _, leaf = name.removeprefix("model.").rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", path)
        prefix = "" if layer is None else f"blk.{layer[1]}."
        module = path[len(layer[0]) :] if layer else path
        array = value.numpy()
        if leaf in ("gate_up_proj", "down_proj"):
            tensors |= experts_of(prefix, leaf, array)
        elif leaf == "A_log":
            tensors[f"{prefix}ssm_a"] = -np.exp(tiled(array, 1) if is_tiled else array)
        elif leaf == "dt_bias":
            tensors[f"{prefix}ssm_dt.bias"] = tiled(array, 1) if is_tiled else array
        elif module.endswith("in_proj_qkvz"):
            parts = np.split(array.reshape(2, -1, 64), [8, 16, 16 + 3 * value_dim], axis=1)
            q, k, v, z = (part.reshape(-1, 64) for part in parts)
            tensors[f"{prefix}attn_qkv.weight"] = np.concatenate([q, k, v])
            tensors[f"{prefix}attn_gate.weight"] = z
        elif is_tiled:
            tensors[f"{prefix}{names[module]}.{leaf}"] = converted(module, array, value_dim)
        else:
            tensors[f"{prefix}{names[module]}.{leaf}"] = unchanged(module, array)
    return model, metadata, {name: np.ascontiguousarray(a) for name, a in tensors.items()}


def tiled(array: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Put value heads of different key heads side by side. size: rows of a head."""
    heads = array.reshape(2, 3, size, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def unchanged(module: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a module's weight as llama.cpp stores it, with value heads in their order."""
    if module.endswith("norm") and not module.startswith("linear_attn"):
        return array + 1
    if module.endswith("conv1d"):
        return array.reshape(array.shape[0], -1)
    return array[0] if module.endswith("shared_expert_gate") else array


def converted(module: str, array: NDArray[np.float32], value_dim: int) -> NDArray[np.float32]:
    """Return a module's weight as llama.cpp stores it."""
    array = unchanged(module, array)
    if module.endswith(("in_proj_qkv", "conv1d")):
        return np.concatenate([array[:32], tiled(array[32:], value_dim)])
    if module.endswith("in_proj_z"):
        return tiled(array, value_dim)
    if module.endswith(("in_proj_a", "in_proj_b")):
        return tiled(array, 1)
    if module.endswith("linear_attn.out_proj"):
        return tiled(array.T, value_dim).T
    return array


def experts_of(
    prefix: str, leaf: str, array: NDArray[np.float32], *, is_turned: bool = False
) -> dict[str, Any]:
    """Return stacked experts as llama.cpp does, with gate and up apart. is_turned: gpt-oss's, whose
    gate and up take turns, and whose inputs come before outputs."""
    leaf = leaf.removesuffix("_bias")
    end = "bias" if array.ndim == 2 else "weight"
    if is_turned and end == "weight":
        array = array.swapaxes(1, 2)
    if leaf == "down_proj":
        return {f"{prefix}ffn_down_exps.{end}": array}
    gate, up = np.split(array, 2, axis=1)
    if is_turned:
        gate = array[:, ::2]
        up = array[:, 1::2]
    return {f"{prefix}ffn_gate_exps.{end}": gate, f"{prefix}ffn_up_exps.{end}": up}


def quantized(array: NDArray[np.float32], number: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return an array in a type, or random values of its shape if `gguf` does not write the
    type."""
    try:
        return gguf.quants.quantize(array, number)
    except NotImplementedError:
        values, size = gguf.GGML_QUANT_SIZES[number]
        blocks = _moderate_blocks(number)
        count = array.size // values
        order = np.random.default_rng(zlib.crc32(array.tobytes())).permutation(len(blocks))
        chosen = blocks[np.resize(order, count)]  # no two rows of an embedding are equal
        return chosen.reshape(*array.shape[:-1], array.shape[-1] // values * size)


@cache
def _moderate_blocks(number: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """Return random blocks of a type whose largest values are like those of weights."""
    _, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (4096, size), np.uint8)
    with np.errstate(invalid="ignore"):
        largest = np.abs(gguf.quants.dequantize(blocks, number)).max(1)
    return blocks[(largest > 0.05) & (largest < 0.5)]


def dequantized(name: str, array: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Return the values of a tensor of a file whose matrices are in a type."""
    number = _type_of(name, array, kind)
    return gguf.quants.dequantize(quantized(array, number), number)


def _type_of(name: str, array: NDArray[np.float32], kind: str) -> gguf.GGMLQuantizationType:
    """Return the type of a tensor of a file whose matrices are in a type."""
    if array.ndim < 2 or name.endswith((".bias", "conv1d.weight", "conv_base")):
        return gguf.GGMLQuantizationType.F32
    number = gguf.GGMLQuantizationType[kind]
    if array.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:  # as llama.cpp does
        return gguf.GGMLQuantizationType.F16
    return number


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    kind: str = "F32",
    *,
    experts: str | None = None,
    parts: int = 1,
) -> Path:
    """Write a GGUF file; matrices in the given type, and stacked experts in one of their own. In
    several parts, return the first."""
    if parts == 1:
        return _write(path, metadata, tensors, kind, experts)
    files = [path.with_name(f"{path.stem}-{i + 1:05}-of-{parts:05}.gguf") for i in range(parts)]
    for number, file in enumerate(files):
        own: dict[str, Any] = {"split.no": number, "split.count": parts}
        own["split.tensors.count"] = len(tensors)
        own |= metadata if number == 0 else {}
        part = {name: a for i, (name, a) in enumerate(tensors.items()) if i % parts == number}
        _write(file, own, part, kind, experts)
    return files[0]


def _write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    kind: str,
    experts: str | None,
) -> Path:
    writer = gguf.GGUFWriter(path, metadata.get("general.architecture", ""))
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif key in ("split.no", "split.count"):
            writer.add_uint16(key, value)
        elif key == "split.tensors.count":
            writer.add_int32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        own = experts if experts and name.endswith("_exps.weight") else kind
        number = _type_of(name, array, own)
        stored = quantized(array, number)
        writer.add_tensor(name, stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(path: Path, kind: str = "llama", **options: Any) -> Path:
    return write(path, metadata_of(kind), tensors_of(kind, model_of(kind)), **options)
