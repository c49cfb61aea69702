"""Create a drafter for a target, and save a trained one in z-lab's format."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from strobe.models.config_readers.detection import (
    DFLASH,
    DFLASH2,
    DSPARK,
    SPECFORGE,
)
from strobe.models.config_readers.rope import rope_scaling
from strobe.models.config_readers.zlab import default_capture_layers
from strobe.models.dflash_drafter import DFlash
from strobe.models.heads.dflash2 import SelectorConfig
from strobe.models.heads.dspark import MarkovConfig
from strobe.models.model_config import DraftConfig, LayerMask, TargetConfig
from strobe.models.target import Target
from strobe.models.weight_mapping import mapping_of
from strobe.tools.train.data import ChatTokenizer
from strobe.tools.train.edges import edges_of, reset_edges
from strobe.tools.train.train_settings import DraftShape

DEFAULT_CANDIDATES = 16
"""Of each draft, in DFlash2."""
MASK_NAMES = ("<|mask|>", "<|MASK|>", "<mask>")


def find_mask_token(tokenizer: ChatTokenizer, rows: int) -> int:
    """Return the token id for empty slots: a mask token, else the first unused row.

    rows: number of rows of the target's embedding.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    vocabulary = tokenizer.get_vocab()
    for name in MASK_NAMES:
        if name in vocabulary:
            return int(vocabulary[name])
    if len(tokenizer) < rows:
        return len(tokenizer)
    raise ValueError(
        f"the tokenizer has no mask token and uses all {rows} rows of the embedding; "
        "pass --draft.mask-token-id with the id of a token that never occurs in text."
    )


def draft_config(shape: DraftShape, target: TargetConfig, mask_token: int) -> DraftConfig:
    """Return a new drafter's config. Raises ValueError if the shape does not fit the target."""
    target_decoder = target.decoder
    ids = _target_layers(shape, target_decoder.num_layers)
    if not 0 <= mask_token < target_decoder.vocab_size:
        raise ValueError(
            f"draft.mask_token_id is {mask_token}, but the target's ids are 0 to "
            f"{target_decoder.vocab_size - 1}."
        )
    full = LayerMask(causal=False)
    sliding = LayerMask(causal=True, window=shape.sliding_window)
    count = shape.sliding_layers
    decoder = type(target_decoder)(
        hidden_size=target_decoder.hidden_size,
        intermediate_size=shape.intermediate_size or target_decoder.intermediate_size,
        num_layers=shape.layers,
        num_heads=target_decoder.num_heads,
        num_kv_heads=target_decoder.num_kv_heads,
        head_dim=target_decoder.head_dim,
        vocab_size=target_decoder.vocab_size,
        rms_norm_eps=target_decoder.rms_norm_eps,
        rope=target_decoder.rope,
        max_position=target_decoder.max_position,
        attention_bias=target_decoder.attention_bias,
        masks=(sliding,) * count + (full,) * (shape.layers - count),
    )
    return DraftConfig(
        decoder=decoder,
        block_size=shape.block_size,
        mask_token_id=mask_token,
        capture=tuple(i + 1 for i in ids),
        num_target_layers=target_decoder.num_layers,
        embedding_scale=None,
        output_multiplier=1.0,
        logit_softcap=None,
        dtype="bfloat16",
        **head_fields(shape),
    )


def head_fields(shape: DraftShape) -> dict[str, Any]:
    """Return the DraftConfig fields about the head: what it would read from config.json."""
    if shape.head == "dflash2":
        selector = SelectorConfig(
            conv_kernel_size=shape.conv_taps,
            conv_group_size=shape.conv_group,
            selector_rank=shape.rank,
            selector_top_k=shape.candidates or DEFAULT_CANDIDATES,
        )
        return {"method": DFLASH2, "head": selector}
    if shape.head == "dspark":
        markov = MarkovConfig(
            rank=shape.rank,
            kind="vanilla",
            confidence=shape.confidence,
            confidence_with_markov=shape.confidence,
            draft_topk=shape.candidates,
            logit_scale=1.0,
        )
        return {"method": DSPARK, "head": markov, "format": SPECFORGE}
    return {"method": DFLASH}


def _target_layers(shape: DraftShape, count: int) -> tuple[int, ...]:
    """Return the target's layers whose output the drafter reads. count: the target's layers. Raises
    ValueError for layers that it does not have."""
    ids = shape.target_layer_ids
    if ids is None:
        max_features = max(1, count - 3)
        if not 1 <= shape.features <= max_features:
            raise ValueError(
                f"draft.features is {shape.features}, but a target of {count} layers gives 1 to "
                f"{max_features}; lower it or name draft.target_layer_ids."
            )
        ids = tuple(default_capture_layers(count, shape.features))
    wrong = [i for i in ids if not 0 <= i < count]
    if not ids or wrong or len(set(ids)) < len(ids):
        raise ValueError(
            f"draft.target_layer_ids is {list(ids)}, but must name different layers from 0 to "
            f"{count - 1}."
        )
    return ids


