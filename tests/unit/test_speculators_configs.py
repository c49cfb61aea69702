"""The formats of speculators and DeepSpec, and known errors in configs that their tools wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strobe.attention.mask import LayerMask
from strobe.models.architectures import load_draft_config
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.model_config import DraftConfig
from tests.support.drafter_configs import QWEN3_8B_DFLASH, QWEN36_35B_SPECULATORS, written

FULL = LayerMask(causal=False)
METHODS = QWEN36_35B_SPECULATORS["speculators_config"]["proposal_methods"]


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return config with changes; `...` deletes a field."""
    return {k: v for k, v in {**config, **changes}.items() if v is not ...}


def read(directory: Path, layers: dict[str, Any] | None = None, **changes: Any) -> DraftConfig:
    """Read the published export's config with changes, also of its layers."""
    config = changed(QWEN36_35B_SPECULATORS, changes)
    if "transformer_layer_config" not in changes:
        inner = changed(config["transformer_layer_config"], layers or {})
        config["transformer_layer_config"] = inner
    return load_draft_config(written(directory, config))


def test_published_export_matches_original_drafter(tmp_path: Path):
    config = read(tmp_path)
    original = load_draft_config(
        written(
            tmp_path / "original",
            {
                **QWEN3_8B_DFLASH,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_key_value_heads": 4,
                "num_hidden_layers": 8,
                "layer_types": ["full_attention"] * 8,
                "num_target_layers": 40,
                "vocab_size": 248320,
                "rope_theta": 10000000,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 64.0,
                    "original_max_position_embeddings": 4096,
                },
                "dflash_config": {
                    "mask_token_id": 248070,
                    "target_layer_ids": [1, 10, 19, 28, 37],
                },
            },
        )
    )
    assert config.capture == (2, 11, 20, 29, 38) == original.capture
    assert config.capture_ids == (2, 11, 20, 29, 38), "as the file counts"
    assert original.capture_ids == (1, 10, 19, 28, 37)
    assert config == replace(
        original,
        num_target_layers=None,
        embedding_scale=1.0,
        recommended_drafts=15,
        format="speculators",
    )


def test_training_leftovers_in_llama_config_are_ignored(tmp_path: Path):
    """Windows on full layers, a partial rotary factor, sections of multimodal rope."""
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    plain = {
        "model_type": "llama",
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "rope_parameters": rope,
    }
    expected = read(tmp_path, plain)
    assert expected.decoder.rope == RopeConfig(10000.0)
    assert expected.decoder.qk_norm, "queries and keys have norms for every model type"
    assert expected.decoder.head_dim == 256
    carried = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    leftovers = {
        "sliding_window": 2048,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {**rope, **carried, "partial_rotary_factor": 0.25},
    }
    assert read(tmp_path, {**plain, **leftovers}) == expected
    about = {**QWEN36_35B_SPECULATORS["speculators_config"], "verifier": {"architectures": []}}
    assert read(tmp_path, plain, speculators_config=about) == expected


@pytest.mark.parametrize(
    ("both_ways", "causal"), [(True, False), (False, True), (..., False), (None, False)]
)
def test_sliding_layers_are_causal_only_when_configured(
    tmp_path: Path, both_ways: Any, causal: bool
):
    types = ["sliding_attention"] * 7 + ["full_attention"]
    layers = {"layer_types": types, "sliding_window": 2048, "use_sliding_window": True}
    config = read(tmp_path, layers, sliding_window_non_causal=both_ways)
    assert config.decoder.masks == (LayerMask(causal=causal, window=2048),) * 7 + (FULL,)
    assert read(tmp_path, sliding_window_non_causal=both_ways).decoder.masks == (FULL,) * 8


def test_older_files_keep_windows_outside_layers(tmp_path: Path):
    types = ["sliding_attention"] * 7 + ["full_attention"]
    outer: dict[str, Any] = {"layer_types": types, "sliding_window": 2048}
    outer["use_sliding_window"] = True
    without: dict[str, Any] = dict.fromkeys([*outer, "max_window_layers"], ...)
    outer |= {"max_window_layers": 8, "sliding_window_non_causal": True}
    config = read(tmp_path, without, **outer)
    assert config.decoder.masks == (LayerMask(causal=False, window=2048),) * 7 + (FULL,)
    config = read(tmp_path, without | {"sliding_window": 512}, **outer)
    assert config.decoder.masks[0].window == 512


@pytest.mark.parametrize(
    ("kind", "window", "used", "read_as"),
    [
        ("qwen3", 2048, False, None),
        ("qwen3", 2048, ..., None),
        ("qwen3", None, True, None),
        ("qwen3", ..., True, 4096),
        ("llama", 2048, False, 2048),
        ("llama", None, True, None),
    ],
)
def test_sliding_window_follows_the_library(
    tmp_path: Path, kind: str, window: Any, used: Any, read_as: int | None
):
    """The library's Qwen3 configs have a window only if use_sliding_window is set, by default of
    4,096; layers without a window attend to everything."""
    layers = {"layer_types": ["sliding_attention"] * 8, "model_type": kind}
    layers |= {"sliding_window": window, "use_sliding_window": used}
    mask = FULL if read_as is None else LayerMask(causal=True, window=read_as)
    assert read(tmp_path, layers, sliding_window_non_causal=False).decoder.masks == (mask,) * 8


