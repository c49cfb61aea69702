"""z-lab's format: fields that published drafters set are read, other methods are rejected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from strobe.attention.mask import LayerMask
from strobe.models.architectures import load_draft_config
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.model_config import DraftConfig
from tests.support.drafter_configs import QWEN3_8B_DFLASH, written

FULL = LayerMask(causal=False)


def nested(mask: int, *ids: int, **more: Any) -> dict[str, Any]:
    return {"mask_token_id": mask, "target_layer_ids": list(ids), **more}


def shape(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }


def layers(sliding: int, full: int) -> dict[str, Any]:
    types = ["sliding_attention"] * sliding + ["full_attention"] * full
    return {"num_hidden_layers": len(types), "layer_types": types}


def read(directory: Path, **changes: Any) -> DraftConfig:
    """Read the published Qwen3-8B drafter's config with changes; `...` deletes a field."""
    config = {k: v for k, v in {**QWEN3_8B_DFLASH, **changes}.items() if v is not ...}
    return load_draft_config(written(directory, config))


def test_4b_drafter_differs_from_8b_only_in_shape(tmp_path: Path):
    large = read(tmp_path)
    config = read(tmp_path, hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True)
    smaller = replace(large.decoder, hidden_size=2560, intermediate_size=9728)
    assert config == replace(large, decoder=smaller)
    assert (config.format, config.anchor_first, config.block_drafts) == ("z-lab", False, 15)
    assert (config.draft_vocab_size, config.target_hidden_size, config.recommended_drafts) == (
        None,
    ) * 3


def test_retrained_27b_masks_slide_causally(
    tmp_path: Path,
):
    config = read(
        tmp_path,
        **shape(5120, 17408, 32, 8, 128),
        **layers(5, 1),
        sliding_window=4096,
        use_sliding_window=True,
        block_size=...,
        num_target_layers=64,
        vocab_size=248320,
        dflash_config=nested(248077, 1, 10, 18, 27, 35, 44, 52, 61, block_size=12),
    )
    assert config.block_size == 12, "the nested block_size, not the default"
    assert config.capture == (2, 11, 19, 28, 36, 45, 53, 62)
    assert config.decoder.masks == (LayerMask(causal=True, window=4096),) * 5 + (FULL,)


def test_gpt_oss_drafters_use_yarn_and_fewer_ids_than_layers(tmp_path: Path):
    config = read(
        tmp_path,
        **shape(2880, 7680, 64, 8, 64),
        **layers(0, 8),
        block_size=8,
        num_target_layers=24,
        vocab_size=201088,
        rope_theta=150000,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        dflash_config=nested(200000, 1, 6, 11, 16, 21),
        model_type="gpt_oss",
        initial_context_length=4096,
    )
    rope = config.decoder.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original) == ("yarn", 150000, 32.0, 4096)
    assert not rope.truncate
    assert rope.scale == pytest.approx(1.3465736, rel=1e-6)  # 0.1 ln 32 + 1
    assert config.decoder.max_position == 32 * 4096
    assert (len(config.capture), config.decoder.num_layers, config.block_drafts) == (5, 8, 7)


