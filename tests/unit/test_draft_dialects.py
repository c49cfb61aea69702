"""Dialects of drafters' configs: told apart by keys, read with their defaults, and rejected by the
name of their method or by what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.config_readers.detection import detect
from strobe.models.config_readers.target_copies import MEANINGLESS
from strobe.models.model_config import DraftConfig
from tests.support.drafter_configs import QWEN3_8B_DFLASH, QWEN36_35B_SPECULATORS, written
from tests.support.published_configs import published

QWEN3_8B: dict[str, Any] = published("targets", "Qwen__Qwen3-8B")["config"]
IDS = [1, 9, 17, 25, 33]
LAYERS = {k: v for k, v in QWEN3_8B_DFLASH.items() if k not in ("dflash_config", "auto_map")}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
TAPS = {"mask_token_id": 151669, "target_layer_ids": IDS}

FLAT: dict[str, Any] = {
    **LAYERS,
    **MARKOV,
    **TAPS,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "num_anchors": 512,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""DeepSpec's."""
NESTED: dict[str, Any] = {
    **LAYERS,
    "architectures": ["DSparkDraftModel"],
    "block_size": 7,
    "dflash_config": {
        **MARKOV,
        **TAPS,
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "enable_confidence_head": True,
    },
}
"""SpecForge's."""
MODELOPT: dict[str, Any] = {
    **{k: v for k, v in LAYERS.items() if k not in ("block_size", "num_target_layers")},
    "architectures": ["Qwen3DSparkModel"],
    "attention_sink_bias": True,
    "dspark_bonus_anchor": True,
    "dspark_markov_rank": 8,
    "markov_rank": 8,
    "sample_from_anchor": False,
    "dflash_query_causal": True,
    "dflash_config": {
        **TAPS,
        "block_size": 8,
        "num_target_layers": 36,
        "use_confidence_head": False,
        "use_swa": True,
        "swa_window_size": 1024,
        "causal": True,
        "attention_sink_bias": True,
        "sample_from_anchor": False,
    },
}
"""ModelOpt's, with all keys of Nemotron's drafter."""
SPECULATORS: dict[str, Any] = {
    **QWEN36_35B_SPECULATORS,
    **MARKOV,
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "speculators_config": {"algorithm": "dspark"},
}
LABELLED_DFLASH: dict[str, Any] = {**LAYERS, **MARKOV, **TAPS, "block_size": 16}
"""DFlash's label and layout with a Markov head."""
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 8,
    "selector_top_k": 16,
}
DIALECTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "flat": (FLAT, "DSpark", "DeepSpec"),
    "flat without a label": ({**FLAT, "architectures": None}, "DSpark", "DeepSpec"),
    "flat under DFlash's label": (
        {**FLAT, "architectures": ["DFlashDraftModel"], "dflash_config": {**TAPS, **MARKOV}},
        "DSpark",
        "DeepSpec",
    ),
    "nested": (NESTED, "DSpark", "SpecForge"),
    "nested under DeepSpec's label": (
        {**NESTED, "architectures": ["Qwen3DSparkModel"], "markov_rank": 8},
        "DSpark",
        "SpecForge",
    ),
    "nested under DFlash's label": (
        {**NESTED, "architectures": ["DFlashDraftModel"]},
        "DSpark",
        "SpecForge",
    ),
    "ModelOpt's": (MODELOPT, "DSpark", "ModelOpt"),
    "speculators'": (SPECULATORS, "DSpark", "speculators"),
    "speculators' under vLLM's label": (
        {**SPECULATORS, "architectures": ["Qwen3DSparkModel"]},
        "DSpark",
        "speculators",
    ),
    "DFlash's label with a Markov head": (LABELLED_DFLASH, "DSpark", "z-lab"),
    "flat without heads": (
        {**FLAT, "markov_rank": 0, "enable_confidence_head": False},
        "DFlash",
        "DeepSpec",
    ),
    "nested without heads": (
        {**NESTED, "dflash_config": {**TAPS, "projector_type": "dspark", "markov_rank": 0}},
        "DFlash",
        "SpecForge",
    ),
    "DFlash": (QWEN3_8B_DFLASH, "DFlash", "z-lab"),
    "DFlash2": ({**LAYERS, "dflash_config": {**TAPS, **SELECTOR}}, "DFlash2", "z-lab"),
    "DFlash2, flat": (
        {**LAYERS, **TAPS, **SELECTOR, "architectures": ["Qwen3DFlash2Model"]},
        "DFlash2",
        "z-lab",
    ),
    "DFlash2 under DFlash's label": ({**LAYERS, **TAPS, **SELECTOR}, "DFlash2", "z-lab"),
    "DFlash2 without a label": (
        {**LAYERS, **TAPS, **SELECTOR, "architectures": None},
        "DFlash2",
        "z-lab",
    ),
    "flat under a target's label": (
        {**FLAT, "architectures": ["Qwen3ForCausalLM"]},
        "DSpark",
        "DeepSpec",
    ),
    "DFlash2 under a target's label": (
        {**LAYERS, **TAPS, **SELECTOR, "architectures": ["Qwen3ForCausalLM"]},
        "DFlash2",
        "z-lab",
    ),
    "DFlash, flat under a target's label": (
        {**LAYERS, **TAPS, "architectures": ["LlamaForCausalLM"]},
        "DFlash",
        "z-lab",
    ),
    "DFlash, flat without a label": ({**LAYERS, **TAPS, "architectures": None}, "DFlash", "z-lab"),
    "DFlash2, speculators'": (
        {**SPECULATORS, **SELECTOR, "speculators_model_type": "dflash2", **dict.fromkeys(MARKOV)},
        "DFlash2",
        "speculators",
    ),
}


