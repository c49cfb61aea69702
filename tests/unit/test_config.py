"""Settings: sizes, single values, and combinations of values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig, Limits, parse_bytes, resolve_limits


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (1, 1),
        (1073741824, 2**30),
        ("1073741824", 2**30),
        ("1GiB", 2**30),
        ("1gb", 2**30),
        ("1G", 2**30),
        (" 512 MiB ", 512 * 2**20),
        ("512m", 512 * 2**20),
        ("1.5k", 1536),
        ("2T", 2**41),
        ("7B", 7),
    ],
)
def test_sizes_are_read_in_powers_of_two(text: int | str, size: int):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    [0, -1, True, False, "", "0", "0G", "0.1", "-1G", "1X", "GiB", "1 2", "1e9", "nan", None],
)
def test_non_positive_size_is_rejected(text: object):
    with pytest.raises(ValueError, match="kv_cache_memory is") as caught:
        parse_bytes(text)  # pyright: ignore[reportArgumentType]
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_seqs": True}, "max_num_seqs is True"),
        ({"max_num_seqs": 1.5}, "max_num_seqs is 1.5"),
        ({"page_size": 0}, "page_size is 0"),
        ({"num_drafts": 0}, "num_drafts is 0"),
        ({"max_model_len": -3}, "max_model_len is -3"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory is 'much'"),
        ({"method": "eagle"}, "method is 'eagle'"),
        ({"gpu_memory_utilization": 90}, "gpu_memory_utilization is 90, but must be at most 1"),
        ({"gpu_memory_utilization": 0.9, "kv_cache_memory": "1GiB"}, "both size the KV cache"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"device": "cuda:x"}, "device is 'cuda:x'"),
        ({"overlap": 0}, "overlap is 0"),
        ({"overlap": 3}, "overlap is 3"),
        ({"ngram_min": 3, "ngram_max": 2}, "ngram_min is 3, above ngram_max 2"),
        ({"ngram_min": 0}, "ngram_min is 0"),
        ({"seed": "7"}, "seed is '7'"),
        ({"seed": True}, "seed is True"),
        ({"cuda_graphs": 1}, "cuda_graphs is 1, but must be True or False"),
        ({"load_format": "gguf"}, "load_format is 'gguf', but must be 'auto', 'dummy' or"),
        ({"weight_dtype": "int3"}, "weight_dtype is 'int3', but must be 'auto', 'stored', 'fp8'"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'int8', but must be 'auto' or 'fp8'"),
        (
            {"attention_backend": "flash"},
            "attention_backend is 'flash', but must be 'auto', 'triton'",
        ),
        ({"attention_backend": None}, "attention_backend is None"),
        ({"draft_attention_backend": "flash"}, "draft_attention_backend is 'flash'"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization is nan, but must be a"),
        ({"gpu_memory_utilization": float("inf")}, "gpu_memory_utilization is inf, but must be a"),
        ({"kv_cache_memory": float("nan")}, "kv_cache_memory is nan"),
        ({"kv_cache_memory": float("inf")}, "kv_cache_memory is inf"),
        ({"method": "none", "num_drafts": 5}, "num_drafts is 5, but method is 'none'"),
        ({"kernels": "cuda"}, "kernels is 'cuda', but must be 'auto', 'triton' or 'torch'"),
    ],
)
def test_invalid_value_is_rejected(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        EngineConfig().with_(**changes)


@pytest.mark.parametrize("name", ["cpu", "cuda", "cuda:0", "cuda:1"])
def test_torch_devices_become_their_names(name: str):
    assert EngineConfig(device=torch.device(name)).device == name  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="device is device\\(type='meta'\\); name auto, cpu, cuda"):
        EngineConfig(device=torch.device("meta"))  # pyright: ignore[reportArgumentType]


def test_model_directory_may_be_a_path():
    config = EngineConfig(target=Path("a/b"), draft=Path("c"))  # pyright: ignore[reportArgumentType]
    assert (config.target, config.draft) == ("a/b", "c")


def test_unknown_field_is_named():
    with pytest.raises(TypeError, match=r"EngineConfig has no field 'page_sise'\.$"):
        EngineConfig(page_sise=3)  # pyright: ignore[reportCallIssue]


def test_unknown_option_is_rejected_with_options_listed():
    with pytest.raises(ValueError, match="page_sise is not an engine option; there are") as caught:
        EngineConfig().with_(page_sise=3)
    assert "page_size" in str(caught.value)


def test_every_option_has_a_sentence_of_help():
    for field in dataclasses.fields(EngineConfig):
        assert field.metadata["help"].endswith("."), field.name


def drafter(block: int) -> Any:
    """Return the parts of a drafter's config that limits depend on."""
    return SimpleNamespace(block_size=block, block_drafts=block - 1, recommended_drafts=None)


