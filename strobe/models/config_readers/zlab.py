"""z-lab's format: drafting keys at the top level or in `dflash_config`, no embedding and no head.
SpecForge's and ModelOpt's DSpark drafters are written in the same way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.block_layout import read_anchor_first
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_dtype,
    read_layer_types,
    read_rope_parameters,
    read_ropes,
    read_window,
)
from strobe.models.config_readers.detection import (
    DFLASH2,
    MARKOV_KEYS,
    Z_LAB,
    Dialect,
    read_head,
)
from strobe.models.config_readers.draft_vocabulary import read_draft_vocabulary
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.config_readers.mask_token import find_mask_token
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.config_readers.target_copies import check_copies
from strobe.models.model_config import DraftConfig

HARMLESS = frozenset(
    {"eos_token_id", "tie_word_embeddings", "use_sliding_window", "max_window_layers",
     "swa_window_size", "loss_decay_gamma"}
)  # fmt: skip
"""Keys of a drafter's config that concern its target or training."""
TRAINING = frozenset({"num_anchors", "confidence_head_alpha"})
"""Keys of DSpark's training."""
CAPTURE_KEYS = ("target_layer_ids", "dspark_target_layer_ids", "layer_ids")
"""Keys of the captured layers in order of precedence."""
SELECTOR_KEYS = (
    "mask_token_id", *CAPTURE_KEYS, "num_target_layers", "conv_kernel_size", "conv_group_size",
    "selector_rank", "selector_top_k"
)  # fmt: skip
"""Keys of a DFlash2 drafter that no target has, so that two values of one contradict each other."""


def read_masks(fields: Fields) -> tuple[LayerMask, ...]:
    """Sliding layers are causal within the block and full ones are not, unless the config sets
    `causal` for all. With `use_swa` and no sliding layer type (MiMo) all layers slide without being
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


def read_capture(fields: Fields, dialect: Dialect) -> tuple[tuple[int, ...], int | None]:
    """Return the captured layers, as numbers of finished layers, and the target's layer count.
    z-lab's format has a default. Raises ValueError if two keys name different layers."""
    total = fields.get("num_target_layers")
    total = None if total is None else fields.integer("num_target_layers")
    lists = {key: ids for key in CAPTURE_KEYS if (ids := fields.ids(key)) is not None}
    if aux := fields.ids("eagle_aux_hidden_state_layer_ids"):  # counted as hidden states
        lists["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in aux]
    first, *others = [*lists, CAPTURE_KEYS[0]]
    for other in others:
        if lists.get(other, lists.get(first)) != lists.get(first):
            raise ValueError(
                f"{fields.path}: {first} is {fields.get(first)!r}, but {other} names other layers, "
                f"{fields.get(other)!r}; {HINT}"
            )
    ids = lists.get(first)
    if ids is None and total is not None and dialect.format == Z_LAB:
        ids = default_capture_layers(total, fields.integer("num_hidden_layers"))
    if not ids:
        raise ValueError(
            f"{fields.path}: target_layer_ids is {ids!r}, but must list the target layers whose "
            f"output the drafter reads, counted from 0; {HINT}"
        )
    return tuple(i + 1 for i in ids), total


def refuse_unsupported(fields: Fields, dialect: Dialect) -> None:
    """Raises ValueError for keys that change the layers in a way that is not supported, and for
    keys that contradict each other."""
    fields.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    if (base := fields.get("backbone_rotary_base")) is not None:
        raise ValueError(
            f"{fields.path}: backbone_rotary_base is {base!r}, but a second base beside "
            "rope_theta, and the mask_embedding.pt that comes with it in MiMo's drafters, are not "
            "supported; use another drafter."
        )
    if dialect.format == Z_LAB and not fields.is_nested("num_anchors"):
        # Outside `dflash_config` the key belongs to DeepSpec, whose first slot predicts.
        fields.only("num_anchors", why="use another drafter.")
    if dialect.method == DFLASH2:
        fields.agree(SELECTOR_KEYS)
    else:
        _check_dspark_keys(fields)


def _check_dspark_keys(fields: Fields) -> None:
    """Check the keys of DSpark's family that do not belong to its heads."""
    if any(key in fields for key in MARKOV_KEYS):
        fields.agree()
    heads = fields.get("num_attention_heads")
    if fields.get("attention_mode") == "mha":  # the numbers of heads say the same
        fields.only("num_key_value_heads", heads, why="attention_mode is 'mha'.")
    fields.only("attention_mode", "gqa", "mha", why="use a drafter with one of these.")
    rank = fields.get("markov_rank")
    fields.only("dspark_markov_rank", rank, why=f"markov_rank is {rank!r}.")
    fields.only("use_aux_hidden_state", True, why="use a drafter that reads hidden states.")
    causal = fields.get("causal", fields.get("is_causal"))
    fields.only("dflash_query_causal", causal, why=f"causal is {causal!r}.")


def read_flat(
    fields: Fields, target: Path | None, dialect: Dialect, embedding_scale: float | None
) -> DraftConfig:
    """Read a config with decoder and drafting keys in one object, or in `dflash_config`.
    embedding_scale: if the config does not name it; None for the target's."""
    refuse_unsupported(fields, dialect)
    anchor_first = read_anchor_first(fields, dialect)
    capture, total = read_capture(fields, dialect)
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
    check_copies(fields)
    draft = DraftConfig(
        decoder=decoder,
        block_size=fields.integer(
            "block_size", 16 if dialect.format == Z_LAB else None, low=1 if anchor_first else 2
        ),
        mask_token_id=find_mask_token(fields, target, decoder.vocab_size),
        capture=capture,
        num_target_layers=total,
        embedding_scale=(
            embedding_scale if scale is None else fields.number("input_embedding_scale")
        ),
        output_multiplier=fields.number("output_multiplier", 1.0),
        logit_softcap=fields.number("final_logit_softcapping") if softcap else None,
        dtype=read_dtype(fields),
        anchor_first=anchor_first,
        target_hidden_size=None if features is None else fields.integer("target_hidden_size"),
        draft_vocab_size=read_draft_vocabulary(fields, decoder.vocab_size, decoder.vocab_size),
        format=dialect.format,
        **read_head(dialect.method, fields),
    )
    fields.finish([*HARMLESS, *TRAINING])
    return draft


def read(
    config: dict[str, Any], path: Path, dialect: Dialect, target: Path | None = None
) -> DraftConfig:
    """target: the directory whose tokenizer has the mask token if the config does not name it."""
    fields = Fields(config, path, first="dflash_config")
    return read_flat(fields, target, dialect, embedding_scale=None)


def default_capture_layers(num_target_layers: int, count: int) -> list[int]:
    """z-lab's rule for `target_layer_ids` when a config lists none (0-based layer outputs)."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]
