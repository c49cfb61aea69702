"""config.json of a GGUF file, derived from its metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.hub.gguf_file import GGUFHeader, metadata_value
from strobe.hub.gguf_tokenizer import end_tokens

ARCHITECTURES = {
    "gemma4": ("Gemma4ForCausalLM", "gemma4_text"),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss"),
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral3": ("Ministral3ForCausalLM", "ministral3"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3next": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),  # laid out as Qwen3.5
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
"""architectures and model_type of config.json by general.architecture."""
DRAFTERS = {
    "dflash-draft": "DFlash in the form of a fork of llama.cpp",
    "dspark": "DSpark in the form of a fork of llama.cpp",
    "eagle3": "EAGLE-3",
    "gemma4-assistant": "Gemma 4's assistant",
}
"""Methods of the drafters that do not run from GGUF files, by general.architecture; for others see
`gguf_drafter`."""
SETTINGS = {
    "attention.sliding_window": ("gemma4", "gpt-oss", "phi3"),
    "expert_count": ("gemma4", "gpt-oss", "qwen3moe", "qwen3next", "qwen35moe"),
    "final_logit_softcapping": ("gemma4",),
}
"""Metadata that change the computation, and the architectures that can have them."""
ROPES = ("none", "linear", "yarn")
"""Supported values of rope.scaling.type."""
LLAMA3_CONTEXT = 8192
"""Training length of all models with Llama 3's rope, which metadata do not say."""


