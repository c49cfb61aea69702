"""z-lab's format: DFlash keys at the top level or in `dflash_config`, no embedding and no head."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.decoder import (
    plain_linears,
    read_decoder,
    read_dtype,
    read_layer_types,
    read_rope_parameters,
    read_ropes,
    read_window,
)
from strobe.models.config_readers.detection import read_head
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.config_readers.mask_token import find_mask_token
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.model_config import DraftConfig

HARMLESS = frozenset(
    {"eos_token_id", "tie_word_embeddings", "use_sliding_window", "max_window_layers",
     "swa_window_size", "loss_decay_gamma", "initial_context_length"}
)  # fmt: skip
"""Keys of a drafter's config that concern its target or training, or that repeat other keys."""


def read_masks(fields: Fields) -> tuple[LayerMask, ...]:
    """Sliding layers are causal within the block and full ones are not, unless the config sets
    `causal` for all. With `use_swa` and no sliding layer type (MiMo) all layers slide and none is
    causal; the window is `swa_window_size` or else `sliding_window`."""
    types = read_layer_types(fields)
    causal = None
    if not fields.flag("use_swa"):
        fields.get("swa_window_size")  # has no effect then
        window = read_sliding_window(fields, types)
    else:
        if "sliding_attention" not in types:
            types = ["sliding_attention"] * len(types)
            causal = False
        window = fields.integer("swa_window_size", fields.get("sliding_window"))
    for key in ("causal", "is_causal"):
        causal = fields.flag(key) if fields.get(key) is not None else causal
    windows = [window if t == "sliding_attention" else None for t in types]
    return tuple(
        LayerMask(causal=causal if causal is not None else size is not None, window=size)
        for size in windows
    )


def read_sliding_window(fields: Fields, types: list[str]) -> int | None:
    """Read the window of sliding layers; None if they are full layers, as in transformers' Qwen3:
    if `sliding_window` is null, or without `use_sliding_window`, whose default is false there."""
    is_null = "sliding_window" in fields and fields.get("sliding_window") is None
    if is_null or not fields.flag("use_sliding_window", fields.get("model_type") != "qwen3"):
        fields.get("sliding_window")  # has no effect
        return None
    return read_window(fields, types)


def read_sinks(fields: Fields, masks: tuple[LayerMask, ...]) -> bool:
    """Whether heads have sinks. `attention_sink_bias` covers all layers; otherwise there is one key
    for sliding and one for full layers."""
    swa = "add_swa_attention_sink_bias"
    full = "add_full_attention_sink_bias"
    has_sinks = {True: fields.flag(swa), False: fields.flag(full)}
    if fields.get("attention_sink_bias") is not None:
        return fields.flag("attention_sink_bias")
    used = {has_sinks[mask.window is not None] for mask in masks}
    if len(used) > 1:
        raise ValueError(
            f"{fields.path}: {swa} is {has_sinks[True]!r} and {full} {has_sinks[False]!r}, but "
            "sinks in some layers only are not supported; use a drafter that has them in all "
            "layers or none."
        )
    return used.pop()


def read_rope(
    fields: Fields, masks: tuple[LayerMask, ...], head_dim: int, *, sinks: bool
) -> RopeConfig:
    """Read the rope. A drafter rotates whole heads: the share in its config is copied from its
    target. Only MiMo's drafters, which have `use_swa` or sinks, apply it."""
    max_position = fields.integer("max_position_embeddings", 32768)
    rope = read_ropes(fields, masks, 1e6, max_position, drafter=True)
    neox = fields.flag("is_neox_style", fields.flag("rope_is_neox_style", True))
    partial_factor = fields.get("partial_rotary_factor")
    parameters = read_rope_parameters(fields, 1e6)
    share = parameters.get("partial_rotary_factor") or partial_factor
    if share is None or not (fields.flag("use_swa") or sinks):
        return replace(rope, interleaved=not neox)
    real = isinstance(share, int | float) and not isinstance(share, bool)
    if not real or not 0 < share <= 1 or int(head_dim * share) % 2:
        raise ValueError(
            f"{fields.path}: partial_rotary_factor is {share!r}, but must be a number of at most 1 "
            f"that makes an even part of a head of {head_dim}; {HINT}"
        )
    return replace(rope, interleaved=not neox, share=float(share))


def read_capture(fields: Fields) -> tuple[tuple[int, ...], int | None]:
    """Return the captured layers, as numbers of finished layers, and the target's layer count."""
    total = fields.get("num_target_layers")
    total = None if total is None else fields.integer("num_target_layers")
    ids = fields.ids("target_layer_ids")
    if ids is None and total is not None:
        ids = default_capture_layers(total, fields.integer("num_hidden_layers"))
    if not ids:
        raise ValueError(
            f"{fields.path}: target_layer_ids is {ids!r}, but must list the target layers whose "
            f"output the drafter reads, counted from 0; {HINT}"
        )
    return tuple(i + 1 for i in ids), total


def read_flat(
    fields: Fields, target: Path | None, harmless: Collection[str] = (), **layout: Any
) -> DraftConfig:
    """Read a config with decoder and DFlash keys in one object. layout: more DraftConfig fields."""
    plain_linears(fields)
    # Keys that change a DFlash drafter's computation.
    if "sample_from_anchor" not in harmless:
        fields.only("sample_from_anchor", False, why="use another drafter.")
    if "num_anchors" not in harmless:
        fields.only("num_anchors", why="use another drafter.")
    capture, total = read_capture(fields)
    softcap = fields.get("final_logit_softcapping")
    masks = read_masks(fields)
    head_dim = fields.integer("head_dim", 128)
    sinks = read_sinks(fields, masks)
    rope = read_rope(fields, masks, head_dim, sinks=sinks)
    fields.only("v_head_dim", head_dim, why=f"values must be as wide as heads, {head_dim}.")
    scale = fields.get("input_embedding_scale")
    features = fields.get("target_hidden_size")
    decoder = read_decoder(
        fields,
        masks,
        theta=1e6,
        rope=rope,
        value_scale=fields.number("attention_value_scale", 1.0),
        sinks=sinks,
    )
    draft = DraftConfig(
        decoder=decoder,
        block_size=fields.integer("block_size", 16, low=2),
        mask_token_id=find_mask_token(fields, target, decoder.vocab_size),
        capture=capture,
        num_target_layers=total,
        embedding_scale=None if scale is None else fields.number("input_embedding_scale"),
        output_multiplier=fields.number("output_multiplier", 1.0),
        logit_softcap=fields.number("final_logit_softcapping") if softcap else None,
        dtype=read_dtype(fields),
        target_hidden_size=None if features is None else fields.integer("target_hidden_size"),
    )
    fields.finish([*HARMLESS, *harmless])
    return replace(draft, **layout)


def read(config: dict[str, Any], path: Path, target: Path | None = None) -> DraftConfig:
    """target: the directory whose tokenizer has the mask token if the config does not name it."""
    fields = Fields(config, path, first="dflash_config")
    # Outside `dflash_config` the key belongs to DeepSpec, whose first slot predicts.
    harmless = {"num_anchors"} & set(config.get("dflash_config") or ())
    return read_flat(fields, target, harmless, **read_head(config, fields))


def default_capture_layers(num_target_layers: int, count: int) -> list[int]:
    """z-lab's rule for `target_layer_ids` when a config lists none (0-based layer outputs)."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
