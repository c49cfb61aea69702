"""GGUF files as targets: their metadata is written as a checkpoint's directory, once for each file.

The directory holds config.json, the tokenizer and a link to the file, whose weights are read in
place.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from strobe.hub.cache import cache_directory
from strobe.hub.files import GGUF_LINK
from strobe.hub.gguf_file import AGAIN, GGUFHeader, read_header

FORM = 3
"""Counts up with each change of what is written, so that older directories are not used."""
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text"),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}
"""architectures and model_type of config.json by general.architecture."""
WITH_EXPERTS = ("qwen3moe", "qwen35moe")
RECURRENT = ("qwen35", "qwen35moe")
UNSUPPORTED = ("rope.scaling.type", "attention.sliding_window", "final_logit_softcapping")
"""Metadata of an architecture that would change the computation."""
END_TOKENS = frozenset(
    {
        "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<|return|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "_<EOT>",
    }
)  # fmt: skip
"""Tokens that end an answer even if the metadata does not say so, as in llama.cpp."""
CONTROL = 3
"""The type of an added token that decoding skips."""
USER_DEFINED = 4
"""The type of any other added token."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "llama-bpe": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns that split text before byte-pair encoding, by tokenizer.ggml.pre."""


def gguf_directory(path: Path, sampling: Mapping[str, float] = MappingProxyType({})) -> Path:
    """Return a directory that describes the GGUF file as a checkpoint. sampling: default values for
    generation_config.json. Raises ValueError with one sentence if the file is damaged or not
    supported."""
    header = read_header(path)
    target = path.absolute()
    status = path.stat()
    key = f"{FORM} {target} {status.st_size} {status.st_mtime_ns} {dict(sampling)}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    directory = cache_directory("gguf") / name
    if directory.exists():
        return directory
    try:
        config = _config(header, path)
        tokenizer = _tokenizer(header.metadata, path)
    except Exception as error:  # the tokenizer's library raises no other kind
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} has metadata that is damaged ({error!r}); {AGAIN}") from None
    directory.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=directory.parent))
    try:
        for file, content in (
            ("config.json", config),
            ("tokenizer_config.json", _tokenizer_config(header.metadata)),
            ("generation_config.json", {"eos_token_id": config["eos_token_id"], **sampling}),
        ):
            (part / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(str(part / "tokenizer.json"))
        (part / GGUF_LINK).symlink_to(target)
        os.rename(part, directory)
    except OSError as error:
        if not directory.exists():  # else another process was faster
            raise ValueError(
                f"{directory.parent} cannot be written ({error.strerror}); set XDG_CACHE_HOME to a "
                "directory with free space."
            ) from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory


def _value(metadata: Mapping[str, Any], key: str, path: Path) -> Any:
    if key not in metadata:
        raise ValueError(
            f"{path} lacks the metadata {key}; convert the model again, with a current llama.cpp."
        )
    return metadata[key]


def _config(header: GGUFHeader, path: Path) -> dict[str, Any]:
    """Return config.json. Raises ValueError for what no config can say."""
    metadata = header.metadata
    architecture = _value(metadata, "general.architecture", path)
    _check_supported(header, architecture, path)
    prefix = f"{architecture}."
    hidden = _value(metadata, f"{prefix}embedding_length", path)
    heads = _value(metadata, f"{prefix}attention.head_count", path)
    epsilon = _value(metadata, f"{prefix}attention.layer_norm_rms_epsilon", path)
    tokens = _value(metadata, "tokenizer.ggml.tokens", path)
    name, model_type = ARCHITECTURES[architecture]
    types = {tensor.type for tensor in header.tensors.values()}
    layers = _value(metadata, f"{prefix}block_count", path)
    further: dict[str, Any] = {}
    if architecture in WITH_EXPERTS:
        further |= _experts(metadata, architecture, path)
    if architecture in RECURRENT:
        layers -= metadata.get(f"{prefix}nextn_predict_layers", 0)
        further |= _recurrent(metadata, architecture, layers, path)
    else:
        further["rope_theta"] = metadata.get(f"{prefix}rope.freq_base", 10000.0)
    if architecture != "qwen35moe":
        further["intermediate_size"] = _value(metadata, f"{prefix}feed_forward_length", path)
    return further | {
        "architectures": [name],
        "model_type": model_type,
        "dtype": "float32" if types == {"F32"} else "float16" if "F16" in types else "bfloat16",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{prefix}attention.head_count_kv", heads),
        "head_dim": metadata.get(f"{prefix}attention.key_length")
        or metadata.get(f"{prefix}rope.dimension_count")
        or hidden // heads,
        "vocab_size": len(tokens),
        # Stored in fp32: 1e-6 is there as 9.99999997e-7.
        "rms_norm_eps": float(f"{epsilon:.6g}"),
        "max_position_embeddings": _value(metadata, f"{prefix}context_length", path),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_tokens(metadata, path),
    }


def _experts(metadata: Mapping[str, Any], architecture: str, path: Path) -> dict[str, Any]:
    """Return the part of config.json that describes experts, which every layer has."""
    shared = metadata.get(f"{architecture}.expert_shared_feed_forward_length")
    size = {} if shared is None else {"shared_expert_intermediate_size": shared}
    return size | {
        "num_experts": _value(metadata, f"{architecture}.expert_count", path),
        "num_experts_per_tok": _value(metadata, f"{architecture}.expert_used_count", path),
        "moe_intermediate_size": _value(
            metadata, f"{architecture}.expert_feed_forward_length", path
        ),
        "norm_topk_prob": True,  # as llama.cpp computes it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _recurrent(
    metadata: Mapping[str, Any], architecture: str, layers: int, path: Path
) -> dict[str, Any]:
    """Return the part of config.json that describes recurrent layers, and the rope beside them."""
    values = {
        name: _value(metadata, f"{architecture}.{name}", path)
        for name in (
            "attention.key_length", "rope.dimension_count", "rope.freq_base", "ssm.conv_kernel",
            "ssm.group_count", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank",
        )
    }  # fmt: skip
    interval = metadata.get(f"{architecture}.full_attention_interval", 4)
    kinds = ("linear_attention", "full_attention")
    return {
        "layer_types": [kinds[(layer + 1) % interval == 0] for layer in range(layers)],
        "linear_conv_kernel_dim": values["ssm.conv_kernel"],
        "linear_key_head_dim": values["ssm.state_size"],
        "linear_num_key_heads": values["ssm.group_count"],
        "linear_num_value_heads": values["ssm.time_step_rank"],
        "linear_value_head_dim": values["ssm.inner_size"] // values["ssm.time_step_rank"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": values["rope.freq_base"],
            "partial_rotary_factor": values["rope.dimension_count"]
            / values["attention.key_length"],
        },
    }