def test_drafter_rope_is_its_own(tmp_path: Path):
    """Qwen3.6-35B-A3B's: yarn under an older key and an older name of its type."""
    scaling = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    changes = {**shape(2048, 6144, 32, 4, 128), **layers(0, 8), "num_target_layers": 40}
    changes |= {"rope_theta": 10000000, "vocab_size": 248320}
    changes["dflash_config"] = nested(248070, 1, 10, 19, 28, 37)
    config = read(tmp_path, **changes, rope_scaling=scaling)
    rope = config.decoder.rope
    assert (rope.kind, rope.theta, rope.factor, rope.original) == ("yarn", 1e7, 64.0, 4096)
    assert config.decoder.max_position == 262144
    carried = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    again = read(
        tmp_path,
        **changes,
        rope_scaling={**scaling, **carried, "partial_rotary_factor": 0.25},
        partial_rotary_factor=0.25,
    )
    assert again == config


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 9.0, "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 5.0}},
        {"rope_theta": ..., "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 9.0}},
        {"rope_theta": 5.0, "rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}},
        {"rope_parameters": {"full_attention": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 9.0}}},
    ],
)  # fmt: skip
def test_rope_base_precedence(tmp_path: Path, form: dict[str, Any]):
    decoder = read(tmp_path, **form).decoder
    assert decoder.rope == RopeConfig(9.0, "linear", 2.0, 40960)


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
def test_drafter_sets_its_own_rope_layout(tmp_path: Path, key: str):
    assert not read(tmp_path).decoder.rope.interleaved
    assert not read(tmp_path, **{key: True}).decoder.rope.interleaved
    assert read(tmp_path, **{key: False}).decoder.rope.interleaved
    inner = nested(151669, 1, 9, 17, 25, 33, **{key: False})
    assert read(tmp_path, dflash_config=inner).decoder.rope.interleaved


MIMO: dict[str, Any] = {
    "block_size": 8,
    "layer_types": ...,
    "num_target_layers": 70,
    "v_head_dim": 128,
    "attention_value_scale": 0.612,
    "partial_rotary_factor": 0.5,
    "dflash_config": nested(
        151669,
        *(0, 15, 31, 47, 69),
        block_size=8,
        num_anchors=4096,
        loss_decay_gamma=7.0,
        use_swa=True,
        swa_window_size=1024,
        attention_sink_bias=True,
    ),
}
"""The fields of MiMo-V2.5-Pro's drafter, except `backbone_rotary_base`, which engines interpret
differently."""
MIMO_FLASH: dict[str, Any] = {
    **shape(4096, 16384, 64, 8, 128),
    **layers(5, 0),
    "block_size": 8,
    "v_head_dim": 128,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000.0,
    "sliding_window": 1024,
    "use_sliding_window": True,
    "is_causal": False,
    "num_target_layers": 48,
    "target_hidden_size": 4096,
    "vocab_size": 152576,
    "add_swa_attention_sink_bias": True,
    "dflash_config": nested(
        151675,
        *(0, 11, 23, 35, 47),
        block_size=8,
        num_anchors=4096,
        loss_decay_gamma=7.0,
        attention_value_scale=0.612,
        attention_sink_bias=True,
    ),
}
"""The fields of MiMo-V2.6-Flash's drafter."""


def test_use_swa_slides_every_layer_in_both_directions(tmp_path: Path):
    config = read(tmp_path, **MIMO)
    assert config.decoder.masks == (LayerMask(causal=False, window=1024),) * 5
    assert (config.decoder.rope.share, config.decoder.value_scale) == (0.5, 0.612)
    assert config.decoder.sinks
    assert config.capture == (1, 16, 32, 48, 70)
    assert read(tmp_path, **{**MIMO, "is_causal": True}).decoder.masks[0].causal
    older = nested(151669, 0, 15, 31, 47, 69, use_swa=True)
    masks = read(tmp_path, **{**MIMO, "dflash_config": older, "sliding_window": 512}).decoder.masks
    assert masks == (LayerMask(causal=False, window=512),) * 5


def test_later_mimo_drafters_slide_by_layer_type(tmp_path: Path):
    config = read(tmp_path, **MIMO_FLASH)
    assert config.decoder.masks == (LayerMask(causal=False, window=1024),) * 5
    assert (config.decoder.rope, config.decoder.value_scale) == (
        RopeConfig(10000.0, share=0.5),
        0.612,
    )
    assert config.decoder.sinks
    assert (config.capture, config.mask_token_id) == ((1, 12, 24, 36, 48), 151675)


