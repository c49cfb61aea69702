"""Drafters as GGUF files, written as llama.cpp converts them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from strobe.models.quantization.gguf import NAMES
from strobe.models.quantization.gguf_dflash import NAMES as OWN_NAMES
from strobe.models.quantization.gguf_dflash import PARAMETERS
from tests.support.gguf_files import write

_MODULES = {module: name for name, module in {**NAMES, **OWN_NAMES}.items()}
_PARAMETERS = {parameter: name for name, parameter in PARAMETERS.items()}
COPIED = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def gguf_name(name: str) -> str:
    """Return the name in a GGUF file of a drafter's tensor."""
    layer = re.match(r"layers\.(\d+)\.", name)
    prefix = "" if layer is None else f"blk.{layer[1]}."
    own = name if layer is None else name[layer.end() :]
    if own.removesuffix(".weight") in _PARAMETERS:  # codebooks
        return prefix + _PARAMETERS[own.removesuffix(".weight")]
    if own in _PARAMETERS:
        return prefix + _PARAMETERS[own]
    module, _, leaf = own.rpartition(".")
    return f"{prefix}{_MODULES[module]}.{leaf}"


def metadata_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata of a drafter with z-lab's or DeepSpec's config."""
    values = {**config, **config.get("dflash_config", {})}
    metadata: dict[str, Any] = {
        "general.architecture": "dflash",
        "tokenizer.ggml.tokens": [str(i) for i in range(values["vocab_size"])],
        "tokenizer.ggml.mask_token_id": values["mask_token_id"],
        "dflash.block_count": values["num_hidden_layers"],
        "dflash.context_length": values["max_position_embeddings"],
        "dflash.embedding_length": values["hidden_size"],
        "dflash.feed_forward_length": values["intermediate_size"],
        "dflash.attention.head_count": values["num_attention_heads"],
        "dflash.attention.head_count_kv": values["num_key_value_heads"],
        "dflash.attention.key_length": values["head_dim"],
        "dflash.attention.layer_norm_rms_epsilon": values["rms_norm_eps"],
        "dflash.rope.freq_base": values["rope_theta"],
        "dflash.block_size": values["block_size"],
        "dflash.target_layers": [layer + 1 for layer in values["target_layer_ids"]],
    }
    if values.get("is_causal") is False:
        metadata["dflash.attention.causal"] = False
    if values.get("sliding_window"):
        metadata["dflash.attention.sliding_window"] = values["sliding_window"]
        kinds = [kind == "sliding_attention" for kind in values["layer_types"]]
        metadata["dflash.attention.sliding_window_pattern"] = kinds
    metadata |= {f"dflash.{key}": values[key] for key in COPIED if key in values}
    for name, key in (
        ("logit_scale", "output_multiplier"),
        ("final_logit_softcapping", "final_logit_softcapping"),
        ("embedding_scale", "input_embedding_scale"),
        ("sample_from_anchor", "sample_from_anchor"),
    ):
        if key in values:
            metadata[f"dflash.{name}"] = values[key]
    return metadata


def to_gguf(directory: Path, file: Path, kind: str = "F32", **changes: Any) -> Path:
    """Write a drafter's directory as a GGUF file. changes: of the metadata, None to leave out."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    stored = {gguf_name(name): value.float().numpy() for name, value in tensors.items()}
    metadata = metadata_of(config) | changes
    metadata = {key: value for key, value in metadata.items() if value is not None}
    return write(file, metadata, stored, kind)
