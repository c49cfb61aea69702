"""Products of a CPU with codes as stored have exactly the values of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from strobe.config import EngineConfig
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.models.linear import Linear, StoredWeight
from strobe.models.quantization.cpu_codes import Int4Codes, Int8Codes, codes_product
from strobe.models.quantization.grouped import GridWeight, GroupWeight, unpacked
from strobe.models.target import Target
from strobe.sampling_params import SamplingParams
from strobe.tools.verify.reference import StrobeReference
from tests.support.engine_runs import make_engine, run

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="needs an x86 CPU"
)

N = 96
K = 256


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def grouped(group: int = 32, *, bits: int = 4, dtype: torch.dtype = torch.bfloat16) -> GroupWeight:
    codes = torch.randint(0, 256, (N, K * bits // 8), generator=noise(), dtype=torch.uint8)
    scale = (torch.rand(N, K // group, generator=noise()) / 50).to(dtype)
    return GroupWeight(codes=codes, scale=scale, bits=bits, group=group, inputs=K)


def with_zeros(weight: GroupWeight) -> GroupWeight:
    zero = torch.randint(0, 16, weight.scale.shape, generator=noise(), dtype=torch.uint8)
    return replace(weight, zero=zero)


def int8_rows(rows: int = N, dtype: torch.dtype = torch.float32) -> GridWeight:
    values = torch.randint(-128, 128, (N, K), generator=noise(), dtype=torch.int8)
    scale = (torch.rand(rows, 1, generator=noise()) / 50).to(dtype)
    return GridWeight(values=values, scale=scale, block=(N // rows, K))


EXACT: dict[str, Callable[[], StoredWeight]] = {
    "int4": grouped,
    "int4 of 128": lambda: grouped(128),
    "int4 by channels": lambda: grouped(K),
    "int4 with zeros": lambda: with_zeros(grouped()),
    "GPTQ": lambda: grouped(128, dtype=torch.float16),
    "AWQ": lambda: with_zeros(grouped(128, dtype=torch.float16)),
    "int8": int8_rows,
    "int8 with one scale": lambda: int8_rows(1),
    "int8 in bfloat16": lambda: int8_rows(dtype=torch.bfloat16),
    "int8, packed": lambda: grouped(K, bits=8),
}


def values_of(product: Int4Codes | Int8Codes, weight: StoredWeight) -> Tensor:
    """Return the values that a product multiplies, in float64."""
    if isinstance(product, Int8Codes):
        scale = product.scale.double() if product.factor is None else product.factor.double()
        return product.values.double() * scale[:, None]
    assert isinstance(weight, GroupWeight)
    codes = unpacked(weight.codes, 4).double().unflatten(1, (-1, weight.group)) - 8
    terms = [scale.double().transpose(0, 1)[..., None, :] for scale in product.scales]
    return sum(((codes * t[..., 0] + t[..., 1]).flatten(1) for t in terms), torch.zeros(N, K))


@pytest.mark.parametrize("form", EXACT)
def test_products_multiply_the_values_of_weights(form: str):
    weight = EXACT[form]()
    product = codes_product(weight)
    assert product is not None
    values = weight.rows(0, N)
    assert torch.equal(values_of(product, weight).float(), values)
    x = torch.randn(9, K, generator=noise()).bfloat16()
    y = product(x)
    expected = x.float() @ values.t()
    largest = float(expected.abs().max())
    assert float((y.float() - expected).abs().max()) < 0.012 * largest  # measured 0.006
    assert all(torch.equal(product(row[None])[0], of_row) for row, of_row in zip(x, y, strict=True))


@pytest.mark.parametrize(
    "weight",
    [
        grouped(16),
        replace(grouped(), is_float=True),
        replace(grouped(), global_scale=torch.tensor([0.3])),
        replace(grouped(), index=torch.arange(K) % 8),
        grouped(dtype=torch.float32),
        replace(grouped(), offset=grouped().scale),
        grouped(bits=2),
        grouped(bits=8),
        replace(int8_rows(), zero=torch.ones(N, 1, dtype=torch.int8)),
        replace(int8_rows(), values=torch.zeros(N, K).to(torch.float8_e4m3fn)),
        int8_rows().take(torch.arange(N - 1)),
    ],
)
def test_other_weights_have_no_product(weight: StoredWeight):
    assert codes_product(weight) is None


def test_engine_multiplies_codes_in_bfloat16(tmp_path: Path, caplog: Any, monkeypatch: Any):
    pytest.importorskip("gguf")
    from tests.support.gguf_files import metadata_of, model_of, tensors_of, write

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = tensors_of("llama", model_of("llama"))
    file = write(tmp_path / "tiny.gguf", metadata_of("llama"), tensors, "Q4_0")
    answers = list[Any]()
    for dtype in ("float32", "bfloat16"):
        config = EngineConfig(
            target=str(gguf_directory(file)),
            method="ngram",
            device="cpu",
            dtype=dtype,
            weight_dtype="stored",
            kv_cache_memory="8MiB",
        )
        with caplog.at_level(logging.INFO, logger="strobe"):
            engine = make_engine(config)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        answers.append(run(engine, [[5, 80, 33, 12, 7]], params))
        packed = [
            linear.stored.packed  # pyright: ignore[reportAttributeAccessIssue]
            for linear in engine.runner.model.modules()
            if isinstance(linear, Linear) and linear.stored is not None
        ]
        assert len(packed) == 8
        assert all(len(p) > 0 for p in packed) == (dtype == "bfloat16")
    assert "8 of 8 layers with codes" in caplog.text
    assert answers[0][0][:2] == answers[1][0][:2]
    target = engine.runner.model
    assert isinstance(target, Target)
    rows = StrobeReference(engine.resolved, target).logits([5, 80, 33, 12, 7], 1)
    assert rows.argmax(1).shape == (4,), "an engine with the same weights does not pack them again"
    assert run(engine, [[5, 80, 33, 12, 7]], params) == answers[1]