SWA_SINKS, FULL_SINKS = "add_swa_attention_sink_bias", "add_full_attention_sink_bias"
SLIDING_AND_FULL = {**layers(4, 1), "sliding_window": 2048, "use_sliding_window": True}
SINKS: dict[str, tuple[dict[str, Any], bool]] = {
    "none": ({}, False),
    "at the top": ({"attention_sink_bias": True}, True),
    "a target's, of layers that the drafter has not": ({SWA_SINKS: True, FULL_SINKS: False}, False),
    "of full layers": ({FULL_SINKS: True}, True),
    "of every kind of layer": ({**SLIDING_AND_FULL, SWA_SINKS: True, FULL_SINKS: True}, True),
    "of all layers, whatever the target's": (
        {**SLIDING_AND_FULL, SWA_SINKS: True, "attention_sink_bias": True},
        True,
    ),
    "of no layer, whatever the target's": (
        {**SLIDING_AND_FULL, SWA_SINKS: True, "attention_sink_bias": False},
        False,
    ),
}


@pytest.mark.parametrize("name", SINKS)
def test_sinks_apply_to_all_layers_or_by_layer_type(tmp_path: Path, name: str):
    changes, expected = SINKS[name]
    assert read(tmp_path, **changes).decoder.sinks is expected


def test_gemma_drafters_cap_logits_and_scale_embeddings(tmp_path: Path):
    changes = {
        **shape(5376, 10752, 64, 8, 128),
        **layers(4, 1),
        "sliding_window": 2048,
        "num_target_layers": 60,
        "vocab_size": 262144,
        "final_logit_softcapping": 30.0,
        "dflash_config": nested(4, 1, 12, 23, 35, 46, 57),
    }
    config = read(tmp_path, **changes)
    assert (config.logit_softcap, config.mask_token_id, len(config.capture)) == (30.0, 4, 6)
    assert config.embedding_scale is None, "the target's, known once both are loaded"
    assert read(tmp_path, **changes, input_embedding_scale=1.0).embedding_scale == 1.0
    assert read(tmp_path, final_logit_softcapping=0).logit_softcap is None


INNER = nested(151669, 1, 9, 17, 25, 33)
PLACED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block_size": ({"block_size": 12}, {}),
    "mask_token_id": ({"mask_token_id": 7}, {}),
    "target_layer_ids": ({"target_layer_ids": [3, 5]}, {}),
    "num_target_layers": ({"num_target_layers": 40}, {}),
    "target_hidden_size": ({"target_hidden_size": 2560}, {}),
    "layer_types": (
        {"layer_types": SLIDING_AND_FULL["layer_types"]},
        {"sliding_window": 2048, "use_sliding_window": True},
    ),
    "use_sliding_window": ({"use_sliding_window": False}, SLIDING_AND_FULL),
    "sliding_window": ({"sliding_window": 512}, SLIDING_AND_FULL),
    "is_causal": ({"is_causal": False}, SLIDING_AND_FULL),
    "is_causal, true": ({"is_causal": True}, {}),
    "causal": ({"causal": False}, SLIDING_AND_FULL),
    "use_swa": ({"use_swa": True}, {"sliding_window": 512}),
    "swa_window_size": ({"swa_window_size": 256}, {"use_swa": True, "sliding_window": 512}),
    "input_embedding_scale": ({"input_embedding_scale": 0.5}, {}),
    "output_multiplier": ({"output_multiplier": 0.7}, {}),
    "final_logit_softcapping": ({"final_logit_softcapping": 30.0}, {}),
    "attention_value_scale": ({"attention_value_scale": 0.612}, {}),
    "attention_sink_bias": ({"attention_sink_bias": True}, {}),
    "add_full_attention_sink_bias": ({FULL_SINKS: True}, {}),
    "add_swa_attention_sink_bias": ({SWA_SINKS: True}, SLIDING_AND_FULL | layers(5, 0)),
    "attention_bias": ({"attention_bias": True}, {}),
    "is_neox_style": ({"is_neox_style": False}, {}),
    "rope_is_neox_style": ({"rope_is_neox_style": False}, {}),
    "rope_theta": ({"rope_theta": 10000.0}, {}),
    "rope_scaling": ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {}),
    "rope_parameters": ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, {}),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, {"attention_sink_bias": True}),
    "max_position_embeddings": ({"max_position_embeddings": 4096}, {}),
}
"""Each key with a value that has an effect, and the top-level fields that this effect needs."""