def new_draft(config: DraftConfig, target: Target, *, max_positions: int, seed: int) -> DFlash:
    """Create a trainable fp32 drafter with random weights that uses the target's embedding and
    head.

    Linear layers start with variance 1 / inputs; at the end of a residual branch, they are divided
    by the square root of the number of branches. The final norm starts as the target's, since both
    feed the same head. The embedding is converted to fp32, so that the residual stream is fp32.
    Heads and convolutions start without effect.
    """
    config = replace(config, embedding_scale=target.config.embedding_scale)
    draft = DFlash(config, target.embed_tokens.weight.float(), target.output, max_positions)
    generator = torch.Generator().manual_seed(seed)
    branches = 2 * config.decoder.num_layers
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.startswith("draft_head.") or "_conv." in name:
                continue
            if name.endswith(".bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                scale = branches if ".o_proj." in name or ".down_proj." in name else 1
                std = (parameter.shape[1] * scale) ** -0.5
                parameter.normal_(0.0, std, generator=generator)
        draft.norm.weight.copy_(target.norm.weight.cpu())
    edges = edges_of(draft)
    if edges is not None:
        reset_edges(edges, generator)
    return draft.to(target.embed_tokens.weight.device)


def as_saved(draft: DFlash) -> dict[str, Tensor]:
    """Return the parameters under a checkpoint's names, with fused linear layers split."""
    mapping = mapping_of(draft)
    tensors = dict[str, Tensor]()
    for name, parameter in draft.named_parameters():
        for part in mapping[name]:
            (source,) = part.sources
            tensors[source] = parameter.detach()[part.at]
    return tensors


def checkpoint_config(draft: DraftConfig, target: dict[str, Any]) -> dict[str, Any]:
    """Return config.json in z-lab's format; `target` is the target's config.json."""
    decoder = draft.decoder
    sliding = [mask.window is not None for mask in decoder.masks]
    window = next((mask.window for mask in decoder.masks if mask.window is not None), None)
    architecture, keys, inner_keys = _head_keys(draft)
    if [mask.causal for mask in decoder.masks] != sliding:
        keys["is_causal"] = decoder.masks[0].causal
    return {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": draft.block_size,
        "num_target_layers": draft.num_target_layers,
        "dflash_config": {
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": [k - 1 for k in draft.capture],
            **inner_keys,
        },
        **keys,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "num_hidden_layers": decoder.num_layers,
        "num_attention_heads": decoder.num_heads,
        "num_key_value_heads": decoder.num_kv_heads,
        "head_dim": decoder.head_dim,
        "attention_bias": decoder.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": decoder.rms_norm_eps,
        "rope_theta": decoder.rope.theta,
        "rope_scaling": rope_scaling(decoder.rope),
        "max_position_embeddings": decoder.max_position,
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": window,
        "use_sliding_window": any(sliding),
        "max_window_layers": decoder.num_layers - sum(sliding),
        "bos_token_id": target.get("bos_token_id"),
        "eos_token_id": target.get("eos_token_id"),
        "initializer_range": target.get("initializer_range", 0.02),
        "tie_word_embeddings": bool(target.get("tie_word_embeddings", False)),
        "use_cache": True,
        "vocab_size": decoder.vocab_size,
    }


def _head_keys(draft: DraftConfig) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the architecture, the head's keys at the top of config.json, and those in
    `dflash_config`."""
    head = draft.head
    if isinstance(head, SelectorConfig):
        return "DFlash2DraftModel", {}, asdict(head)
    if not isinstance(head, MarkovConfig):
        return "DFlashDraftModel", {}, {}
    keys: dict[str, Any] = {
        "sample_from_anchor": False,
        "markov_rank": head.rank,
        "markov_head_type": head.kind,
        "enable_confidence_head": head.confidence,
        "confidence_head_with_markov": head.confidence_with_markov,
    }
    if head.draft_topk is not None:
        keys["dspark_draft_topk"] = head.draft_topk
    return "DSparkDraftModel", keys, {"projector_type": "dspark"}


def save_draft(draft: DFlash, directory: Path, target_config: dict[str, Any]) -> None:
    """Write config.json and model.safetensors (bf16), the latter atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.to("cpu", torch.bfloat16).contiguous() for k, v in as_saved(draft).items()}
    weights = directory / "model.safetensors"
    part = weights.with_suffix(".part")
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, weights)
    config = json.dumps(checkpoint_config(draft.config, target_config), indent=2) + "\n"
    (directory / "config.json").write_text(config, encoding="utf-8")
