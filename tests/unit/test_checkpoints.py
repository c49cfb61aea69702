"""Configs and weights: published ones load as their authors intended, wrong ones are rejected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from strobe.attention.mask import LayerMask
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.config_readers.zlab import default_capture_layers
from strobe.models.families import FAMILIES
from tests.support.drafter_configs import QWEN3_8B_DFLASH, written
from tests.support.published_configs import published
from tests.support.tiny_checkpoints import LAYERS, VOCAB, edit_json, make_draft

QWEN3_8B: dict[str, Any] = published("targets", "Qwen__Qwen3-8B")["config"]

MIXED = ["sliding_attention"] * 4 + ["full_attention"]


def test_published_target_config_is_read(tmp_path: Path):
    written(tmp_path, QWEN3_8B)
    generation = {"eos_token_id": [151645, 151643], "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    written(tmp_path, {**generation, "do_sample": True}, "generation_config.json")
    config = load_target_config(tmp_path)
    decoder = config.decoder
    assert (decoder.num_layers, decoder.hidden_size, decoder.head_dim) == (36, 4096, 128)
    assert (decoder.rope, decoder.max_position) == (RopeConfig(1e6), 40960)
    assert decoder.masks == (LayerMask(),) * 36
    assert (config.eos_ids, config.tie_embeddings) == ((151645, 151643), False)
    assert config.dtype == "bfloat16"
    assert config.sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_published_drafter_config_is_read(tmp_path: Path):
    config = load_draft_config(written(tmp_path, QWEN3_8B_DFLASH))
    assert config.capture == (2, 10, 18, 26, 34), "layers run, one more than the file's ids"
    assert (config.block_size, config.mask_token_id, config.num_target_layers) == (16, 151669, 36)
    assert config.decoder.masks == (LayerMask(causal=False),) * 5
    assert (config.embedding_scale, config.output_multiplier) == (None, 1.0)
    assert config.logit_softcap is None
    assert config.decoder.rope == RopeConfig(1e6)


FULL, CAUSAL_WINDOW = LayerMask(causal=False), LayerMask(causal=True, window=2048)


@pytest.mark.parametrize(
    ("top", "nested", "masks"),
    [
        ({}, {}, (CAUSAL_WINDOW,) * 4 + (FULL,)),
        ({"is_causal": False}, {}, (LayerMask(False, 2048),) * 4 + (FULL,)),
        ({"is_causal": True}, {}, (CAUSAL_WINDOW,) * 4 + (LayerMask(),)),
        ({}, {"causal": True}, (CAUSAL_WINDOW,) * 4 + (LayerMask(),)),
        ({"is_causal": False}, {"causal": True}, (LayerMask(False, 2048),) * 4 + (FULL,)),
        ({"layer_types": ["full_attention"] * 5}, {}, (FULL,) * 5),
        ({"layer_types": None}, {}, (FULL,) * 5),
        ({"sliding_window": None}, {}, (FULL,) * 5),
        ({"use_sliding_window": False}, {}, (FULL,) * 5),
        ({"use_sliding_window": None}, {}, (FULL,) * 5),
        ({"use_sliding_window": False, "is_causal": True}, {}, (LayerMask(),) * 5),
        ({"use_sliding_window": None, "model_type": "gpt_oss"}, {}, (CAUSAL_WINDOW,) * 4 + (FULL,)),
    ],
)
def test_block_masks_follow_layer_types_and_overrides(
    tmp_path: Path, top: dict[str, Any], nested: dict[str, Any], masks: tuple[LayerMask, ...]
):
    config = {**QWEN3_8B_DFLASH, "layer_types": MIXED, "sliding_window": 2048}
    config |= {"use_sliding_window": True, **top}
    config["dflash_config"] = {**config["dflash_config"], **nested}
    assert load_draft_config(written(tmp_path, config)).decoder.masks == masks


def test_keys_are_read_nested_and_at_top_level(tmp_path: Path):
    flat = {k: v for k, v in QWEN3_8B_DFLASH.items() if k not in ("dflash_config", "block_size")}
    keys = {
        "block_size": 8,
        "mask_token_id": 7,
        "target_layer_ids": [3, 1],
        "final_logit_softcapping": 30.0,
        "output_multiplier": 0.196,
        "input_embedding_scale": 2.0,
    }
    top = load_draft_config(written(tmp_path, {**flat, **keys}))
    nested = load_draft_config(written(tmp_path, {**flat, "dflash_config": keys}))
    assert top == nested
    assert (top.block_size, top.mask_token_id, top.capture) == (8, 7, (4, 2))
    assert (top.logit_softcap, top.output_multiplier, top.embedding_scale) == (30.0, 0.196, 2.0)
    both = load_draft_config(
        written(tmp_path, {**flat, **keys, "dflash_config": {"block_size": 5}})
    )
    assert both.block_size == 5
    del keys["block_size"]
    assert load_draft_config(written(tmp_path, {**flat, **keys})).block_size == 16


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [
        (36, 5, [1, 9, 17, 25, 33]),
        (32, 5, [1, 8, 15, 22, 29]),
        (48, 5, [1, 12, 23, 34, 45]),
        (24, 5, [1, 6, 11, 16, 21]),
        (64, 5, [1, 16, 31, 46, 61]),
        (40, 5, [1, 10, 19, 28, 37]),
        (61, 6, [1, 12, 24, 35, 47, 58]),
        (60, 6, [1, 12, 23, 35, 46, 57]),
        (48, 8, [1, 7, 14, 20, 26, 32, 39, 45]),
        (36, 1, [18]),
    ],
)
def test_default_layer_ids_match_published_drafters(layers: int, count: int, ids: list[int]):
    assert default_capture_layers(layers, count) == ids


def test_rope_theta_is_read_from_every_location(tmp_path: Path):
    forms = [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_theta": 3.0},
        {"rope_scaling": {"type": "default", "rope_theta": 500.0}},
        {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 500.0}}},
    ]
    bare = {k: v for k, v in QWEN3_8B_DFLASH.items() if not k.startswith("rope")}
    for form in forms:
        config = load_draft_config(written(tmp_path, {**bare, **form}))
        assert config.decoder.rope == RopeConfig(500.0), form
    assert load_draft_config(written(tmp_path, bare)).decoder.rope == RopeConfig(1e6)


INERT: dict[str, Any] = {
    "is_llama_config": True,
    "rope_interleaved": False,
    "transformers.js_config": {"dtype": "q4"},
    "generation_config": {"do_sample": True},
    "do_sample": True,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "typical_p": 1.0,
    "max_length": 20,
    "num_beams": 1,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [1],
    "forced_eos_token_id": 2,
    "cache_implementation": "static",
    "gradient_checkpointing": True,
    "neftune_noise_alpha": 5,
    "model_max_length": 4096,
    "num_logits_to_keep": 1,
    "model_name": "unsloth/model",
    "unsloth_anything": "2025.1",
    "base_model_name_or_path": "some/model",
    "finetuning_task": "text",
}
"""Keys of older exports and of trainers."""


@pytest.mark.parametrize("key", INERT)
def test_keys_without_effect_on_logits_are_accepted(tmp_path: Path, key: str):
    targets = [load_target_config(written(tmp_path, {**QWEN3_8B, **more})) for more in
               ({}, {key: INERT[key]})]  # fmt: skip
    assert targets[0] == targets[1]
    top = {**QWEN3_8B_DFLASH, key: INERT[key]}
    nested = {**QWEN3_8B_DFLASH["dflash_config"], key: INERT[key]}
    plain = load_draft_config(written(tmp_path, QWEN3_8B_DFLASH))
    for config in (top, {**QWEN3_8B_DFLASH, "dflash_config": nested}):
        assert load_draft_config(written(tmp_path, config)) == plain


def test_interleaved_rope_of_a_target_is_rejected(tmp_path: Path):
    with pytest.raises(ValueError, match="rope_interleaved is True, which is not known"):
        load_target_config(written(tmp_path, {**QWEN3_8B, "rope_interleaved": True}))


NESTED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 61,
    },
}


def test_keys_beside_text_config_must_agree_with_it(tmp_path: Path):
    expected = load_target_config(written(tmp_path, NESTED))
    equal = {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert load_target_config(written(tmp_path, {**NESTED, **equal})) == expected
    with pytest.raises(ValueError, match="head_dim is 32, but 16 in text_config"):
        load_target_config(written(tmp_path, {**NESTED, **equal, "head_dim": 32}))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
BESIDE: dict[str, dict[str, Any]] = {
    "base in rope_scaling": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
        "rope_scaling": {**YARN, "rope_theta": 5e5},
    },
    "base at the top": {
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": YARN,
    },
    "base by default": {
        "rope_theta": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "rope_scaling": YARN,
    },
    "equal": {
        "rope_theta": None,
        "rope_parameters": {**YARN, "rope_theta": 5e5},
        "rope_scaling": {**YARN, "rope_theta": 5e5},
    },
}


@pytest.mark.parametrize("name", BESIDE)
def test_rope_scaling_replaces_rope_parameters_as_in_transformers(tmp_path: Path, name: str):
    config = {k: v for k, v in {**QWEN3_8B, **BESIDE[name]}.items() if v is not None}
    directory = written(tmp_path, config)
    rope = load_target_config(directory).decoder.rope
    expected = AutoConfig.from_pretrained(directory).rope_parameters
    assert (rope.kind, rope.factor, rope.original) == ("yarn", 4.0, 8192)
    assert (rope.theta, rope.factor) == (expected["rope_theta"], expected["factor"])


def test_base_lost_with_replaced_rope_parameters_is_an_error(tmp_path: Path):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN}
    target = {k: v for k, v in QWEN3_8B.items() if k != "rope_theta"}
    draft = {k: v for k, v in QWEN3_8B_DFLASH.items() if k != "rope_theta"}
    with pytest.raises(ValueError, match=r"rope_theta 500000\.0 is not its own, 10000\.0; put all"):
        load_target_config(written(tmp_path, {**target, **rope}))
    with pytest.raises(ValueError, match=r"rope_theta 500000\.0 is not its own, 1000000\.0"):
        load_draft_config(written(tmp_path, {**draft, **rope}))


BAD_DRAFTS: dict[str, tuple[dict[str, Any], str]] = {
    "rope": ({"rope_scaling": {"rope_type": "longrope", "factor": 64}}, "rope type 'longrope'"),
    "no mask token": ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is None"),
    "no layers": ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": []}}, "layer_ids is"),
    "negative layer": (
        {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [-1]}},
        r"target_layer_ids is \[-1\]",
    ),
    "block of one": ({"block_size": 1}, "block_size is 1"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "layer types": ({"layer_types": ["full_attention"]}, "layer_types must list"),
    "unknown layer": ({"layer_types": ["mamba"] * 5}, "layer type 'mamba'"),
    "no window": (
        {"layer_types": MIXED, "use_sliding_window": True, "sliding_window": 0},
        "sliding_window is 0",
    ),
    "heads": ({"num_key_value_heads": 5}, "not a multiple"),
    "odd head": ({"head_dim": 127}, "head_dim is 127"),
    "zero layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "causal": ({"is_causal": "yes"}, "is_causal is 'yes'"),
    "softcap": ({"final_logit_softcapping": -3}, "final_logit_softcapping is -3"),
    "another model": (
        {"architectures": ["Eagle3"], "dflash_config": None},
        "a drafter for EAGLE-3, which is not supported",
    ),
}


@pytest.mark.parametrize("name", BAD_DRAFTS)
def test_unsupported_drafter_config_is_rejected_by_name(tmp_path: Path, name: str):
    changes, message = BAD_DRAFTS[name]
    with pytest.raises(ValueError, match=message) as caught:
        load_draft_config(written(tmp_path, {**QWEN3_8B_DFLASH, **changes}))
    assert "config.json" in str(caught.value)


BAD_TARGETS: dict[str, tuple[dict[str, Any], str]] = {
    "another family": ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
    "another type": ({"model_type": "qwen3_moe"}, "qwen3_moe"),
    "rope": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope type 'dynamic'"),
    "eos": ({"eos_token_id": [151645, 151936]}, "eos_token_id is"),
    "vocabulary": ({"vocab_size": None}, "vocab_size is None"),
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
    "quantized": ({"quantization_config": {"quant_method": "bitsandbytes"}}, "bitsandbytes"),
    "a drafter": (QWEN3_8B_DFLASH, "a drafter for DFlash"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_unsupported_target_config_is_rejected_by_name(tmp_path: Path, name: str):
    changes, message = BAD_TARGETS[name]
    with pytest.raises(ValueError, match=message) as caught:
        load_target_config(written(tmp_path, {**QWEN3_8B, **changes}))
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "\x00", '{"a": 1'])
def test_damaged_config_is_rejected_with_its_path(tmp_path: Path, text: str):
    (tmp_path / "config.json").write_text(text)
    for load in (load_target_config, load_draft_config):
        with pytest.raises(ValueError, match=r"config\.json"):
            load(tmp_path)


def test_missing_directory_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere does not exist"):
        load_target_config(tmp_path / "nowhere")


WRONG_PAIRS: dict[str, tuple[dict[str, Any], str]] = {
    "hidden size": ({"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
    "vocabulary": ({"vocab_size": 99}, "vocab_size is 99"),
    "target layers": ({"num_target_layers": 9}, "num_target_layers is 9"),
    "a layer too far": ({"num_target_layers": None}, f"target_layer_ids holds {LAYERS}"),
    "mask token": ({"mask_token_id": VOCAB}, f"mask_token_id is {VOCAB}"),
}


@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_mismatched_drafter_is_rejected_before_weights(tmp_path: Path, target: Any, name: str):
    changes, message = WRONG_PAIRS[name]
    ids = (0, LAYERS) if name == "a layer too far" else (0, 1)
    path = make_draft(tmp_path, layer_ids=ids)
    if name == "mask token":
        changes = {"dflash_config": {"mask_token_id": VOCAB, "target_layer_ids": [0, 1]}}
    edit_json(path / "config.json", **changes)
    (path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(target=str(target.path), draft=str(path)))


def without(name: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        tensors = load_file(path)
        del tensors[name]
        save_file(tensors, path)

    return change


def with_tensor(name: str, value: torch.Tensor) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        save_file({**load_file(path), name: value}, path)

    return change


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (without("norm.weight"), "tensor norm.weight is missing"),
    "another tensor": (
        with_tensor("layers.0.self_attn.attention_sink_bias", torch.zeros(4)),
        "attention_sink_bias is not part of this architecture",
    ),
    "another shape": (with_tensor("norm.weight", torch.zeros(7)), r"norm.weight has shape \[7\]"),
    "whole numbers": (
        with_tensor("norm.weight", torch.zeros(32, dtype=torch.int8)),
        "norm.weight holds I8 values",
    ),
    "cut short": (cut_short, "damaged or cut short"),
    "empty": (lambda path: path.write_bytes(b""), "damaged or cut short"),
    "no file": (Path.unlink, "does not exist"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("kind", ["target", "draft"])
def test_damaged_weights_are_rejected_by_tensor_or_file(
    tmp_path: Path, target: Any, draft: Callable[..., Path], kind: str, name: str
):
    change, message = DAMAGES[name]
    paths = {"target": tmp_path / "target", "draft": tmp_path / "draft"}
    shutil.copytree(target.path, paths["target"])
    shutil.copytree(draft(), paths["draft"])
    weights = paths[kind] / "model.safetensors"
    if kind == "target":
        renamed = {k.removeprefix("model."): v for k, v in load_file(weights).items()}
        save_file(renamed, weights)
    change(weights)
    with pytest.raises(ValueError, match=message) as caught:
        resolve(EngineConfig(target=str(paths["target"]), draft=str(paths["draft"])))
    assert str(paths[kind]) in str(caught.value)


def test_missing_shard_is_named(tmp_path: Path, target: Any):
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}
    written(tmp_path, json.loads((target.path / "config.json").read_text()))
    written(tmp_path, index, "model.safetensors.index.json")
    with pytest.raises(ValueError, match=r"model-00001-of-00002\.safetensors does not exist"):
        resolve(EngineConfig(target=str(tmp_path)))


def test_duplicate_tensor_is_rejected(tmp_path: Path, target: Any):
    """A tensor under both spellings of its name, or in two shards, is ambiguous."""
    for case in ("one", "two"):
        path = tmp_path / case
        shutil.copytree(target.path, path)
        weights = path / "model.safetensors"
        if case == "one":
            with_tensor("norm.weight", torch.zeros(32))(weights)
        else:
            save_file({"model.norm.weight": torch.zeros(32)}, path / "other.safetensors")
            index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
            written(path, index, "model.safetensors.index.json")
        with pytest.raises(ValueError, match=r"norm\.weight is there twice"):
            resolve(EngineConfig(target=str(path)))


def test_tensors_without_learned_values_are_ignored(tmp_path: Path, target: Any):
    shutil.copytree(target.path, tmp_path / "target")
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))(
        tmp_path / "target" / "model.safetensors"
    )
    assert resolve(EngineConfig(target=str(tmp_path / "target"))).limits.max_model_len == 512


def test_checkpoints_page_names_every_architecture():
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    families = page.partition("## Target families")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+(?:ForCausalLM|ForConditionalGeneration))`", families)) == {
        *FAMILIES
    }
