"""Wrong input is rejected with one sentence, the same in the API and on the command line, before
any weight is read. In a batch, one bad prompt fails alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe import LLM, SamplingParams
from strobe.cli import main as cli
from strobe.engine import build
from strobe.host import free_memory, host_memory
from strobe.models.architectures import load_draft_config
from strobe.models.checkpoint import Checkpoint
from strobe.runner import memory
from strobe.sampling_params import Speculation
from tests.support.bookkeeping_checks import check_engine
from tests.support.text_pair import Pair
from tests.support.tiny_checkpoints import edit_json, make_target

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def damaged(pair: Pair, tmp_path: Path) -> Pair:
    """Return a copy of the pair for a test to damage."""
    return pair.copied(tmp_path)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a tensor is read."""

    def read(self: Checkpoint, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read", read)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """free(bytes) sets the machine's free memory."""
    return lambda size: monkeypatch.setattr(memory, "free_memory", lambda device: size)


@pytest.fixture
def rejected(
    no_weights: None, free: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """rejected(target, draft, **options) -> the sentence of the API and of the command line, on a
    machine with 16 GiB free."""
    free(2**34)

    def sentence_of(target: Path, draft: Path | None = None, **options: Any) -> str:
        with pytest.raises(ValueError, match=r"[.?]$") as caught:
            LLM(target, draft, **options)
        sentence = str(caught.value)
        assert "\n" not in sentence
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        flags += [f"--draft={draft}"] if draft is not None else []
        capsys.readouterr()
        assert cli.main(["generate", "hello", f"--target={target}", *flags]) == 2
        assert capsys.readouterr() == ("", f"strobe: {sentence}\n")
        return sentence

    return sentence_of


def says(sentence: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in sentence


# config.json


@pytest.mark.parametrize("value", [-1, 2048, [2, 5000]])
def test_invalid_eos_token_is_rejected_even_if_overridden(
    damaged: Pair, rejected: Callable[..., str], value: Any
):
    edit_json(damaged.target / "generation_config.json", eos_token_id=2)
    edit_json(damaged.target / "config.json", eos_token_id=value)
    says(rejected(damaged.target), damaged.target / "config.json", f"eos_token_id is {value!r}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", "32"),
        ("hidden_size", 32.0),
        ("hidden_size", True),
        ("hidden_size", 0),
        ("intermediate_size", -48),
        ("num_hidden_layers", None),
        ("num_attention_heads", [4]),
        ("vocab_size", None),
        ("max_position_embeddings", "512"),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", 0),
        ("tie_word_embeddings", "no"),
        ("attention_bias", 1),
        ("use_sliding_window", "yes"),
        ("rope_parameters", ["default"]),
        ("rope_scaling", "default"),
    ],
)
def test_config_value_of_the_wrong_type(
    damaged: Pair, rejected: Callable[..., str], key: str, value: Any
):
    config = damaged.target / "config.json"
    edit_json(config, **({"rope_parameters": None} if key == "rope_scaling" else {}))
    edit_json(config, **({"layer_types": None} if key == "use_sliding_window" else {}))
    edit_json(config, **{key: value})
    says(rejected(damaged.target), config, f"{key} is {value!r}, but must be")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"model_type": "llama"}, ["'llama' is not a supported target", "Qwen3ForCausalLM"]),
        ({"architectures": ["LlamaForCausalLM"]}, ["'LlamaForCausalLM'", "not a supported"]),
        ({"architectures": "Qwen3ForCausalLM"}, ["'Qwen3ForCausalLM'", "not a supported"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "'silu'"]),
        ({"head_dim": 15}, ["head_dim is 15", "even"]),
        ({"num_attention_heads": 3}, ["num_attention_heads 3 is not a multiple of", "2"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["'longrope' is not", "llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "yarn"}}, ["factor", "'yarn' is None", "positive"]),
        (
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": -2}},
            ["factor", "'linear' is -2"],
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2, "beta_fast": 1}},
            ["'beta_fast' of a rope of type 'linear' is not supported"],
        ),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, ["'mrope_section'", "'default'"]),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2, "truncate": 1}},
            ["truncate is 1"],
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8,
                    "low_freq_factor": 4,
                    "high_freq_factor": 4,
                }
            },
            ["low_freq_factor is 4", "below high_freq_factor 4"],
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, ["rope_theta is -1"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor is 0.5"]),
        (
            {
                "layer_types": ["full_attention"] * 4 + ["sliding_attention"],
                "sliding_window": 8,
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6},
                    "sliding_attention": {"rope_theta": 1e4},
                },
            },
            ["rope_parameters differ between layer types"],
        ),
        ({"layer_types": ["full_attention"] * 4}, ["each of the 5 layers", "full_attention"]),
        ({"layer_types": "full_attention"}, ["each of the 5 layers", "'full_attention'"]),
        ({"layer_types": ["linear_attention"] * 5}, ["'linear_attention' is not supported"]),
        ({"layer_types": ["sliding_attention"] * 5}, ["sliding_window is None"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype is 'float8_e4m3fn'", "bfloat16"]),
        ({"dtype": 16}, ["dtype is 16", "bfloat16"]),
        (
            {"quantization_config": {"bits": 4}},
            ["quantized by quant_method None in 4 bits, which is not supported yet"],
        ),
    ],
)
def test_unsupported_config(
    damaged: Pair, rejected: Callable[..., str], changes: dict[str, Any], parts: list[str]
):
    config = damaged.target / "config.json"
    edit_json(config, **changes)
    says(rejected(damaged.target), config, *parts)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000], ids=range(7)
)
def test_non_object_config(damaged: Pair, rejected: Callable[..., str], file: str, content: bytes):
    (damaged.target / file).write_bytes(content)
    says(rejected(damaged.target), damaged.target / file, "again")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["2", -1, 2048, True, [2, None], [[2]], 2.0])
