"""The format of the speculators library: the decoder's config is nested, layers are counted as in
transformers' hidden states, and the drafter has its own embedding and head, for all tokens or for
some.

https://github.com/vllm-project/speculators
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.models.config_readers.block_layout import read_anchor_first
from strobe.models.config_readers.decoder import (
    read_decoder,
    read_dtype,
    read_layer_types,
)
from strobe.models.config_readers.detection import (
    DFLASH2,
    DSPARK,
    SPECULATORS,
    Dialect,
    read_head,
)
from strobe.models.config_readers.draft_vocabulary import read_draft_vocabulary
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.config_readers.mask_token import read_mask_token
from strobe.models.config_readers.target_copies import check_copies
from strobe.models.model_config import DraftConfig

QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
}
"""transformers' defaults of a decoder config, which are not written to the file."""
LLAMA: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
DEFAULTS = {"qwen3": QWEN3, "llama": LLAMA}
THETA = 10000.0
WINDOW = 4096
EPSILON = 1e-6

IGNORED_FIELDS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
"""Layer keys that older files have outside `transformer_layer_config`."""
HARMLESS = frozenset(
    {"speculators_model_type", "speculators_version", "tie_word_embeddings", "max_anchors",
     "has_no_defaults_at_init", "draft_arch", "pure_draft_prefix_len", "emb_dim", "gru_hidden_dim",
     "lambda_base_start", "lambda_base_decay_ratio", "auf"}
)  # fmt: skip
HARMLESS_OF_DECODER = frozenset(
    {"eos_token_id", "tie_word_embeddings", "use_sliding_window", "max_window_layers",
     "partial_rotary_factor", "bos_token_id", "dtype", "torch_dtype"}
)  # fmt: skip
"""Keys without effect on the drafter: the library's layers rotate whole heads, and `read_window`
reads the windows."""


def read_decoder_fields(fields: Fields) -> Fields:
    """Return `transformer_layer_config` with defaults filled in."""
    values = fields.object("transformer_layer_config")
    if not values:
        raise ValueError(
            f"{fields.path}: transformer_layer_config is missing, but must describe the drafter's "
            f"layers; {HINT}"
        )
    for key in IGNORED_FIELDS:  # older files have them there
        if (value := fields.get(key)) is not None and values.get(key) is None:
            values = {**values, key: value}
    kind = values.get("model_type", "qwen3")
    defaults = DEFAULTS.get(kind, {})
    merged = {**defaults, **{k: v for k, v in values.items() if v is not None}}
    rope = merged.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        merged["rope_parameters"] = rope["sliding_attention"]  # as in the library
    return Fields(merged, fields.path)


def read_window(fields: Fields, layers: Fields) -> int | None:
    """Read the window of sliding layers. None if the library does not apply it: if it is null, or
    for a config of Qwen3's type without `use_sliding_window`."""
    qwen3 = layers.get("model_type", "qwen3") == "qwen3"
    inner = fields.object("transformer_layer_config")
    if inner.get("sliding_window", WINDOW) is None and fields.get("sliding_window") is None:
        return None
    if qwen3 and not layers.flag("use_sliding_window"):
        return None
    return layers.integer("sliding_window", WINDOW if qwen3 else None)


def read_masks(fields: Fields, layers: Fields, dialect: Dialect) -> tuple[LayerMask, ...]:
    """Full layers see the whole block, whatever their window. Sliding layers follow
    `sliding_window_non_causal`; older files lack it, and their layers see the whole block, but for
    DSpark's, which are causal as in the library."""
    types = read_layer_types(layers)
    window = layers.get("sliding_window")
    if "sliding_attention" in types:
        window = read_window(fields, layers)
    non_causal = fields.flag("sliding_window_non_causal", dialect.method != DSPARK)
    return tuple(
        LayerMask(causal=not non_causal, window=window)
        if t == "sliding_attention" and window is not None
        else LayerMask(causal=False)
        for t in types
    )


def read_recommended(fields: Fields, drafts: int) -> int | None:
    """Read the number of tokens to draft from the first proposal method. Older exporters wrote the
    block size, so this does not tell whether the first slot predicts."""
    methods = fields.object("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else {}
    count = first.get("speculative_tokens") if isinstance(first, dict) else None
    if count is None:
        return None
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(
            f"{fields.path}: speculative_tokens is {count!r}, but must be a whole number of at "
            f"least 1; {HINT}"
        )
    return min(count, drafts)


def read_capture(fields: Fields) -> tuple[int, ...]:
    """Read which of the target's hidden states the drafter reads. Raises ValueError for none."""
    ids = fields.ids("aux_hidden_state_layer_ids")
    if not ids:
        raise ValueError(
            f"{fields.path}: aux_hidden_state_layer_ids is {ids!r}, but must list the target's "
            f"hidden states that the drafter reads; {HINT}"
        )
    return tuple(ids)


def read_head_rows(fields: Fields, dialect: Dialect, vocab_size: int) -> int | None:
    """Read the number of rows of a reduced head; None if it has all tokens. Raises ValueError for a
    reduced one of DFlash2."""
    rows = read_draft_vocabulary(fields, vocab_size, 32000)
    if rows is not None and dialect.method == DFLASH2:
        raise ValueError(
            f"{fields.path}: draft_vocab_size is {rows}, but DFlash2's candidates need the whole "
            f"vocabulary of {vocab_size}; {HINT}"
        )
    return rows


def read(
    config: dict[str, Any], path: Path, dialect: Dialect, target: Path | None = None
) -> DraftConfig:
    fields = Fields(config, path)
    for key, plain in (("projector_type", dialect.method.lower()), ("shift_label", False)):
        fields.only(key, plain, why=f"use a drafter of {dialect.method}.")
    layers = read_decoder_fields(fields)
    layers.only("hidden_act", "silu", why="use a checkpoint with hidden_act 'silu'.")
    masks = read_masks(fields, layers, dialect)
    decoder = read_decoder(
        layers,
        masks,
        theta=THETA,
        head_dim=None if layers.get("model_type") == "llama" else 128,
        drafter=True,
    )
    check_copies(layers)
    layers.finish(HARMLESS_OF_DECODER)
    capture = read_capture(fields)
    features = fields.get("target_hidden_size")
    rows = read_head_rows(fields, dialect, decoder.vocab_size)
    first = read_anchor_first(fields, dialect)
    block = fields.integer("block_size", 8, low=1 if first else 2)
    draft = DraftConfig(
        decoder=decoder,
        block_size=block,
        mask_token_id=read_mask_token(fields),
        capture=capture,
        num_target_layers=None,
        embedding_scale=1.0,
        output_multiplier=1.0,
        logit_softcap=None,
        dtype=read_dtype(fields),
        anchor_first=first,
        target_hidden_size=None if features is None else fields.integer("target_hidden_size"),
        draft_vocab_size=rows,
        recommended_drafts=read_recommended(fields, block - (not first)),
        format=SPECULATORS,
        **read_head(dialect.method, fields),
    )
    fields.finish(HARMLESS)
    return draft