def read(directory: Path, config: dict[str, Any], **changes: Any) -> DraftConfig:
    values = {k: v for k, v in {**config, **changes}.items() if v is not ...}
    return load_draft_config(written(directory, values))


@pytest.mark.parametrize("name", DIALECTS)
def test_dialect_is_told_by_keys_and_not_by_label(name: str):
    config, method, form = DIALECTS[name]
    dialect = detect(config)
    assert dialect is not None
    assert (dialect.method, dialect.format) == (method, form)


@pytest.mark.parametrize("name", DIALECTS)
def test_dialect_is_read(tmp_path: Path, name: str):
    config, method, form = DIALECTS[name]
    extra = {"sample_from_anchor": True} if config is LABELLED_DFLASH else {}
    draft = read(tmp_path, config, **extra)
    assert (draft.method, draft.format) == (method, form)
    if form != "speculators":
        assert draft.capture == (2, 10, 18, 26, 34)
        assert draft.mask_token_id == 151669
    if method == "DSpark":
        assert (draft.head.rank, draft.head.kind) == (8, "vanilla")
    if method == "DFlash2":
        assert (draft.head.selector_rank, draft.head.selector_top_k) == (8, 16)


def test_flat_nested_and_relabelled_files_say_the_same(tmp_path: Path):
    nested = read(tmp_path, NESTED)
    assert read(tmp_path, NESTED, architectures=["Qwen3DSparkModel"]) == nested
    flat = read(tmp_path, FLAT, confidence_head_with_markov=False)
    assert (flat.decoder, flat.head, flat.capture) == (nested.decoder, nested.head, nested.capture)
    assert (flat.embedding_scale, nested.embedding_scale) == (1.0, None)


ANCHOR_KEYS = ("sample_from_anchor", "dspark_bonus_anchor", "shift_label")
DEFAULTS: dict[str, bool | None] = {
    "flat": True,
    "flat without a label": True,
    "flat under a target's label": True,
    "flat under DFlash's label": True,
    "flat without heads": True,
    "nested": True,
    "nested under DeepSpec's label": True,
    "nested under DFlash's label": True,
    "nested without heads": True,
    "ModelOpt's": True,
    "speculators'": False,
    "speculators' under vLLM's label": False,
    "DFlash's label with a Markov head": None,
}
"""Of `sample_from_anchor` in each dialect of DSpark's family; None where a file must say it."""