def test_invalid_eos_token(damaged: Pair, rejected: Callable[..., str], file: str, value: Any):
    edit_json(damaged.target / "generation_config.json", eos_token_id=None)
    edit_json(damaged.target / file, eos_token_id=value)
    says(rejected(damaged.target), damaged.target / file, f"eos_token_id is {value!r}", "0 to 2047")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("top_p", 7),
        ("top_k", 1.5),
        ("min_p", -1),
        ("repetition_penalty", -1),
    ],
)
def test_invalid_recommended_sampling(
    damaged: Pair, rejected: Callable[..., str], key: str, value: Any
):
    path = damaged.target / "generation_config.json"
    edit_json(path, **{key: value})
    says(rejected(damaged.target), path, f"{key} is {value!r}")


def test_missing_directory(pair: Pair, rejected: Callable[..., str], tmp_path: Path):
    nowhere = tmp_path / "nowhere"
    hint = "name a directory that holds a Hugging Face checkpoint"
    says(rejected(nowhere), f"{nowhere} does not exist", hint)
    says(rejected(pair.target, nowhere), f"{nowhere} does not exist", hint)
    says(rejected(tmp_path), f"{tmp_path / 'config.json'} does not exist", hint)
    file = pair.target / "config.json"
    says(rejected(file), f"{file} is not a directory", hint)


def test_swapped_drafter_and_target(pair: Pair, rejected: Callable[..., str]):
    says(rejected(pair.draft), pair.draft, "name it as the drafter")
    says(rejected(pair.draft, pair.target), pair.draft, "name it as the drafter")
    says(rejected(pair.target, pair.target), pair.target, "is not a drafter for")


def test_drafter_of_another_method_as_target(damaged: Pair, rejected: Callable[..., str]):
    config = damaged.target / "config.json"
    edit_json(config, architectures=["LlamaForCausalLMEagle3"])
    says(rejected(damaged.target), config, "a drafter for EAGLE-3, not a target", "DSpark")


def test_neutral_values_are_accepted(damaged: Pair):
    plain = {"use_swa": False, "attention_value_scale": 1.0, "is_neox_style": True}
    edit_json(damaged.draft / "config.json", **plain, sample_from_anchor=False)
    assert load_draft_config(damaged.draft).block_size == 8