def _check_supported(header: GGUFHeader, architecture: str, path: Path) -> None:
    """Raise ValueError for what no config can say."""
    metadata = header.metadata
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path}: general.architecture is {architecture!r}, but GGUF files are supported of "
            f"{', '.join(ARCHITECTURES)} only; use the checkpoint in safetensors."
        )
    parts = metadata.get("split.count", 0)
    if parts > 1:
        raise ValueError(
            f"{path} is one of {parts} parts of a split model, which is not supported; join them "
            "with llama.cpp's llama-gguf-split --merge, and name the result."
        )
    if "rope_freqs.weight" in header.tensors:
        raise ValueError(
            f"{path} has a tensor rope_freqs.weight, which scales rope's frequencies, as in Llama "
            "3.1 to 3.3; this is not supported in a GGUF file; use the checkpoint in safetensors."
        )
    experts = () if architecture in WITH_EXPERTS else ("expert_count",)
    for name in (*experts, *UNSUPPORTED):
        setting = metadata.get(f"{architecture}.{name}")
        if setting not in (None, 0, "none"):
            raise ValueError(
                f"{path}: {architecture}.{name} is {setting!r}, which is not supported in a GGUF "
                "file; use the checkpoint in safetensors."
            )


def _end_tokens(metadata: Mapping[str, Any], path: Path) -> list[int]:
    """Return the ids of the tokens that end an answer: of a text, of a turn and of a message, as
    the metadata says, and those known by their names, one of which a chat template may use."""
    ends = {_value(metadata, "tokenizer.ggml.eos_token_id", path)}
    for key in ("eot", "eom"):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        ends |= set() if number is None else {number}
    tokens = metadata["tokenizer.ggml.tokens"]
    return sorted(ends | {i for i, text in enumerate(tokens) if text in END_TOKENS})


def _tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    return config | ({} if template is None else {"chat_template": template})


def _tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer: byte-level byte-pair encoding."""
    model, split = (_value(metadata, f"tokenizer.ggml.{name}", path) for name in ("model", "pre"))
    if model != "gpt2" or split not in SPLITS:
        raise ValueError(
            f"{path} has a tokenizer of the kind {model!r}, {split!r}, but only 'gpt2' with "
            f"{', '.join(map(repr, SPLITS))} is supported; use the checkpoint in safetensors."
        )
    tokens, merges, kinds = (
        _value(metadata, f"tokenizer.ggml.{name}", path)
        for name in ("tokens", "merges", "token_type")
    )
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {text: i for i, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=split == "llama-bpe"))
    if split in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    steps.append(pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for text, kind in zip(tokens, kinds, strict=True):
        kind = CONTROL if text in END_TOKENS else kind
        token = AddedToken(text, normalized=False, special=kind == CONTROL)
        if kind == CONTROL:
            tokenizer.add_special_tokens([token])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([token])
    if metadata.get("tokenizer.ggml.add_bos_token"):
        number = _value(metadata, "tokenizer.ggml.bos_token_id", path)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[number]} $A", special_tokens=[(tokens[number], number)]
        )
    return tokenizer