def test_sliding_layer_rope_is_used_among_several(tmp_path: Path):
    ropes = {"sliding_attention": {"rope_theta": 5.0}, "full_attention": {"rope_theta": 7.0}}
    assert read(tmp_path, {"rope_parameters": ropes}).decoder.rope == RopeConfig(5.0)


def test_sparse_older_file_gets_library_defaults(tmp_path: Path):
    config = load_draft_config(
        written(
            tmp_path,
            {
                "speculators_config": {"algorithm": "dflash"},
                "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
                "mask_token_id": 151669,
                "transformer_layer_config": {
                    "hidden_size": 4096,
                    "num_hidden_layers": 5,
                    "num_key_value_heads": 8,
                },
            },
        )
    )
    decoder = config.decoder
    assert (config.block_size, config.draft_vocab_size, config.recommended_drafts) == (
        8,
        32000,
        None,
    )
    assert (decoder.head_dim, decoder.num_heads, decoder.num_kv_heads) == (128, 32, 8)
    assert (decoder.intermediate_size, decoder.vocab_size) == (22016, 151936)
    assert (decoder.rope, decoder.rms_norm_eps) == (RopeConfig(10000.0), 1e-6)
    assert decoder.masks == (FULL,) * 5


def test_llama_head_dim_defaults_to_hidden_size_over_heads(tmp_path: Path):
    layers = {"model_type": "llama", "head_dim": ..., "num_key_value_heads": ...}
    decoder = read(tmp_path, layers).decoder
    assert (decoder.head_dim, decoder.num_kv_heads) == (2048 // 32, 32)
    assert read(tmp_path, {"head_dim": ...}).decoder.head_dim == 128


@pytest.mark.parametrize(
    ("block", "named", "anchor", "drafts", "recommended"),
    [
        (8, 7, ..., 7, 7),
        (8, 8, ..., 7, 7),
        (8, 8, False, 7, 7),
        (8, 8, True, 8, 8),
        (8, 3, ..., 7, 3),
    ],
)
def test_anchor_first_flag_decides_first_slot_prediction(
    tmp_path: Path, block: int, named: int, anchor: Any, drafts: int, recommended: int
):
    about = {"algorithm": "dflash", "proposal_methods": [{**METHODS[0]}]}
    about["proposal_methods"][0]["speculative_tokens"] = named
    config = read(tmp_path, block_size=block, sample_from_anchor=anchor, speculators_config=about)
    assert (config.block_drafts, config.recommended_drafts) == (drafts, recommended)
    assert config.anchor_first == (anchor is True)


REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "EAGLE-3": ({"speculators_model_type": "eagle3"}, {}, "a drafter for EAGLE-3"),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, {}, "a drafter for P-EAGLE"),
    "MTP": ({"speculators_model_type": "mtp"}, {}, "a drafter for MTP"),
    "DSpark without its keys": ({"speculators_model_type": "dspark"}, {}, "markov_rank is None"),
    "DFlash2 without its keys": (
        {"speculators_model_type": "dflash2"},
        {},
        "conv_kernel_size is None",
    ),
    "Domino": ({"speculators_model_type": "domino"}, {}, "a drafter for Domino"),
    "unknown method": ({"speculators_model_type": "later"}, {}, "a drafter for later"),
    "EAGLE-3, an older file": (
        {"speculators_model_type": ..., "speculators_config": {"algorithm": "eagle3"}},
        {},
        "a drafter for EAGLE-3",
    ),
    "no layers": ({"transformer_layer_config": ...}, {}, "transformer_layer_config is missing"),
    "no ids": ({"aux_hidden_state_layer_ids": ...}, {}, "aux_hidden_state_layer_ids is None"),
    "no mask token": ({"mask_token_id": None}, {}, "mask_token_id is None"),
    "a larger head": (
        {"draft_vocab_size": 248321},
        {},
        "draft_vocab_size is 248321, but the vocabulary has 248320",
    ),
    "tokens": (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
        {},
        "speculative_tokens is 0",
    ),
    "unknown key": ({"norm_before_fc": True}, {}, "norm_before_fc is True, which is not known"),
    "unknown key of layers": ({}, {"qk_scale": 2}, "qk_scale is 2, which is not known"),
    "no window": (
        {},
        {"model_type": "llama", "layer_types": ["sliding_attention"] * 8, "sliding_window": ...},
        "sliding_window is None",
    ),
    "activation": ({}, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_other_speculators_methods_are_rejected_by_name(tmp_path: Path, name: str):
    changes, layers, message = REJECTED[name]
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, layers, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


DEEPSPEC: dict[str, Any] = {
    **{k: v for k, v in QWEN3_8B_DFLASH.items() if k not in ("dflash_config", "auto_map")},
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 151669,
    "num_anchors": 512,
    "markov_rank": 0,
    "enable_confidence_head": False,
}
"""A drafter without extra heads: Qwen3-8B's config with DeepSpec's keys added."""


@pytest.mark.parametrize("names", [["Qwen3DSparkModel"], None])
def test_deepspec_blocks_predict_from_their_first_slot(tmp_path: Path, names: Any):
    config = load_draft_config(written(tmp_path, {**DEEPSPEC, "architectures": names}))
    assert (config.format, config.anchor_first, config.block_size, config.block_drafts) == (
        "DeepSpec",
        True,
        7,
        7,
    )
    assert config.capture == (2, 10, 18, 26, 34)
    assert config.embedding_scale == 1.0, "it has an embedding of its own"
    scaled = load_draft_config(written(tmp_path, {**DEEPSPEC, "input_embedding_scale": 2.0}))
    assert scaled.embedding_scale == 2.0