@dataclass(frozen=True)
class Metadata:
    """The metadata of an architecture in the file at `path`."""

    header: GGUFHeader
    architecture: str
    path: Path

    def get(self, name: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        """Return a value. Raises ValueError if it is missing."""
        return metadata_value(self.header.metadata, f"{self.architecture}.{name}", self.path)

    def has_tensor(self, name: str) -> bool:
        return name in self.header.tensors

    def number(self, name: str, default: float | None = None) -> Any:
        """Return a value that fp32 rounded, such as 1e-6, which is stored as 9.99999997e-7."""
        value = self.get(name, default) if default is not None else self.need(name)
        return float(f"{value:.6g}")

    def error(self, problem: str) -> ValueError:
        return ValueError(f"{self.path}{problem}; use the checkpoint in safetensors.")


def make_config(header: GGUFHeader, path: Path) -> dict[str, Any]:
    """Return config.json. Raises ValueError for what no config can say."""
    architecture = metadata_value(header.metadata, "general.architecture", path)
    metadata = Metadata(header, architecture, path)
    _check_supported(metadata)
    heads = metadata.need("attention.head_count")
    tokens = metadata_value(header.metadata, "tokenizer.ggml.tokens", path)
    name, model_type = ARCHITECTURES[architecture]
    types = {tensor.type for tensor in header.tensors.values()}
    hidden = metadata.need("embedding_length")
    config = {
        "architectures": [name],
        "model_type": model_type,
        "dtype": "float32" if types == {"F32"} else "float16" if "F16" in types else "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": _layers(metadata),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": metadata.get("attention.key_length")
        or metadata.get("rope.dimension_count")
        or hidden // heads,
        "vocab_size": len(tokens),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.need("context_length"),
        "hidden_act": "silu",
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "bos_token_id": header.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_tokens(header.metadata, path),
    }
    return config | FURTHER.get(architecture, _dense)(metadata)


def _layers(metadata: Metadata) -> int:
    """Return the number of layers, without the ones that predict further tokens."""
    return metadata.need("block_count") - metadata.get("nextn_predict_layers", 0)


def _check_supported(metadata: Metadata) -> None:
    """Raise ValueError for what no config can say."""
    architecture = metadata.architecture
    if architecture in DRAFTERS:
        raise metadata.error(
            f" describes a drafter for {DRAFTERS[architecture]}, which is not supported in a GGUF "
            "file"
        )
    if architecture not in ARCHITECTURES:
        raise metadata.error(
            f": general.architecture is {architecture!r}, but GGUF files are supported of "
            f"{', '.join(ARCHITECTURES)} only"
        )
    for name, supported in SETTINGS.items():
        setting = metadata.get(name)
        if architecture not in supported and setting not in (None, 0):
            raise metadata.error(
                f": {architecture}.{name} is {setting!r}, which is not supported in a GGUF file"
            )
    check_rope(metadata)


def check_rope(metadata: Metadata) -> None:
    """Raise ValueError for a rope that no config can say."""
    architecture = metadata.architecture
    kind = metadata.get("rope.scaling.type", "none")
    if kind not in ROPES:
        raise metadata.error(
            f": {architecture}.rope.scaling.type is {kind!r}, which is not supported in a GGUF file"
        )
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if metadata.has_tensor(name):
            raise metadata.error(f" has a tensor {name}, whose rope is not supported")


def _dense(metadata: Metadata) -> dict[str, Any]:
    return read_rope(metadata) | {"intermediate_size": metadata.need("feed_forward_length")}


def read_rope(metadata: Metadata) -> dict[str, Any]:
    """Return the keys of a rope over whole heads."""
    theta = metadata.number("rope.freq_base", 10000.0)
    if metadata.has_tensor("rope_freqs.weight"):
        return {"rope_parameters": _llama3(metadata, theta) | {"rope_theta": theta}}
    scaling = _scaling(metadata)
    if not scaling:
        return {"rope_theta": theta}
    return {"rope_parameters": scaling | {"rope_theta": theta}}


def _scaling(metadata: Metadata) -> dict[str, Any]:
    """Return the parameters of a stretched rope; empty for a plain one."""
    kind = metadata.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    prefix = "rope.scaling."
    parameters = {"rope_type": kind, "factor": metadata.number(f"{prefix}factor")}
    original = metadata.get(f"{prefix}original_context_length")
    if original:
        parameters["original_max_position_embeddings"] = original
    if kind == "yarn":
        parameters |= {
            "beta_fast": metadata.number(f"{prefix}yarn_beta_fast", 32.0),
            "beta_slow": metadata.number(f"{prefix}yarn_beta_slow", 1.0),
        }
    return parameters


def _llama3(metadata: Metadata, theta: float) -> dict[str, Any]:
    """Return the parameters of Llama 3's rope, whose effect on each pair is stored. Raises
    ValueError if they do not explain it."""
    factors = metadata.header.floats("rope_freqs.weight")
    factor = max(max(factors), 1.0)
    size = 2 * len(factors)
    for i, stored in enumerate(factors):
        turns = LLAMA3_CONTEXT * theta ** (-2 * i / size) / (2 * math.pi)
        share = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        if not math.isclose(stored, 1 / ((1 - share) / factor + share), rel_tol=1e-4):
            raise metadata.error(" has a tensor rope_freqs.weight with factors that are not known")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": LLAMA3_CONTEXT,
    }