# the drafter


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"hidden_size": 64}, "hidden_size is 64, the target's is 32"),
        ({"vocab_size": 61}, "vocab_size is 61, the target's is 2048"),
        ({"num_target_layers": 6}, "num_target_layers is 6, the target has 5 layers"),
        ({"num_target_layers": "5"}, "num_target_layers is '5'"),
        ({"block_size": 1}, "block_size is 1"),
        ({"block_size": "8"}, "block_size is '8'"),
        ({"block_size": None, "dflash_config": {"block_size": True}}, "block_size is True"),
        ({"is_causal": "no"}, "is_causal is 'no'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"dflash_config": ["mask"]}, "dflash_config is ['mask'], but must be an object"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        (
            {"architectures": ["Nothing"], "dflash_config": None},
            "['Nothing'] is not a drafter for DFlash",
        ),
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "dflash_config": None},
            "describes a drafter for EAGLE-3, which is not supported; use a drafter for DFlash, "
            "DFlash2 or DSpark.",
        ),
        ({"architectures": ["DFlash2DraftModel"]}, "conv_kernel_size is None"),
        ({"architectures": ["DFlareDraftModel"]}, "a drafter for DFlare, which is not supported"),
        ({"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}, "markov_rank is None"),
        ({"speculators_model_type": "eagle3"}, "a drafter for EAGLE-3, which is not supported"),
        ({"speculators_model_type": "mtp"}, "a drafter for MTP, which is not supported"),
        ({"speculators_model_type": "dflash"}, "transformer_layer_config is missing"),
        ({"use_swa": True}, "swa_window_size is None"),
        ({"attention_value_scale": -1}, "attention_value_scale is -1"),
        ({"rope_is_neox_style": "no"}, "rope_is_neox_style is 'no'"),
        ({"sample_from_anchor": True}, "sample_from_anchor is True, which is not supported"),
    ],
)
def test_mismatched_drafter_config(
    damaged: Pair, rejected: Callable[..., str], changes: dict[str, Any], part: str
):
    config = damaged.draft / "config.json"
    edit_json(config, **changes)
    says(rejected(damaged.target, damaged.draft), config, part)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"mask_token_id": "3"}, "mask_token_id is '3'"),
        ({"mask_token_id": True}, "mask_token_id is True"),
        ({"mask_token_id": 2048}, "mask_token_id is 2048, but the vocabulary has ids"),
        ({"mask_token_id": -1}, "mask_token_id is -1, but the vocabulary has ids"),
        ({"target_layer_ids": [0, 1, 5]}, "target_layer_ids holds 5, but num_target_layers is 5"),
        ({"target_layer_ids": [-1, 1, 3]}, "target_layer_ids is [-1, 1, 3]"),
        ({"target_layer_ids": []}, "target_layer_ids is []"),
        ({"target_layer_ids": "all"}, "target_layer_ids is 'all'"),
        ({"target_layer_ids": [0, True, 3]}, "target_layer_ids is [0, True, 3]"),
        ({"input_embedding_scale": "2"}, "input_embedding_scale is '2'"),
        ({"output_multiplier": 0}, "output_multiplier is 0"),
        ({"final_logit_softcapping": -30}, "final_logit_softcapping is -30"),
    ],
)
def test_mismatched_drafter_dflash_values(
    damaged: Pair, rejected: Callable[..., str], changes: dict[str, Any], part: str
):
    config = damaged.draft / "config.json"
    nested = json.loads(config.read_text())["dflash_config"]
    edit_json(config, dflash_config={**nested, **changes})
    says(rejected(damaged.target, damaged.draft), config, part)


def test_drafter_without_layer_ids(damaged: Pair, rejected: Callable[..., str]):
    config = damaged.draft / "config.json"
    edit_json(config, dflash_config={"mask_token_id": 3}, num_target_layers=None)
    says(rejected(damaged.target, damaged.draft), config, "target_layer_ids is None")


def test_drafter_reading_too_few_layers(damaged: Pair, rejected: Callable[..., str]):
    config = damaged.draft / "config.json"
    edit_json(config, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 1]})
    says(
        rejected(damaged.target, damaged.draft),
        damaged.draft,
        "tensor fc.weight reads 96 values per token, but target_layer_ids [0, 1] names 2 layers of "
        "32, which make 64;",
    )


# tensors


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t, k: t.pop(k), "is missing; download or save the checkpoint again."),
        (lambda t, k: t.update(extra=torch.zeros(2)), "tensor extra is not part of"),
        (lambda t, k: t.update({k: t[k][:-1].clone()}), "has shape ["),
        (lambda t, k: t.update({k: t[k].flatten()}), "config.json asks for ["),
        (lambda t, k: t.update({k: t[k].to(torch.int8)}), "holds I8 values"),
        (lambda t, k: t.update({k: t[k].to(torch.float8_e4m3fn)}), "holds F8_E4M3 values"),
    ],
    ids=["missing", "extra", "short", "flat", "int8", "float8"],
)
def test_mismatched_tensors(
    damaged: Pair,
    rejected: Callable[..., str],
    side: str,
    change: Callable[[dict[str, torch.Tensor], str], Any],
    part: str,
):
    directory: Path = getattr(damaged, side)
    tensors = load_file(directory / MODEL)
    name = next(name for name in sorted(tensors) if "layers.1.mlp.up_proj" in name)
    change(tensors, name)
    save_file(tensors, directory / MODEL)
    own = "extra" if "extra" in part else "layers.1.mlp.up_proj.weight"
    says(rejected(damaged.target, damaged.draft), directory, f"tensor {own}", part)


@pytest.mark.parametrize("side", ["target", "draft"])
@pytest.mark.parametrize("keep", [-1, 1000, 7, 0])
def test_truncated_tensor_file(damaged: Pair, rejected: Callable[..., str], side: str, keep: int):
    path: Path = getattr(damaged, side) / MODEL
    path.write_bytes(path.read_bytes()[:keep])
    says(rejected(damaged.target, damaged.draft), path, "is damaged or cut short", "again")


@pytest.mark.parametrize("side", ["target", "draft"])
def test_missing_tensor_file(damaged: Pair, rejected: Callable[..., str], side: str):
    path: Path = getattr(damaged, side) / MODEL
    path.unlink()
    says(rejected(damaged.target, damaged.draft), f"{path} does not exist", "again")
    path.mkdir()
    says(rejected(damaged.target, damaged.draft), f"{path} is damaged", "again")


