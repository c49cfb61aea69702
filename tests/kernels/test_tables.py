"""Tables of kernel configurations: the package's, and what a user has measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.model_shapes import ExpertsShape, experts_shape, gemm_shapes
from strobe.kernels import experts_table
from strobe.kernels import gemm_table as tables
from strobe.kernels.gemm_table import Gemm, GemmTable


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's table of GEMMs, which is not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tables.own_path(tables.PATH)
    assert path is not None
    path.parent.mkdir(parents=True)
    tables.load.cache_clear()
    experts_table.load.cache_clear()
    yield path
    tables.load.cache_clear()
    experts_table.load.cache_clear()


def measured(shape: str, **config: int) -> dict[str, Any]:
    return {"capability": "9.0", "gemms": {"bfloat16": {"plain": {shape: {"16": config}}}}}


def test_a_users_measurements_come_first(own: Path):
    """The rest is the package's, of the same GPU or of one with the same compute capability."""
    package = tables.load()
    tables.load.cache_clear()
    own.write_text(
        json.dumps({"Own": measured("64x32", stages=7), "NVIDIA H200": measured("6144x4096")})
    )
    data = tables.load()
    small, qkv = (Gemm(n, k, torch.bfloat16) for n, k in ((64, 32), (6144, 4096)))
    assert GemmTable(data, "Own", "9.0").choose(small, 16).stages == 7
    assert GemmTable(data, "Similar", "9.0").choose(small, 16).stages == 7
    assert GemmTable(data, "Other", "8.0").choose(small, 16).stages != 7
    of_package = GemmTable(package, "NVIDIA H200", "9.0")
    assert GemmTable(data, "Own", "9.0").choose(qkv, 32) == of_package.choose(qkv, 32)
    assert GemmTable(data, "NVIDIA H200", "9.0").choose(qkv, 16) == tables.GemmConfig()
    assert GemmTable(data, "NVIDIA H200", "9.0").choose(qkv, 32) == of_package.choose(qkv, 32)
    assert GemmTable(data, "Own", "8.9").choose(small, 16).stages == 7
    assert experts_table.load()  # has no table of the user's


BROKEN = [
    "{",
    "[]",
    '{"GPU": 5}',
    '{"GPU": {"gemms": {}}}',
    json.dumps({"GPU": measured("64x32", lanes=7)}),
]


def test_an_empty_table_and_an_empty_entry_change_nothing(own: Path):
    package = tables.load()
    for text in ("{}", '{"NVIDIA H200": {"capability": "9.0"}}'):
        own.write_text(text)
        tables.load.cache_clear()
        assert tables.load() == package


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_table_of_the_user_is_named(own: Path, text: str):
    own.write_text(text)
    with pytest.raises(ValueError, match=f"{own} is no table of kernel configurations .*delete it"):
        tables.load()


def test_shapes_of_a_model():
    """Joined layers together, heads for argmaxes and logits, and the drafter's context."""
    shapes = gemm_shapes("qwen3.5-35b-a3b")
    assert {"12352x2048", "264x2048", "2048x4096:residual", "248320x2048:argmax"} <= set(shapes)
    assert {"12288x2048:gated", "2048x10240", "8192x2048"} <= set(shapes)
    assert "128x2816" in gemm_shapes("gemma-4-26b-a4b")  # of the router
    assert "64x2048" not in shapes
    assert "256x2048" not in shapes


def test_shapes_of_a_rank():
    """Its outputs are added to other ranks' before they are added to the residual stream."""
    shapes = gemm_shapes("qwen3-8b", ranks=4)
    assert {"1536x4096", "4096x1024", "6144x4096:gated", "4096x3072"} <= set(shapes)
    assert {"37984x4096:argmax", "4096x20480", "2560x4096"} <= set(shapes)


def test_shapes_of_experts():
    assert experts_shape("gpt-oss-20b") == ExpertsShape(
        "gpt-oss-20b", 32, 2880, 2880, 4, "clamped", True
    )
    assert experts_shape("gemma-4-26b-a4b", 2)[1:] == (128, 2816, 352, 8, "gelu_tanh", False)
    with pytest.raises(ValueError, match="qwen3-8b has no experts"):
        experts_shape("qwen3-8b")
