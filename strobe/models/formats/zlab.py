"""z-lab's format: DFlash keys at the top level or in `dflash_config`, no embedding and no head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.models.config import DraftConfig, default_capture_layers
from strobe.models.formats.decoder import (
    plain_products,
    read_decoder,
    read_dtype,
    read_layer_types,
    read_window,
)
from strobe.models.formats.fields import MEND, Fields

HARMLESS = frozenset(
    {"eos_token_id", "tie_word_embeddings", "use_sliding_window", "max_window_layers"}
)
"""What a drafter's config says that is its target's matter, or repeats `layer_types`."""


PLAIN: dict[str, tuple[Any, ...]] = {
    "use_swa": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "add_full_attention_sink_bias": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "markov_rank": (None, 0),
    "enable_confidence_head": (None, False),
    "num_anchors": (None,),
    "num_selector_candidates": (None,),
}
"""Keys that change what a DFlash drafter computes, with the values at which they change nothing."""


def read_masks(fields: Fields) -> tuple[LayerMask, ...]:
    """Sliding layers are causal within the block, full ones are not, unless the config forces it
    for all of them."""
    types = read_layer_types(fields)
    window = read_window(fields, types)
    causal = fields.get("is_causal", fields.get("causal"))
    if causal is not None:
        causal = fields.flag("is_causal") if "is_causal" in fields else fields.flag("causal")
    return tuple(
        LayerMask(
            causal=causal if causal is not None else t == "sliding_attention",
            window=window if t == "sliding_attention" else None,
        )
        for t in types
    )


def read_capture(fields: Fields) -> tuple[tuple[int, ...], int | None]:
    """The layers whose output is captured, counted as layers done, and how many the target has."""
    total = fields.get("num_target_layers")
    total = None if total is None else fields.integer("num_target_layers")
    ids = fields.ids("target_layer_ids")
    if ids is None and total is not None:
        ids = default_capture_layers(total, fields.integer("num_hidden_layers"))
    if not ids:
        raise ValueError(
            f"{fields.path}: target_layer_ids is {ids!r}, but must list the target layers whose "
            f"output the drafter reads, counted from 0; {MEND}"
        )
    return tuple(i + 1 for i in ids), total


def read_mask_token(fields: Fields) -> int:
    mask = fields.get("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise ValueError(
            f"{fields.path}: mask_token_id is {mask!r}; a DFlash drafter needs the id of its mask "
            "token in dflash_config.mask_token_id."
        )
    return mask


def read(config: dict[str, Any], path: Path) -> DraftConfig:
    fields = Fields(config, path, first="dflash_config")
    plain_products(fields)
    for key, values in PLAIN.items():
        fields.only(key, *values, why="use another drafter.")
    capture, total = read_capture(fields)
    softcap = fields.get("final_logit_softcapping")
    draft = DraftConfig(
        decoder=read_decoder(fields, read_masks(fields), theta=1e6, drafter=True),
        block_size=fields.integer("block_size", 16, low=2),
        mask_token_id=read_mask_token(fields),
        capture=capture,
        num_target_layers=total,
        embedding_scale=fields.number("input_embedding_scale", 1.0),
        output_multiplier=fields.number("output_multiplier", 1.0),
        logit_softcap=fields.number("final_logit_softcapping") if softcap else None,
        dtype=read_dtype(fields),
    )
    fields.finish(HARMLESS)
    return draft