def test_head_conflict_between_config_and_tensors(damaged: Pair, rejected: Callable[..., str]):
    tensors = load_file(damaged.target / MODEL)
    del tensors["lm_head.weight"]
    save_file(tensors, damaged.target / MODEL)
    says(rejected(damaged.target), "tensor lm_head.weight is missing")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Path:
    path = tmp_path_factory.mktemp("shards")
    shutil.copytree(pair.target, path, dirs_exist_ok=True)
    (path / MODEL).unlink()
    make_target(path, vocab_size=2048, eos_token_id=[2, 0], shards="300KB")
    assert len(list(path.glob("model-*.safetensors"))) > 2
    return path


@pytest.fixture
def sharded(shards: Path, tmp_path: Path) -> Path:
    """Return a target in several files for a test to damage."""
    shutil.copytree(shards, tmp_path / "sharded")
    return tmp_path / "sharded"


def test_missing_or_truncated_shard(sharded: Path, rejected: Callable[..., str]):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    says(rejected(sharded), shard, "is damaged or cut short")
    shard.unlink()
    says(rejected(sharded), f"{shard} does not exist")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}']
)
def test_damaged_shard_index(sharded: Path, rejected: Callable[..., str], content: str):
    (sharded / INDEX).write_text(content)
    says(rejected(sharded), sharded / INDEX, "again")


def test_index_missing_a_shard_or_repeating_a_tensor(sharded: Path, rejected: Callable[..., str]):
    index = json.loads((sharded / INDEX).read_text())["weight_map"]
    gone = index["lm_head.weight"]
    others = {name: file for name, file in index.items() if file != gone}
    (sharded / INDEX).write_text(json.dumps({"weight_map": others}))
    says(rejected(sharded), sharded, "is missing")
    shutil.copy(sharded / gone, sharded / "again.safetensors")
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**index, "x": "again.safetensors"}}))
    says(rejected(sharded), sharded, "lm_head.weight is there twice")


# the tokenizer


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", ""),
        ("tokenizer.json", "{"),
        ("tokenizer.json", '{"version": "1.0"}'),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
    ],
)
def test_missing_or_damaged_tokenizer(
    damaged: Pair, rejected: Callable[..., str], file: str, content: str | None
):
    path = damaged.target / file
    if content is None:
        path.unlink()
        (damaged.target / "tokenizer_config.json").unlink()
        says(rejected(damaged.target), f"{path} does not exist", "again")
    else:
        path.write_text(content)
        says(rejected(damaged.target), f"{damaged.target} has no tokenizer that can be", "again")


