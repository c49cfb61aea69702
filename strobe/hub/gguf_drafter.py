"""config.json of a drafter's GGUF file, made of its metadata and tensors, in z-lab's format or, for
DSpark, in SpecForge's: llama.cpp converts drafters for DFlash, DFlash2 and DSpark alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.hub.gguf_config import Metadata, check_rope, read_rope
from strobe.hub.gguf_file import GGUFHeader, metadata_value

ARCHITECTURE = "dflash"
"""general.architecture of these files."""
BLOCK = 16
"""Size of a block if the file does not say it, as in llama.cpp."""
HEAD_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""DFlash2's keys, which have the same names as in config.json."""
MARKOV = "markov_w1.weight"
CONFIDENCE = "conf_proj.weight"
SCALES = {
    "logit_scale": "output_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_scale": "input_embedding_scale",
}
"""Keys of config.json by the names of metadata."""


def is_drafter(header: GGUFHeader) -> bool:
    """Whether the file describes a drafter of these methods."""
    return header.metadata.get("general.architecture") == ARCHITECTURE


def make_draft_config(header: GGUFHeader, path: Path) -> dict[str, Any]:
    """Return config.json. Raises ValueError for what is not supported."""
    metadata = Metadata(header, ARCHITECTURE, path)
    _check_layers(metadata)
    check_rope(metadata)
    heads = metadata.need("attention.head_count")
    hidden = metadata.need("embedding_length")
    types = {tensor.type for tensor in header.tensors.values()}
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32" if types == {"F32"} else "float16" if "F16" in types else "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": metadata.get("attention.key_length") or hidden // heads,
        "vocab_size": len(metadata_value(header.metadata, "tokenizer.ggml.tokens", path)),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.need("context_length"),
        "hidden_act": "silu",
        "block_size": metadata.get("block_size", BLOCK),
        **read_rope(metadata),
        **_masks(metadata),
    }
    for name, key in SCALES.items():
        if metadata.get(name) is not None:
            config[key] = metadata.number(name)
    if metadata.has_tensor("blk.0.attn_sinks.weight"):
        config["attention_sink_bias"] = True
    target_hidden = metadata.get("target_hidden_size", hidden)
    if target_hidden != hidden:
        config["target_hidden_size"] = target_hidden
    return config | {"dflash_config": _drafting(metadata)}


def _check_layers(metadata: Metadata) -> None:
    """Raise ValueError for layers that are not Qwen3's, and for a reduced vocabulary."""
    problems = {
        "hyper_connection.count": "describes a drafter for DeepSeek-V4's DSpark",
        "expert_count": "describes a drafter with experts",
        "decoder_arch": f"describes a drafter with the layers of {metadata.get('decoder_arch')}",
    }
    for name, problem in problems.items():
        if metadata.get(name):
            raise metadata.error(f" {problem}, which is not supported")
    if metadata.has_tensor("d2t"):
        raise metadata.error(
            " describes a drafter with a reduced vocabulary (d2t), which is not supported in a "
            "GGUF file"
        )
    size = metadata.get("attention.key_length")
    rotated = metadata.get("rope.dimension_count", size)
    if size is not None and rotated != size:
        raise metadata.error(f": rope turns {rotated} of a head's {size} values")


def _masks(metadata: Metadata) -> dict[str, Any]:
    """Return the keys of windows and causality, which are missing where the drafter's own config
    did not have them."""
    config: dict[str, Any] = {}
    causal = metadata.get("attention.causal")
    if causal is not None:
        config["is_causal"] = bool(causal)
    window = metadata.get("attention.sliding_window")
    if not window:
        return config
    slides = metadata.need("attention.sliding_window_pattern")
    kinds = ("full_attention", "sliding_attention")
    return config | {
        "layer_types": [kinds[bool(slide)] for slide in slides],
        "sliding_window": window,
        "use_sliding_window": True,
    }


def _drafting(metadata: Metadata) -> dict[str, Any]:
    """Return `dflash_config`. The file names the layers whose input is captured."""
    config: dict[str, Any] = {
        "mask_token_id": metadata_value(
            metadata.header.metadata, "tokenizer.ggml.mask_token_id", metadata.path
        ),
        "target_layer_ids": [layer - 1 for layer in metadata.need("target_layers")],
    }
    config |= {key: value for key in HEAD_KEYS if (value := metadata.get(key)) is not None}
    if not metadata.has_tensor(MARKOV):
        return config
    has_confidence = metadata.has_tensor(CONFIDENCE)
    return config | {
        "projector_type": "dspark",
        "markov_rank": metadata.header.tensors[MARKOV].shape[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": has_confidence,
        "confidence_head_with_markov": has_confidence,
        "sample_from_anchor": bool(metadata.get("sample_from_anchor", True)),
    }
