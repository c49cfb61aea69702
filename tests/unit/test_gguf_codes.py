"""Layers that keep the codes of a GGUF file: values are those of the package gguf, bit by bit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.models.architectures import load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.linear import Linear
from strobe.models.quantization import gguf_codes
from strobe.models.quantization.gguf_codes import CODES, group_order, read_codes
from strobe.models.quantization.methods import hold_stored
from strobe.models.quantization.sizes import weight_bytes
from strobe.models.target import Target
from strobe.models.weight_loading import check_target_tensors, load_target
from tests.support.tested_formats import GGUF_TYPES

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import (  # noqa: E402
    HYBRIDS,
    hybrid,
    metadata_of,
    model_of,
    tensors_of,
    write,
)

ROWS = 6
LAYERS = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}
RECURRENT = {"in_proj_qkv", "in_proj_z", "out_proj"}
KEPT: dict[str, set[str]] = {
    "llama": LAYERS,
    "phi3": LAYERS,
    "qwen3moe": LAYERS,
    "gemma4": LAYERS,
    "qwen35": LAYERS - {"qkv_proj"} | RECURRENT | {"lm_head"},
    "qwen35moe": LAYERS - {"qkv_proj"} | RECURRENT | {"lm_head"},
    "qwen3next": LAYERS - {"qkv_proj"} | RECURRENT | {"lm_head"},
}
"""Linear layers that keep their codes. Gated attention's queries are read together with gates."""
OPTIONS: dict[str, Any] = {
    "max_positions": 16,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def random_blocks(kind: str) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
    """Return two blocks a row of random bytes, and the tensor's shape."""
    number = gguf.GGMLQuantizationType[kind]
    values, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (ROWS, 2 * size), np.uint8)
    if kind == "MXFP4":
        blocks[:, ::size] &= 127  # 255 is NaN
    return blocks, (ROWS, 2 * values)


@pytest.mark.parametrize("kind", CODES)
def test_codes_have_the_values_of_the_package(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_codes, "_VALUES_AT_ONCE", 2048)  # several pieces
    blocks, shape = random_blocks(kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    weight = read_codes(kind, torch.from_numpy(blocks.reshape(-1)), shape, None)
    actual = weight.rows(0, ROWS)
    torch.testing.assert_close(actual, torch.from_numpy(expected), rtol=0, atol=0, equal_nan=True)
    assert int(expected.size * CODES[kind].bits_per_value) == 8 * nbytes(weight)
    order = torch.tensor([3, 0, 5])
    torch.testing.assert_close(
        weight.take(order).rows(0, 3), actual[order], rtol=0, atol=0, equal_nan=True
    )
    group = weight.group
    torch.testing.assert_close(
        weight.columns(group, 2 * group).rows(1, 4),
        actual[1:4, group : 2 * group],
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def nbytes(weight: object) -> int:
    return sum(value.nbytes for value in vars(weight).values() if isinstance(value, Tensor))


def test_types_without_codes_take_values_from_tables():
    missing = set(GGUF_TYPES) - CODES.keys() - {"F32", "F16", "BF16"}
    assert missing == {"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"}


def test_factor_multiplies_codes():
    blocks, shape = random_blocks("NVFP4")
    data = torch.from_numpy(blocks.reshape(-1))
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType["NVFP4"])
    weight = read_codes("NVFP4", data, shape, 0.3)
    expected = torch.from_numpy(values) * 0.3
    torch.testing.assert_close(weight.rows(0, ROWS), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("order", "expected"),
    [([4, 5, 6, 7, 0, 1, 2, 3], [1, 0]), ([2, 3, 4, 5, 0, 1, 6, 7], None), ([0, 1, 2], None)],
)
def test_orders_of_inputs_move_whole_groups(order: list[int], expected: list[int] | None):
    groups = group_order(torch.tensor(order), 4)
    assert (None if groups is None else groups.tolist()) == expected


def load_both(file: Path) -> tuple[Target, Target]:
    """Load a file's target with codes and dequantized."""
    directory = gguf_directory(file)
    config = load_target_config(directory)
    held = hold_stored(config, directory)
    return load_target(directory, held, **OPTIONS), load_target(directory, config, **OPTIONS)


def linears(model: nn.Module) -> dict[str, Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear)}


@pytest.mark.parametrize("kind", KEPT)
def test_models_keep_codes_of_the_same_values(kind: str, tmp_path: Path):
    if kind in HYBRIDS:
        _, metadata, tensors = hybrid(kind, value_dim=32)
    else:
        metadata = metadata_of(kind)
        tensors = tensors_of(kind, model_of(kind))
    held, dense = load_both(write(tmp_path / "tiny.gguf", metadata, tensors, "Q8_0"))
    expected = linears(dense)
    kept = set[str]()
    for name, linear in linears(held).items():
        if linear.stored is not None or linear.held_experts is not None:
            kept.add(name.rpartition(".")[2])
        actual = linear.dense(torch.float32)
        torch.testing.assert_close(actual, expected[name].dense(torch.float32), rtol=0, atol=0)
    assert kept == KEPT[kind]
    for name, parameter in held.named_parameters():
        if parameter.numel():
            assert torch.equal(parameter, dense.get_parameter(name))


def test_llama_keeps_all_its_layers_and_takes_their_bytes(tmp_path: Path):
    tensors = tensors_of("llama", model_of("llama"))
    file = write(tmp_path / "tiny.gguf", metadata_of("llama"), tensors, "Q8_0")
    held, dense = load_both(file)
    assert all(linear.stored is not None for linear in linears(held).values())
    directory = gguf_directory(file)
    planned = check_target_tensors(directory, hold_stored(load_target_config(directory), directory))
    size = weight_bytes(planned, torch.float32, fp8=False)
    assert size == weight_bytes(held, torch.float32, fp8=False)
    codes = sum(linear.weight.numel() for linear in linears(dense).values())
    saved = weight_bytes(dense, torch.float32, fp8=False) - size
    assert saved == codes * (4 - 1 - 2 / 32)
    checkpoint = Checkpoint(directory)
    assert "layers.0.self_attn.q_proj.weight" in checkpoint.coded


def test_log_names_types_that_are_dequantized(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tensors = tensors_of("llama", model_of("llama"))
    file = write(tmp_path / "tiny.gguf", metadata_of("llama"), tensors, "Q8_0")
    with caplog.at_level(logging.INFO, logger="strobe"):
        load_both(file)
    (text,) = [record.getMessage() for record in caplog.records if "codes" in record.message]
    assert text.endswith(
        "14 tensors keep their codes (14 in Q8_0); 1 are dequantized: 1 in Q8_0, of embeddings or "
        "of layers that cannot keep codes."
    )