# settings


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"num_drafts": 0}, "num_drafts is 0"),
        ({"num_drafts": -1}, "num_drafts is -1"),
        ({"num_drafts": 8}, "num_drafts is 8, but the drafter's blocks of 8 hold at most 7"),
        ({"num_drafts": 1.5}, "num_drafts is 1.5"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens is 255, but 32 requests"),
        ({"max_num_batched_tokens": 31, "max_num_seqs": 4}, "need 32; raise it to 32"),
        ({"max_model_len": 513}, "max_model_len is 513, but the model's positions end at 512"),
        ({"max_model_len": 1}, "max_model_len is 1"),
        ({"max_model_len": "long"}, "max_model_len is 'long'"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": 10**12}, "max_num_seqs is 1000000000000, whose page tables take"),
        ({"max_num_seqs": 10**7, "max_model_len": 16}, "max_num_seqs is 10000000, whose sampling"),
        ({"max_num_seqs": 10**30}, "whose page tables take"),
        ({"max_num_batched_tokens": 10**30, "max_num_seqs": 10**29}, "page tables take"),
        ({"max_model_len": 10**30}, f"max_model_len is {10**30}, but the model's positions end"),
        ({"num_drafts": 10**30}, f"num_drafts is {10**30}, but the drafter's blocks"),
        ({"page_size": 10**30}, f"tokens in pages of {10**30}, but max_model_len"),
        ({"page_size": 0}, "page_size is 0"),
        ({"page_size": 10**9}, "hold 0 tokens in pages of 1000000000, but max_model_len"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory is 'much'"),
        ({"kv_cache_memory": "9" * 400}, "kv_cache_memory is '999"),
        ({"kv_cache_memory": "9000TiB"}, "kv_cache_memory is 9000TiB"),
        ({"kv_cache_memory": "1KiB"}, "1024 bytes of KV cache hold 0 tokens"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda:999"}, "device is 'cuda:999', but this machine has"),
        ({"device": "cuda:99999999999999"}, "device is 'cuda:99999999999999'; name"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        (
            {"method": "eagle"},
            "method is 'eagle', but must be 'dflash', 'ngram', 'dflash+ngram' or 'none'",
        ),
        ({"overlap": 3}, "overlap is 3"),
        ({"gpu_memory_utilization": NAN}, "gpu_memory_utilization is nan, but must be a finite"),
        ({"mem_fraction_static": NAN}, "gpu_memory_utilization is nan, but must be a finite"),
        ({"kv_cache_memory": "inf"}, "kv_cache_memory is 'inf'"),
        ({"method": "none", "num_drafts": 5}, "num_drafts is 5, but method is 'none'"),
        ({"ngram_min": 5}, "ngram_min is 5, above ngram_max 4"),
        ({"ngram_max": 33}, "ngram_max is 33, but must be at most 32"),
    ],
)
def test_invalid_settings(
    pair: Pair, rejected: Callable[..., str], options: dict[str, Any], part: str
):
    says(rejected(pair.target, pair.draft, **options), part)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"method": "dflash"}, "no drafter is named; set draft to a directory"),
        (
            {"method": "dflash+ngram"},
            "method is 'dflash+ngram', but no drafter is named; set draft",
        ),
        ({"num_drafts": 3}, "num_drafts is 3, but nothing drafts"),
        ({"num_drafts": 512, "method": "ngram"}, "num_drafts is 512, but max_model_len is 512"),
    ],
)
def test_settings_requiring_a_drafter(
    pair: Pair, rejected: Callable[..., str], options: dict[str, Any], part: str
):
    says(rejected(pair.target, **options), part)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"max_num_seq": 4}, "max_num_seq is not an engine option; there are"),
        (
            {"pipeline_parallel_size": 2},
            "pipeline_parallel_size is 2, but only tensor_parallel_size splits a model; give 1",
        ),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching is 'no'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching is 1"),
        ({"overlap": True}, "overlap is True"),
        ({"overlap": 1.0}, "overlap is 1.0"),
        ({"num_drafts": True}, "num_drafts is True"),
        ({"device": 0}, "device is 0"),
        ({"dtype": torch.float32}, "dtype is torch.float32"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"draft": ""}, "draft is '', but must be a text of one character or more; name the"),
    ],
)
def test_settings_of_the_wrong_type(
    pair: Pair, no_weights: None, options: dict[str, Any], part: str
):
    with pytest.raises(ValueError, match=r"\.$") as caught:
        LLM(pair.target, **options)
    says(str(caught.value), part)


# memory


def test_weights_beyond_memory(
    pair: Pair, rejected: Callable[..., str], free: Callable[[int], None]
):
    free(500_000)
    says(rejected(pair.target), "The weights take", "cpu has 500000 bytes free")


def test_cache_beyond_free_memory(
    pair: Pair, rejected: Callable[..., str], free: Callable[[int], None]
):
    free(3 * 2**20)
    says(rejected(pair.target, kv_cache_memory="4MiB"), "kv_cache_memory is 4MiB (4194304 bytes)")


def test_context_beyond_free_memory(
    pair: Pair, rejected: Callable[..., str], free: Callable[[int], None]
):
    free(1_200_000)
    sentence = rejected(pair.target)
    says(sentence, "but max_model_len is 512; lower max_model_len or page_size.")
    assert "raise kv_cache_memory" not in sentence