def silent(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without any key that says whether the anchor predicts."""
    flat = {key: value for key, value in config.items() if key not in ANCHOR_KEYS}
    inner = config.get("dflash_config")
    return flat if inner is None else {**flat, "dflash_config": silent(inner)}


def explicit(config: dict[str, Any], value: bool) -> list[dict[str, Any]]:
    """Return the config with `sample_from_anchor` at the top level, in `dflash_config`, in both,
    and in the words of its opposite."""
    plain = silent(config)
    told = {"sample_from_anchor": value}
    configs = [{**plain, **told}, {**plain, "dspark_bonus_anchor": not value}]
    inner = plain.get("dflash_config")
    if inner is not None:
        nested = {**plain, "dflash_config": {**inner, **told}}
        configs += [nested, {**nested, **told}]
    return configs


def test_every_dialect_of_dspark_has_a_default_layout():
    family = {name for name, about in DIALECTS.items() if about[1] == "DSpark"}
    assert family <= DEFAULTS.keys()


@pytest.mark.parametrize("name", DEFAULTS)
def test_sample_from_anchor_has_each_dialects_default(tmp_path: Path, name: str):
    config = silent(DIALECTS[name][0])
    default = DEFAULTS[name]
    if default is None:
        with pytest.raises(ValueError, match="sample_from_anchor does not say whether"):
            read(tmp_path, config)
        return
    draft = read(tmp_path, config)
    assert draft.anchor_first is default
    assert draft.block_drafts == draft.block_size - (not default)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("name", DEFAULTS)
def test_sample_from_anchor_overrides_each_dialects_default(tmp_path: Path, name: str, value: bool):
    for config in explicit(DIALECTS[name][0], value):
        draft = read(tmp_path, config)
        assert draft.anchor_first is value
        assert draft.block_drafts == draft.block_size - (not value)


def test_sample_from_anchor_at_both_levels_must_agree(tmp_path: Path):
    config = silent(NESTED)
    config["dflash_config"]["sample_from_anchor"] = False
    with pytest.raises(ValueError, match="sample_from_anchor"):
        read(tmp_path, config, sample_from_anchor=True)


def test_shifted_labels_mean_that_the_anchor_predicts(tmp_path: Path):
    config = silent(MODELOPT)
    for shifted in (True, False):
        config["dflash_config"]["shift_label"] = shifted
        assert read(tmp_path, config).anchor_first is shifted


def test_modelopt_blocks_slide_with_sinks(tmp_path: Path):
    draft = read(tmp_path, MODELOPT)
    assert {(mask.causal, mask.window) for mask in draft.decoder.masks} == {(True, 1024)}
    assert draft.decoder.sinks
    assert not draft.head.confidence
    assert (draft.block_size, draft.num_target_layers) == (8, 36)


def test_speculators_dspark_slides_causally_unless_told(tmp_path: Path):
    layers = {**SPECULATORS["transformer_layer_config"], "use_sliding_window": True}
    layers |= {"layer_types": ["sliding_attention"] * 8, "sliding_window": 64}
    for said, causal in ((..., True), (False, True), (True, False)):
        draft = read(
            tmp_path,
            SPECULATORS,
            transformer_layer_config=layers,
            sliding_window_non_causal=said,
        )
        assert {mask.causal for mask in draft.decoder.masks} == {causal}


@pytest.mark.parametrize("key", MEANINGLESS)
def test_keys_of_a_target_mean_nothing_in_a_drafter(tmp_path: Path, key: str):
    values: dict[str, Any] = {
        "attn_output_gate": True,
        "output_gate_type": "swish",
        "mamba_ssm_dtype": "float32",
        "mtp_use_dedicated_embeddings": True,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
        "target_model_type": "qwen3_5",
    }
    for config in (FLAT, QWEN3_8B_DFLASH):
        assert read(tmp_path, config, **{key: values.get(key, 4)}) == read(tmp_path, config)


def test_drafters_of_hybrid_targets_rotate_whole_heads(tmp_path: Path):
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    rope |= {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    changes = {"rope_theta": ..., "rope_scaling": ..., "rope_parameters": rope}
    draft = read(tmp_path, FLAT, **changes, partial_rotary_factor=0.25, model_type="qwen3_5_text")
    assert draft.decoder.rope.share == 1.0
    assert draft.decoder.rope.theta == 1e7


def test_initial_context_length_must_repeat_rope_scaling(tmp_path: Path):
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    config = {**QWEN3_8B_DFLASH, "rope_scaling": scaling}
    assert read(tmp_path, config, initial_context_length=4096) == read(tmp_path, config)
    with pytest.raises(ValueError, match=r"initial_context_length is 8192, but .* 4096"):
        read(tmp_path, config, initial_context_length=8192)


def nested(**changes: Any) -> dict[str, Any]:
    return {**NESTED, "dflash_config": {**NESTED["dflash_config"], **changes}}


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "layouts": (
        {**FLAT, "sample_from_anchor": True, "dspark_bonus_anchor": True},
        "sample_from_anchor is True, dspark_bonus_anchor is True, which contradict each other",
    ),
    "labels": (
        {**nested(shift_label=False), "sample_from_anchor": True},
        "sample_from_anchor is True, shift_label is False, which contradict each other",
    ),
    "ranks": (
        {**NESTED, "markov_rank": 16},
        "markov_rank is 16, but 8 in dflash_config",
    ),
    "ranks of DFlash2": (
        {**LAYERS, "selector_rank": 16, "dflash_config": {**TAPS, **SELECTOR}},
        "selector_rank is 16, but 8 in dflash_config",
    ),
    "groups of DFlash2": (
        {**LAYERS, "conv_group_size": 8, "dflash_config": {**TAPS, **SELECTOR}},
        "conv_group_size is 8, but 16 in dflash_config",
    ),
    "the mask token's id": (
        {**FLAT, "mask_token_id": 151936},
        "mask_token_id is 151936, but the vocabulary has ids 0 to 151935",
    ),
    "the target's layers": (
        {**FLAT, "num_target_layers": 33},
        "target_layer_ids holds 33, but num_target_layers is 33",
    ),
    "names of the rank": ({**FLAT, "dspark_markov_rank": 16}, "dspark_markov_rank is 16"),
    "masks": ({**nested(), "mask_token_id": 5}, "mask_token_id is 5, but 151669 in dflash_config"),
    "captured layers": (
        {**FLAT, "dspark_target_layer_ids": [1]},
        r"target_layer_ids is \[1, 9, 17, 25, 33\], but dspark_target_layer_ids names other",
    ),
    "confidence": (
        nested(use_confidence_head=False),
        "enable_confidence_head True and use_confidence_head False contradict",
    ),
    "attention": (nested(attention_mode="mha"), "num_key_value_heads is 8"),
    "another attention": (nested(attention_mode="mla"), "attention_mode is 'mla'"),
    "causality": (
        {**MODELOPT, "dflash_query_causal": False},
        "dflash_query_causal is False, which is not supported; causal is True",
    ),
    "an unclear layout": (
        LABELLED_DFLASH,
        "labelled as DFlash has a Markov head, but sample_from_anchor does not say",
    ),
    "no block size": ({**FLAT, "block_size": ...}, "block_size is None"),
    "no captured layers": ({**FLAT, "target_layer_ids": ...}, "target_layer_ids is None"),
    "no head": (
        {**SPECULATORS, "speculators_model_type": "dflash2", **dict.fromkeys(MARKOV)},
        "conv_kernel_size is None",
    ),
    "a reduced vocabulary of DFlash2": (
        {**DIALECTS["DFlash2, speculators'"][0], "draft_vocab_size": 32000},
        "draft_vocab_size is 32000, but DFlash2's candidates need the whole vocabulary",
    ),
    "heads of two methods": (
        {**FLAT, **SELECTOR},
        "selector_rank is 8, a key of DFlash2, beside keys of DSpark's heads",
    ),
    "an anchor of DFlash2": (
        {**DIALECTS["DFlash2, speculators'"][0], "sample_from_anchor": True},
        "sample_from_anchor is True, which is not supported for DFlash2",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_dialect_that_contradicts_itself_is_rejected(tmp_path: Path, name: str):
    config, message = CONTRADICTIONS[name]
    with pytest.raises(ValueError, match=message):
        read(tmp_path, config)


EMBEDDED = {"dspark_block_size": 5, "dspark_markov_rank": 512, "dspark_noise_token_id": 1}
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "Ornith": (
        {**FLAT, "architectures": ["Qwen35DSparkModel"], "enable_qwen35_gated_q_proj": True},
        "DSpark with gated queries, as in Ornith's",
    ),
    "Qwen3.5": ({**FLAT, "architectures": ["Qwen35DSparkModel"]}, "DSpark with Qwen3.5's layers"),
    "Gemma 4": ({**FLAT, "architectures": ["Gemma4DSparkModel"]}, "DSpark with Gemma 4's layers"),
    "Gemma 4 without a label": (
        {**FLAT, "architectures": None, "model_type": "gemma4_text"},
        "DSpark with Gemma 4's layers",
    ),
    "a new label": (
        {**FLAT, "architectures": ["NewDSparkModel"]},
        "DSpark with the layers of NewDSparkModel",
    ),
    "DeepSeek-V4": (
        {**FLAT, "architectures": ["DSparkDraftModel"], **EMBEDDED},
        "DeepSeek-V4's DSpark",
    ),
    "Laguna": (
        {**QWEN3_8B_DFLASH, "architectures": None, "model_type": "laguna", "gating": "per-head"},
        "Laguna's DFlash",
    ),
    "LiLiCorr": (
        {**LAYERS, "dflash_config": {**TAPS, "lilicorr_candidate_topk": 16}},
        "LiLiCorr",
    ),
    "XPress": ({**LAYERS, **TAPS, "architectures": ["Qwen3XPressModel"]}, "XPress"),
    "speculators' XPress": ({**SPECULATORS, "speculators_model_type": "xpress"}, "XPress"),
    "JetSpec": ({**LAYERS, "dflash_config": {**TAPS, "causal_head": True}}, "JetSpec"),
    "JetSpec's own key": ({**LAYERS, "jetspec_config": {**TAPS}}, "JetSpec"),
    "PARD": (
        {**QWEN3_8B, "pard_token": 151670},
        "PARD",
    ),
    "MiniMax": (
        {**LAYERS, **TAPS, "architectures": ["MiniMaxDFlash2DraftModel"]},
        "MiniMax's DFlash2",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_drafter_of_another_method_is_rejected_by_its_name(tmp_path: Path, name: str):
    config, method = OTHERS[name]
    with pytest.raises(ValueError, match=f"a drafter for {method}.*, which is not supported"):
        read(tmp_path, config)


def test_target_with_dsparks_layers_is_named(tmp_path: Path):
    path = written(
        tmp_path,
        {**QWEN3_8B, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        | EMBEDDED,
    )
    with pytest.raises(ValueError, match=r"is a target that contains DSpark's layers \(dspark_bl"):
        load_draft_config(path)
    with pytest.raises(ValueError, match=r"\['DeepseekV4ForCausalLM'\] .* not a supported target"):
        load_target_config(path)


def test_reduced_vocabulary_of_flat_and_nested_files(tmp_path: Path):
    for config in (FLAT, NESTED):
        assert read(tmp_path, config, draft_vocab_size=32000).draft_vocab_size == 32000
        assert read(tmp_path, config, draft_vocab_size=151936).draft_vocab_size is None
        with pytest.raises(ValueError, match="draft_vocab_size is 151937, but the vocabulary has"):
            read(tmp_path, config, draft_vocab_size=151937)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "later"}, "quant_method 'later'"),
    ],
)
def test_quantized_checkpoint_is_rejected_by_its_format(
    tmp_path: Path, values: dict[str, Any], name: str
):
    message = f"the weights are quantized by {name}, which is not supported yet"
    with pytest.raises(ValueError, match=message):
        read(tmp_path, FLAT, quantization_config=values)
    path = written(tmp_path, {**QWEN3_8B, "quantization_config": values})
    with pytest.raises(ValueError, match=message):
        load_target_config(path)


@pytest.mark.parametrize(
    ("values", "label"),
    [
        ({"quant_method": "awq", "bits": 4}, "AWQ in 4 bits"),
        ({"quant_method": "gptq", "bits": 8}, "GPTQ in 8 bits"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt in NVFP4"),
        ({"quant_algo": "FP8"}, "ModelOpt in FP8 with a scale per tensor"),
    ],
)
def test_quantization_of_drafters_is_read(tmp_path: Path, values: dict[str, Any], label: str):
    config = read(tmp_path, FLAT, quantization_config=values)
    assert config.quantization is not None
    assert config.quantization.label == label
    quant = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    written(tmp_path, quant, "hf_quant_config.json")
    written(tmp_path, FLAT)
    config = load_draft_config(tmp_path)
    assert config.quantization is not None
    assert config.quantization.label == "ModelOpt in NVFP4"