@pytest.mark.parametrize("name", PLACED)
def test_keys_are_equal_at_top_level_and_in_dflash_config(tmp_path: Path, name: str):
    key, needed = PLACED[name]
    outer = {k: v for k, v in INNER.items() if k not in key}
    absent = dict.fromkeys(key, ...)
    config = read(tmp_path, **{**needed, **key}, dflash_config=outer)
    assert read(tmp_path, **{**needed, **absent}, dflash_config={**outer, **key}) == config
    null = dict.fromkeys(key)
    assert read(tmp_path, **{**needed, **key}, dflash_config={**outer, **null}) == config
    assert read(tmp_path, **needed) != config


@pytest.mark.parametrize("absent", [..., None])
def test_missing_key_takes_the_format_default(tmp_path: Path, absent: Any):
    names = ("block_size", "rope_theta", "layer_types", "use_sliding_window", "sliding_window")
    config = read(tmp_path, **dict.fromkeys(names, absent))
    assert (config.block_size, config.block_drafts) == (16, 15)
    assert config.decoder.rope == RopeConfig(1e6)
    assert config.decoder.masks == (FULL,) * 5
    scales = (config.output_multiplier, config.embedding_scale, config.decoder.value_scale)
    assert scales == (1.0, None, 1.0)
    assert (config.logit_softcap, config.decoder.sinks) == (None, False)


def test_default_capture_layers(tmp_path: Path):
    bare = {"mask_token_id": 151669}
    assert read(tmp_path, dflash_config=bare).capture == (2, 10, 18, 26, 34)
    with pytest.raises(ValueError, match="target_layer_ids is None"):
        read(tmp_path, dflash_config=bare, num_target_layers=...)


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "DFlash2 without its keys": (
        {"architectures": ["DFlash2DraftModel"]},
        "conv_kernel_size is None, but must be a whole number",
    ),
    "DFlash2 by its keys": (
        {"dflash_config": nested(7, 1, selector_rank=256, conv_kernel_size=2)},
        "conv_group_size is None, but must be a whole number",
    ),
    "Domino": (
        {"dflash_config": nested(7, 1, projector_type="domino")},
        "a drafter for Domino",
    ),
    "DFlare": ({"architectures": ["DFlareDraftModel"]}, "a drafter for DFlare"),
    "Muse-Glimmer": (
        {
            "architectures": ["MuseGlimmerAssistantModel"],
            "model_type": "muse_glimmer_assistant",
            "dflash_config": ...,
        },
        "a drafter for the Muse-Glimmer assistant",
    ),
    "DSpark without its keys": (
        {"architectures": ["DSparkDraftModel"]},
        "markov_rank is None, but must be a whole number",
    ),
    "EAGLE-3": (
        {"architectures": ["LlamaForCausalLMEagle3"], "dflash_config": ...},
        "a drafter for EAGLE-3",
    ),
    "MTP": (
        {"architectures": ["Qwen3NextMTP"], "dflash_config": ...},
        "a drafter for MTP",
    ),
    "a target": (
        {"architectures": ["Qwen3ForCausalLM"], "dflash_config": ...},
        r"\['Qwen3ForCausalLM'\] is not a drafter for DFlash, DFlash2 or DSpark",
    ),
    "sinks in some layers": (
        {**SLIDING_AND_FULL, SWA_SINKS: True},
        "add_swa_attention_sink_bias is True and add_full_attention_sink_bias False",
    ),
    "sinks that are no flag": ({"attention_sink_bias": 2}, "attention_sink_bias is 2"),
    "another base for the context": (
        {**MIMO, "dflash_config": {**MIMO["dflash_config"], "backbone_rotary_base": 5000000}},
        r"backbone_rotary_base is 5000000, but .* mask_embedding\.pt .* are not supported",
    ),
    "anchors where DeepSpec has them": ({"num_anchors": 512}, "num_anchors is 512"),
    "first slot": ({"sample_from_anchor": True}, "sample_from_anchor is True"),
    "values of another width": ({"v_head_dim": 64}, "v_head_dim is 64"),
    "a rotary share that splits no head": (
        {**MIMO, "partial_rotary_factor": 1.5},
        "partial_rotary_factor is 1.5",
    ),
    "ropes that differ": (
        {
            **SLIDING_AND_FULL,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 1e4},
                "full_attention": {"rope_theta": 1e6},
            },
        },
        "rope_parameters differ between layer types",
    ),
    "quantized": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
        r"weight_block_size is \[128\], but must be two whole numbers of at least 1",
    ),
    "unknown key": ({"gated_attention": True}, "gated_attention is True, which is not known"),
    "unknown nested key": (
        {"dflash_config": nested(7, 1, shift_label=True)},
        "shift_label is True, which is not supported for DFlash in z-lab's format",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_non_plain_dflash_is_rejected_by_name(tmp_path: Path, name: str):
    changes, message = REJECTED[name]
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, **changes)
    assert str(tmp_path / "config.json") in str(caught.value)