def _experts(metadata: Metadata) -> dict[str, Any]:
    """Return the part of config.json that describes experts, which every layer has."""
    shared = metadata.get("expert_shared_feed_forward_length")
    size = {} if shared is None else {"shared_expert_intermediate_size": shared}
    return size | {
        "num_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp computes it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen3moe(metadata: Metadata) -> dict[str, Any]:
    return _dense(metadata) | _experts(metadata)


def _qwen35(metadata: Metadata) -> dict[str, Any]:
    """Return the part of config.json for recurrent layers and the rope of the other layers."""
    layers = _layers(metadata)
    interval = metadata.get("full_attention_interval", 4)
    by_interval = [(layer + 1) % interval != 0 for layer in range(layers)]
    recurrent = metadata.get("attention.recurrent_layers", by_interval)
    kinds = ("full_attention", "linear_attention")
    values = metadata.need("ssm.time_step_rank")
    config = {
        "layer_types": [kinds[bool(recurrent[layer])] for layer in range(layers)],
        "linear_conv_kernel_dim": metadata.need("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.need("ssm.state_size"),
        "linear_num_key_heads": metadata.need("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_value_head_dim": metadata.need("ssm.inner_size") // values,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base"),
            "partial_rotary_factor": metadata.need("rope.dimension_count")
            / metadata.need("attention.key_length"),
        },
    }
    if metadata.architecture == "qwen35":
        return config | {"intermediate_size": metadata.need("feed_forward_length")}
    return config | _experts(metadata)


def _mistral3(metadata: Metadata) -> dict[str, Any]:
    """Return the rope, which multiplies queries but no cosines."""
    config = _dense(metadata)
    parameters = config.get("rope_parameters")
    if parameters is not None:
        parameters["mscale"] = parameters["mscale_all_dim"] = 1.0
        scale = metadata.get("attention.temperature_scale")
        parameters |= {} if scale is None else {"llama_4_scaling_beta": float(f"{scale:.6g}")}
    return config


def _phi3(metadata: Metadata) -> dict[str, Any]:
    size = metadata.need("embedding_length") // metadata.need("attention.head_count")
    rotated = metadata.get("rope.dimension_count", size)
    if rotated != size:
        raise metadata.error(f": rope turns {rotated} of a head's {size} values")
    window = metadata.get("attention.sliding_window") or None  # 0 in Phi-4
    return _dense(metadata) | {"sliding_window": window, "head_dim": size}


def _gpt_oss(metadata: Metadata) -> dict[str, Any]:
    """Return gpt-oss's keys, whose experts' rows take turns."""
    stored = {t.type for n, t in metadata.header.tensors.items() if n.endswith("_exps.weight")}
    config = read_rope(metadata) | {
        "num_local_experts": metadata.need("expert_count"),
        "num_experts_per_tok": metadata.need("expert_used_count"),
        "intermediate_size": metadata.need("expert_feed_forward_length"),
        "sliding_window": metadata.need("attention.sliding_window"),
    }
    if "rope_parameters" not in config:
        raise metadata.error(": gpt-oss.rope.scaling.type is missing")
    config["rope_parameters"]["truncate"] = False
    if stored == {"MXFP4"}:
        config["quantization_config"] = {"quant_method": "mxfp4"}
    return config


def _gemma4(metadata: Metadata) -> dict[str, Any]:
    """Return Gemma 4's keys. Its full layers have other heads and another rope."""
    slides = metadata.need("attention.sliding_window_pattern")
    kv_heads = metadata.need("attention.head_count_kv")
    by_layer = kv_heads if isinstance(kv_heads, list) else [kv_heads] * len(slides)
    factors = metadata.header.floats("rope_freqs.weight")
    full = slides.index(False)
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": None,
        "layer_types": [("full_attention", "sliding_attention")[s] for s in slides],
        "sliding_window": metadata.need("attention.sliding_window"),
        "head_dim": metadata.need("attention.key_length_swa"),
        "global_head_dim": metadata.need("attention.key_length"),
        "num_key_value_heads": by_layer[slides.index(True)] if True in slides else by_layer[0],
        "num_global_key_value_heads": by_layer[full],
        "attention_k_eq_v": not metadata.has_tensor(f"blk.{full}.attn_v.weight"),
        "num_kv_shared_layers": metadata.get("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": metadata.get("embedding_length_per_layer_input", 0),
        "intermediate_size": metadata.need("feed_forward_length"),
        "final_logit_softcapping": metadata.get("final_logit_softcapping"),
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10000.0),
            },
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": metadata.number("rope.freq_base"),
                "partial_rotary_factor": factors.count(1.0) / len(factors),
            },
        },
    }
    if not metadata.get("expert_count", 0):
        return config
    return config | {
        "enable_moe_block": True,
        "num_experts": metadata.need("expert_count"),
        "top_k_experts": metadata.need("expert_used_count"),
        "moe_intermediate_size": metadata.need("expert_feed_forward_length"),
    }


FURTHER: dict[str, Callable[[Metadata], dict[str, Any]]] = {
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "qwen3moe": _qwen3moe,
    "qwen3next": _qwen35,
    "qwen35": _qwen35,
    "qwen35moe": _qwen35,
}
"""Further keys of an architecture's config.json."""