def test_stated_size_for_one_context_suffices(pair: Pair, rejected: Callable[..., str]):
    sentence = rejected(pair.target, kv_cache_memory="64KiB", max_num_seqs=1)
    need = sentence.split("raise kv_cache_memory to ")[1].split(" bytes")[0]
    says(rejected(pair.target, kv_cache_memory=int(need) - 1), need)
    target = build.load_target_config(pair.target)
    spec = build.kv_spec(target.decoder, torch.float32)
    groups = [memory.PageGroup(spec.bytes_per_page(16))]
    config = build.EngineConfig(target=str(pair.target), kv_cache_memory=int(need))
    limits = build.resolve_limits(config, model_max=512, method="none")
    pages = memory.plan_pages(config, limits, groups, torch.device("cpu"), parts=memory.PartBytes())
    assert pages == [512 // 16 + 1]


def test_gpu_memory_utilization_sizes_the_kv_cache(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    total, used, weights, scratch = 10**9, 2 * 10**8, 10**8, 5 * 10**7
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (total - used, total))
    target = build.load_target_config(pair.target)
    per_page = build.kv_spec(target.decoder, torch.float32).bytes_per_page(16)
    groups = [memory.PageGroup(per_page)]

    def pages(**options: Any) -> int:
        config = build.EngineConfig(target=str(pair.target), max_num_seqs=10**5, **options)
        limits = build.resolve_limits(
            config.with_(max_num_batched_tokens=10**6), model_max=512, method="none"
        )
        limits = replace(limits, max_num_seqs=10**4)
        gpu = torch.device("cuda", 0)
        parts = memory.PartBytes(weights=weights, scratch=scratch)
        planned = memory.plan_pages(config, limits, groups, gpu, parts=parts)
        return planned[0]

    for share in (0.5, 0.75, 1):
        room = int(share * total) - used - weights - scratch
        assert pages(gpu_memory_utilization=share) == room // per_page
    with pytest.raises(ValueError, match=r"utilization is 0\.3, but .* take 0\.35 of cuda:0"):
        pages(gpu_memory_utilization=0.3)
    with pytest.raises(ValueError, match="raise gpu_memory_utilization or lower max_model_len"):
        pages(gpu_memory_utilization=0.3501)


def test_free_memory_respects_container_limit(tmp_path: Path):
    assert host_memory._container_room(7, tmp_path) == 7
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    assert host_memory._container_room(7, tmp_path) == 300
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200\n")
    assert host_memory._container_room(7, tmp_path) == 500
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory._container_room(7, tmp_path) == 7
    assert 0 < free_memory.free_memory(torch.device("cpu")) < 2**50


# sampling


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("n", [0, -1, 1.0, True, "2", None, 16385]),
        ("temperature", [-0.1, 100.1, NAN, INF, True, "hot", None, 10**400]),
        ("top_p", [0, 0.0, -0.1, 1.1, NAN, True, "1", None]),
        ("top_k", [-2, 1.5, NAN, True, "5", None, 2**31]),
        ("min_p", [-0.1, 1.1, NAN, True, "0", None]),
        ("seed", [1.5, NAN, True, "7", 2**63, -(2**63) - 1]),
        ("max_tokens", [-1, 16.0, NAN, True, "16"]),
        ("min_tokens", [-1, 17, 1.0, True, "0", None, 2**31]),
        ("stop", ["", [""], [None], [5], 5, [["a"]], b"x", {"a": 1}, True]),
        ("stop_token_ids", [5, "5", [-1], [1.0], [True], ["2"], [[2]], {"2": 1}]),
        ("include_stop_str_in_output", [1, "yes", None]),
        ("ignore_eos", [0, "no", None]),
        ("skip_special_tokens", [1, "yes", None]),
        (
            "speculation",
            [
                "ngram",
                1,
                [],
                {"method": "eagle"},
                {"method": 5},
                {"num_drafts": -1},
                {"num_drafts": True},
                {"num_drafts": 1.5},
                {"drafts": 3},
                {1: 2, "drafts": 3},
            ],
        ),
    ],
)
def test_sampling_values_out_of_range(field: str, values: list[Any]):
    for value in values:
        with pytest.raises(ValueError, match=r"\.$") as caught:
            SamplingParams(**{field: value})
        assert str(caught.value).startswith(f"{field}"), value
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"n": 16384, "temperature": 100, "top_p": 1e-9, "top_k": -1, "min_p": 1},
        {"temperature": 0, "top_k": 2**31 - 1, "seed": -(2**63), "max_tokens": None},
        {"seed": 2**63 - 1, "min_tokens": 16, "stop": "a", "stop_token_ids": None},
        {"stop": None, "speculation": {"method": "ngram", "num_drafts": 0}},
        {"stop": ["a", "b"], "stop_token_ids": range(3), "speculation": True},
        {"speculation": Speculation(num_drafts=3)},
    ],
)
def test_boundary_sampling_values_are_accepted(values: dict[str, Any]):
    SamplingParams(**values)