def test_unknown_neutral_key_is_accepted(tmp_path: Path):
    assert read(tmp_path, gated_attention=False, experts=None) == read(tmp_path)


def test_nemo_drafter_reads_as_z_lab(tmp_path: Path):
    config = read(tmp_path, architectures=["Qwen3DFlashDraftModel"])
    assert config == read(tmp_path)


def test_mask_token_embedding_file_is_rejected(tmp_path: Path):
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(ValueError, match=r"mask_embedding\.pt replaces the embedding"):
        read(tmp_path)


def target_with(directory: Path, tokens: list[str], mask: Any = None) -> Path:
    directory.mkdir()
    words = {token: i for i, token in enumerate(tokens)}
    Tokenizer(models.WordLevel(words, unk_token=tokens[0])).save(str(directory / "tokenizer.json"))
    return written(directory, {"mask_token": mask}, "tokenizer_config.json")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mask_token_id": 5, "ptd_token_id": 6}, 5),
        ({"dspark_noise_token_id": 7, "pard_token": 8}, 7),
        ({"ptd_token_id": 9}, 9),
        ({"mask_token_id": 0}, 0),
    ],
)
def test_mask_token_key_aliases(tmp_path: Path, keys: dict[str, int], expected: int):
    flat = {"dflash_config": ..., "target_layer_ids": [1, 9, 17, 25, 33]}
    assert read(tmp_path, **flat, **keys).mask_token_id == expected


@pytest.mark.parametrize(
    ("tokens", "mask", "expected"),
    [
        (["a", "<m>", "b"], "<m>", 1),
        (["a", "<m>", "b"], {"content": "<m>", "special": True}, 1),
        (["a", "<m>", "b"], None, 3),
        (["a", "b"], "<|MASK|>", 2),
    ],
)
def test_older_drafters_take_mask_token_from_tokenizer(
    tmp_path: Path, tokens: list[str], mask: Any, expected: int
):
    target = target_with(tmp_path / "target", tokens, mask)
    inner = {"target_layer_ids": [1, 9, 17, 25, 33]}
    path = written(tmp_path, {**QWEN3_8B_DFLASH, "dflash_config": inner, "vocab_size": 4})
    assert load_draft_config(path, target).mask_token_id == expected
    written(path, {**QWEN3_8B_DFLASH, "dflash_config": {**inner, "mask_token_id": 0}})
    assert load_draft_config(path, target).mask_token_id == 0, "the drafter's config has precedence"


def test_full_embedding_has_no_row_for_the_mask_token(tmp_path: Path):
    target = target_with(tmp_path / "target", ["a", "b", "c"])
    inner = {"target_layer_ids": [1]}
    path = written(tmp_path, {**QWEN3_8B_DFLASH, "dflash_config": inner, "vocab_size": 3})
    with pytest.raises(ValueError, match="uses all 3 rows"):
        load_draft_config(path, target)