def limits(
    *, model_max: int = 100, block: int | None = None, method: str = "none", **changes: object
) -> Limits:
    config = EngineConfig(target="t").with_(**changes)
    draft = None if block is None else drafter(block)
    return resolve_limits(config, model_max=model_max, draft=draft, method=method)


def test_context_defaults_to_model_limit():
    assert limits().max_model_len == 100
    assert limits(max_model_len=60).max_model_len == 60
    with pytest.raises(ValueError, match=r"max_model_len is 101.*at most 100"):
        limits(max_model_len=101)
    with pytest.raises(ValueError, match="no room for an answer"):
        limits(max_model_len=1)
    assert limits(max_model_len=2).max_model_len == 2


def test_num_drafts_defaults_to_block_size_less_one():
    assert limits(block=16, method="dflash").num_drafts == 15
    assert limits(block=16, method="dflash", num_drafts=3).num_drafts == 3
    assert limits(block=16, method="dflash", num_drafts=15).num_drafts == 15
    with pytest.raises(ValueError, match=r"num_drafts is 16.*1 to 15"):
        limits(block=16, method="dflash", num_drafts=16)


def test_lookahead_is_longer_of_block_and_verified_rows():
    assert limits(block=16, method="dflash").lookahead == 16
    assert limits(block=16, method="dflash", num_drafts=3).lookahead == 16
    assert limits(method="ngram", num_drafts=40).lookahead == 41
    assert limits().lookahead == 1


def test_prompt_lookup_has_default_num_drafts():
    assert limits(method="ngram").num_drafts == 8
    assert limits(method="ngram", num_drafts=40).num_drafts == 40
    assert limits(method="none").num_drafts == 0
    with pytest.raises(ValueError, match="nothing drafts"):
        limits(method="none", num_drafts=4)


def test_row_budget_fits_every_request_verifying():
    assert limits().max_num_batched_tokens == 2048
    assert limits(block=16, method="dflash", max_num_seqs=200).max_num_batched_tokens == 3200
    exact = limits(block=16, method="dflash", max_num_seqs=4, max_num_batched_tokens=64)
    assert exact.max_num_batched_tokens == 64
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 63.*raise it to 64"):
        limits(block=16, method="dflash", max_num_seqs=4, max_num_batched_tokens=63)


@pytest.mark.parametrize(("length", "size", "pages"), [(100, 16, 7), (96, 16, 6), (1, 256, 1)])
def test_page_columns_cover_the_context(length: int, size: int, pages: int):
    assert Limits(length, 1, 1, 0, size).max_pages == pages


def test_gpu_prefills_larger_chunks_and_smaller_mixed_ones():
    config = EngineConfig(target="t")
    options = {"model_max": 100, "draft": drafter(16), "method": "dflash"}
    cpu, gpu = resolve_limits(config, **options), resolve_limits(config, **options, gpu=True)
    assert (cpu.max_num_batched_tokens, cpu.max_mixed_tokens) == (2048, None)
    assert (gpu.max_num_batched_tokens, gpu.max_mixed_tokens) == (8192, 512)