def test_unknown_sampling_field_is_named():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1.0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "flags",
    [
        "--temperature=-1",
        "--temperature=nan",
        "--presence-penalty=inf",
        "--temperature=hot",
        "--top-p=2",
        "--top-k=1.5",
        "--min-p=x",
        "--n=0",
        "--seed=soon",
        "--max-tokens=-1",
        "--min-tokens=513",
        "--stop-token-ids=end",
        "--stop=",
    ],
)
def test_sampling_values_out_of_range_on_the_command_line(
    pair: Pair, capsys: pytest.CaptureFixture[str], flags: str
):
    assert cli.main(["generate", "hello", f"--target={pair.target}", flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    name = flags.split("=")[0].removeprefix("--").replace("-", "_")
    assert re.match(rf"strobe: {name}(\[0\])? is ", err)
    assert err.count("\n") == 1


# prompts and batches


@pytest.fixture(scope="module")
def llm(pair: Pair) -> LLM:
    return LLM(pair.target, pair.draft, max_model_len=64, device="cpu")


GREEDY = SamplingParams(temperature=0, max_tokens=6)

BAD_PROMPTS: list[tuple[Any, str]] = [
    (None, "A prompt is None, but must be a text"),
    (3.5, "A prompt is 3.5, but must be a text"),
    (b"hello", "A prompt is b'hello', but must be a text"),
    ("", "The prompt is empty; give it at least one token"),
    ([], "The prompt is empty; give it at least one token"),
    ("half \ud800", "half a character, at place 5"),
    ([1] * 64, "has 64 tokens, but max_model_len is 64"),
    ("word " * 64, "but max_model_len is 64 with the answer; shorten it to 63 tokens"),
    ([5, 2048], "holds token id 2048, but the vocabulary has ids 0 to 2047"),
    ([-1, 5], "holds token id -1"),
    ([5, True], "holds True, which is not a token id"),
    ([5, "a"], "holds 'a', which is not a token id"),
    ([5, 1.0], "holds 1.0, which is not a token id"),
    ({"prmpt": "hello"}, "A prompt is {'prmpt': 'hello'}, but must be"),
    ({}, "A prompt is {}, but must be"),
    ({"prompt": 5}, "A prompt is 5, but must be a text"),
    ({"prompt": None}, "A prompt is None, but must be a text"),
    ({"prompt": "hello", "multi_modal_data": 1}, "A prompt is {"),
    ({"prompt_token_ids": None}, "token ids are None, but must be a list"),
    ({"prompt_token_ids": "hello"}, "token ids are 'hello', but must be a list"),
    ({"prompt_token_ids": 5}, "token ids are 5, but must be a list"),
    ({"prompt_token_ids": [[5]]}, "holds [5], which is not a token id"),
]


def test_bad_prompts_fail_alone(llm: LLM):
    (alone,) = llm.generate("hello", GREEDY, use_tqdm=False)
    prompts: list[Any] = ["hello"]
    for bad, _ in BAD_PROMPTS:
        prompts += [bad, "hello"]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert len(outputs) == len(prompts)
    for output in outputs[::2]:
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.outputs[0].error is None
    for output, (bad, part) in zip(outputs[1::2], BAD_PROMPTS, strict=True):
        (answer,) = output.outputs
        assert (answer.finish_reason, answer.text, answer.token_ids) == ("error", "", []), bad
        assert output.finished
        says(str(answer.error), part)
    check_engine(llm.engine)
    assert not llm.engine.has_work


@pytest.mark.parametrize(("bad", "part"), BAD_PROMPTS, ids=range(len(BAD_PROMPTS)))
def test_streaming_a_bad_prompt_raises(llm: LLM, bad: Any, part: str):
    with pytest.raises(ValueError, match=r"\.$") as caught:
        next(llm.stream(bad, GREEDY))
    says(str(caught.value), part)
    check_engine(llm.engine)


@pytest.mark.parametrize("call", [None, 3.5, b"hello", {"prmpt": "x"}, ""])
def test_single_bad_prompt_is_one_output(llm: LLM, call: Any):
    (output,) = llm.generate(call, GREEDY)
    assert output.outputs[0].finish_reason == "error"


def test_other_integer_types_are_accepted_as_token_ids(llm: LLM):
    ids = llm.tokenizer.encode("hello there")
    expected = llm.generate([ids], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    forms: list[Any] = [
        np.array(ids),
        tuple(ids),
        [np.int64(i) for i in ids],
    ]
    for form in forms:
        for prompt in ({"prompt_token_ids": form}, form if isinstance(form, tuple) else [*form]):
            (output,) = llm.generate([prompt], GREEDY, use_tqdm=False)
            assert output.outputs[0].token_ids == expected
            assert all(type(token) is int for token in output.prompt_token_ids)


@pytest.mark.parametrize(
    "messages",
    [None, "hello", 5, [], [5], [{"role": "user"}], {"role": "user", "content": "hello"}],
    ids=str,
)
def test_invalid_conversation_fails_alone(llm: LLM, messages: Any):
    good = [{"role": "user", "content": "hello"}]
    outputs = llm.chat([good, messages, good], GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "conversation" in str(outputs[1].outputs[0].error) or "message" in str(
        outputs[1].outputs[0].error
    )
    assert outputs[0].outputs[0].token_ids == outputs[2].outputs[0].token_ids
    alone = llm.chat(messages, GREEDY, use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in alone] == ["error"]


@pytest.mark.parametrize(
    "bad", [None, 5, {"temperature": 0}, SamplingParams, [GREEDY]], ids=["none", "5", "d", "t", "l"]
)
def test_bad_params_of_one_prompt_fail_alone(llm: LLM, bad: Any):
    outputs = llm.generate(["hello"] * 3, [GREEDY, bad, GREEDY], use_tqdm=False)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert "must be SamplingParams" in str(outputs[1].outputs[0].error)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"stop_token_ids": [2048]}, "stop_token_ids holds token id 2048"),
        ({"speculation": {"num_drafts": 8}}, "speculation.num_drafts is 8, but this engine"),
    ],
)
def test_unsupported_params_fail_alone(llm: LLM, changes: dict[str, Any], part: str):
    params = [GREEDY, GREEDY.clone(n=2, **changes)]
    good, bad = llm.generate(["hello"] * 2, params, use_tqdm=False)
    assert good.outputs[0].finish_reason == "length"
    assert [answer.index for answer in bad.outputs] == [0, 1]
    for answer in bad.outputs:
        assert answer.finish_reason == "error"
        says(str(answer.error), part)
    check_engine(llm.engine)


def test_unavailable_method_fails_alone(pair: Pair):
    plain = LLM(pair.target, max_model_len=64)
    params = [GREEDY, GREEDY.clone(speculation={"method": "dflash"})]
    good, bad = plain.generate(["hello"] * 2, params, use_tqdm=False)
    assert good.outputs[0].finish_reason == "length"
    says(str(bad.outputs[0].error), "speculation.method is 'dflash'", "start the engine with a")


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, "greedy", [GREEDY], []])
def test_mismatched_params_raise(llm: LLM, params: Any):
    with pytest.raises(ValueError, match="sampling_params"):
        llm.generate(["hello"] * 2, params, use_tqdm=False)
    assert not llm.engine.has_work


@pytest.mark.parametrize("more", [5, "thinking", {"tools": []}, {"add_generation_prompt": False}])
def test_invalid_template_options_raise(llm: LLM, more: Any):
    with pytest.raises(ValueError, match="chat_template_kwargs is"):
        llm.chat([{"role": "user", "content": "hello"}], GREEDY, chat_template_kwargs=more)


def test_one_bad_prompt_on_the_command_line(pair: Pair, capsys: pytest.CaptureFixture[str]):
    flags = ["--no-chat", "--temperature=0", "--max-tokens=4", f"--target={pair.target}"]
    assert cli.main(["generate", "hello", "", *flags]) == 1
    out, err = capsys.readouterr()
    assert err == "strobe: prompt 2: The prompt is empty; give it at least one token.\n"
    assert out.startswith("> hello\n")
    assert cli.main(["generate", "hello", "", "--json", *flags]) == 1
    good, bad = json.loads(capsys.readouterr().out)["outputs"]
    assert good["outputs"][0]["finish_reason"] == "length"
    assert bad["outputs"][0]["finish_reason"] == "error"


# the command line itself


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["generte", "hello"],
            "'generte' is not a command; there are generate, chat, serve, run-batch, pull, demo, "
            "info, doctor, verify, bench, eval.",
        ),
        (["generate"], "No prompt was given; name one or more: strobe generate 'PROMPT'."),
        (
            ["generate", "hello", "--tempreature", "1"],
            "strobe generate takes no '--tempreature'; did you mean --temperature?",
        ),
        (
            ["chat", "--n", "2"],
            "strobe chat takes no '--n'; strobe chat --help lists what it takes.",
        ),
        (
            ["demo", "--method=ngram"],
            "strobe demo takes no '--method=ngram'; strobe demo --help lists what it takes.",
        ),
        (["demo", "--prompts", "0"], "prompts is 0, but must be a whole number of at least 1."),
        (["demo", "--repeats", "x"], "repeats is 'x', but must be a whole number of at least 1."),
        (
            ["generate", "hello", "--no-chat", "--thinking"],
            "--thinking and --system need the chat template; drop --no-chat.",
        ),
        (
            ["info", "a", "b"],
            "strobe info takes no 'b'; strobe info --help lists what it takes.",
        ),
    ],
)
def test_invalid_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str):
    assert cli.main(arguments) == 2
    assert capsys.readouterr() == ("", f"strobe: {sentence}\n")


@pytest.mark.parametrize(
    "flags",
    [
        "--grace=nan", "--grace=inf", "--request-timeout=nan", "--request-timeout=-1",
        "--port=65536", "--port=x", "--max-waiting=-1", "--max-body-bytes=1.5",
        "--served-model-name=", "--gpu-memory-utilization=nan", "--kv-cache-memory=inf",
    ],
)  # fmt: skip
def test_invalid_server_settings(capsys: pytest.CaptureFixture[str], flags: str):
    assert cli.main(["serve", flags]) == 2
    out, err = capsys.readouterr()
    name = flags.split("=")[0].removeprefix("--").replace("-", "_")
    assert out == ""
    assert re.match(rf"strobe: {name} (is|holds) .*\.\n$", err)


def test_torch_device_is_accepted(pair: Pair):
    llm = LLM(pair.target, device=torch.device("cpu"), max_model_len=64)
    assert llm.engine.config.device == "cpu"


@pytest.mark.parametrize("side", ["target", "draft"])
def test_info_rejects_what_the_engine_rejects(
    damaged: Pair, no_weights: None, capsys: pytest.CaptureFixture[str], side: str
):
    path: Path = getattr(damaged, side) / MODEL
    path.write_bytes(path.read_bytes()[:-1])
    assert cli.main(["info", str(getattr(damaged, side))]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"strobe: {path} is damaged or cut short")
