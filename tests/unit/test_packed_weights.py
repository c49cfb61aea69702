"""Weights packed for torch's products on CPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gguf import metadata_of, model_of, tensors_of, write
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from strobe import LLM, SamplingParams
from strobe.config import EngineConfig
from strobe.engine.build import build, resolve
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.models.architectures import load_target_config
from strobe.models.linear import Linear
from strobe.models.quantization import packed as packed_weights
from strobe.models.quantization.packed import (
    FORMATS,
    GROUP,
    BFloat16,
    Float16,
    Float32,
    Int4,
    Int8,
    int4_groups,
    int8_rows,
    multiplies_bfloat16,
    packed_format,
)
from strobe.models.quantization.sizes import weight_bytes
from strobe.models.weight_loading import check_target_tensors
from strobe.tools.bench.bench_report import shapes_of
from strobe.tools.bench.floor import Widths
from strobe.tools.checkpoint_info import describe
from strobe.tools.doctor.pair_checks import memory_facts
from tests.support.engine_runs import drain, make_engine, run
from tests.support.full_marks import full_where
from tests.support.scripted_drafting import Scripted, wavering
from tests.support.tiny_checkpoints import edit_json, make_draft, make_target

gguf = pytest.importorskip("gguf")

BOUNDS = {"float32": 1e-6, "bfloat16": 6e-3, "float16": 5e-4, "int8": 2e-2, "int4": 0.12}
"""Of the error's norm, relative to the product's, for weights of a normal distribution."""
RUNNING = [name for name in FORMATS if name != "bfloat16" or multiplies_bfloat16()]
"""The formats that this CPU has products for."""
PROMPTS = [[5, 9, 11, 3], [4, 4, 8], [60, 1, 2, 33, 17, 9]]
COLD = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack weights as small as these models'."""
    monkeypatch.setattr(packed_weights, "SMALL", 0)


def test_small_weights_in_float32_stay_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_target(tmp_path, vocab_size=128)
    monkeypatch.setattr(packed_weights, "SMALL", 128 * 32)
    model: Any = build(resolve(config(tmp_path, method="none"))).runner.model
    assert isinstance(model.output.product, Float32)
    assert model.layers[0].self_attn.o_proj.product is None


def layer(rows: int = 96, columns: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a weight, a bias and 33 inputs."""
    noise = torch.Generator().manual_seed(2)
    shapes = (rows, columns), (rows,), (33, columns)
    weight, bias, x = (torch.randn(shape, generator=noise) for shape in shapes)
    return weight, bias, x


def config(target: Path, **options: Any) -> EngineConfig:
    return EngineConfig(str(target), device="cpu", max_model_len=64, page_size=4, **options)


@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_is_close_to_the_weight(name: str, dtype: torch.dtype):
    weight, bias, x = layer()
    expected = x.double() @ weight.T.double() + bias
    y = FORMATS[name](weight, bias.to(dtype))(x.to(dtype))
    assert y.dtype == dtype
    rounding = 0 if dtype == torch.float32 else 6e-3
    assert (y - expected).norm() < (BOUNDS[name] + rounding) * expected.norm()


@pytest.mark.parametrize("name", RUNNING)
def test_rows_are_the_same_alone_and_among_others(name: str):
    weight, bias, x = layer(192, 320)
    product = FORMATS[name](weight, bias)
    alone = torch.cat([product(row[None]) for row in x])
    for count in (2, 4, 7, 8, 16, 33):
        rows = product(x[:count])
        if name == "float16":  # FBGEMM sums in another order for one or two rows
            torch.testing.assert_close(rows, alone[:count], rtol=0, atol=1e-4)
        else:
            assert torch.equal(rows, alone[:count])


def test_float16_keeps_weights_trained_in_bfloat16():
    weight, _, x = layer()
    weight = weight.bfloat16().float()
    expected = x.double() @ weight.T.double()
    assert (Float16(weight, None)(x) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1"])
def test_int4_keeps_the_codes_of_a_gguf_file(stored: str):
    weight = layer(64, 128)[0].numpy()
    number = gguf.GGMLQuantizationType[stored]
    read = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, number), number))
    codes, scales = int4_groups(read)
    scale, zero = scales.float().unbind(2)
    back = (codes.view(64, -1, GROUP) - 8.0) * scale[..., None] + zero[..., None]
    groups = read.view(64, -1, GROUP)
    largest = groups.abs().amax(2, keepdim=True)
    assert ((back - groups).abs() <= largest * 2.0**-7).all(), "scales are rounded to bfloat16"
    assert len(codes.unique()) == 16


@pytest.mark.parametrize("stored", ["Q8_0", "Q4_0", "Q4_1"])
def test_float32_multiplies_the_stored_values_of_a_gguf_file_exactly(stored: str):
    weight = layer(64, 128)[0].numpy()
    number = gguf.GGMLQuantizationType[stored]
    read = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight, number), number))
    columns = torch.eye(128)
    assert torch.equal(Float32(read, None)(columns), read.T)
    rounded = Float16(read, None)(columns)
    assert (rounded - read.T).abs().max() <= read.abs().max() * 2.0**-11


def test_constant_groups_and_rows_of_zeros_are_kept():
    weight = torch.zeros(3, 2 * GROUP)
    weight[1], weight[2, :GROUP] = 0.75, -3.0
    codes, scales = int4_groups(weight)
    back = (codes.view(3, 2, GROUP) - 8.0) * scales[..., :1].float() + scales[..., 1:].float()
    torch.testing.assert_close(back.view(3, -1), weight, rtol=2.0**-8, atol=0)
    values, scale = int8_rows(weight)
    torch.testing.assert_close(values * scale.float()[:, None], weight, rtol=2.0**-7, atol=0)


@full_where(lambda name, tied: tied is (list(RUNNING).index(name) % 2 == 0))
@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "own head"])
def test_drafting_changes_no_answer(name: str, tied: bool, tmp_path: Path):
    target = tmp_path / "target"
    make_target(target, tie_word_embeddings=tied, intermediate_size=64)
    plain = run(make_engine(config(target, method="none", weight_dtype=name)), PROMPTS, COLD)
    engine = make_engine(
        config(target, method="ngram", num_drafts=6, weight_dtype=name),
        lambda parts, _: Scripted(parts.state, 6, wavering),
        names=["ngram"],
    )
    script: Any = engine.proposers["ngram"]
    requests = [engine.add(prompt, COLD) for prompt in PROMPTS]
    for request, prompt, answer in zip(requests, PROMPTS, plain, strict=True):
        script.answers[request] = prompt + answer
    drain(engine, requests)
    assert [request.output_ids for request in requests] == plain
    assert sum(request.draft_counts.num_accepted for request in requests) > 20


@full_where(lambda name, own_head: own_head is (list(RUNNING).index(name) % 2 == 0))
@pytest.mark.parametrize("name", RUNNING)
@pytest.mark.parametrize("own_head", [True, False])
def test_both_models_are_packed(name: str, own_head: bool, tmp_path: Path):
    make_target(tmp_path / "target", tie_word_embeddings=not own_head)
    draft = make_draft(tmp_path / "draft")
    options = {"draft": str(draft), "method": "dflash", "weight_dtype": name}
    resolved = resolve(config(tmp_path / "target", **options))
    parts = build(resolved)
    drafter: Any = parts.proposers.by_name["dflash"]
    for model in (parts.runner.model, drafter.model):
        linears = [module for module in model.modules() if isinstance(module, Linear)]
        assert len(linears) > 8
        assert all(linear.weight.numel() == 0 for linear in linears)
        assert isinstance(model.output.product, Float32 if name == "float32" else Float16)
    engine = make_engine(config(tmp_path / "target", **options))
    plain = make_engine(config(tmp_path / "target", method="none", weight_dtype=name))
    assert run(engine, PROMPTS, COLD) == run(plain, PROMPTS, COLD)


def test_float16_answers_as_float32(tmp_path: Path):
    make_target(tmp_path, LlamaForCausalLM, attention_bias=True, mlp_bias=True)
    answers = [
        run(make_engine(config(tmp_path, method="none", weight_dtype=name)), PROMPTS, COLD)
        for name in ("float32", "float16")
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1"])
def test_gguf_file_answers_the_same_in_int4(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = tensors_of("llama", model_of("llama"))
    file = write(tmp_path / "tiny.gguf", metadata_of("llama"), tensors, stored)
    params = SamplingParams(temperature=0, max_tokens=6)
    texts = []
    for name in ("auto", "int4"):
        llm = LLM(file, method="none", device="cpu", weight_dtype=name)
        outputs = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], params, use_tqdm=False)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert texts[0] == texts[1]


def test_sizes_that_int4_does_not_take_are_in_float16(tmp_path: Path):
    make_target(tmp_path)
    engine = make_engine(config(tmp_path, method="none", weight_dtype="int4"))
    mlp = engine.runner.model.layers[0].mlp
    assert isinstance(mlp.gate_up_proj.product, Int4)
    assert isinstance(mlp.down_proj.product, Float16)


def make_experts(path: Path) -> None:
    sizes = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
    make_target(path, Qwen3MoeForCausalLM, **sizes)


def test_experts_are_a_one_line_error(tmp_path: Path):
    make_experts(tmp_path)
    message = "weight_dtype is 'int8', but experts have no product with packed weights; use"
    with pytest.raises(ValueError, match=message):
        resolve(config(tmp_path, weight_dtype="int8"))


def test_auto_packs_what_is_beside_experts(tmp_path: Path):
    make_experts(tmp_path)
    resolved = resolve(config(tmp_path, method="none"))
    assert resolved.backends.weights.packed == "float32"
    layer: Any = build(resolved).runner.model.layers[0]
    assert isinstance(layer.self_attn.qkv_proj.product, Float32)


@pytest.mark.parametrize(
    ("stored", "dtype", "packed"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "auto", "float16"),
        ("float16", "float32", "float16"),
        ("bfloat16", "bfloat16", None),
    ],
)
def test_auto_follows_the_stored_dtype(
    stored: str, dtype: Any, packed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packed_weights, "multiplies_bfloat16", lambda: False)
    make_target(tmp_path)
    edit_json(tmp_path / "config.json", dtype=stored)
    options = config(tmp_path, dtype=dtype)
    assert resolve(options).backends.weights.packed == packed
    engines = SimpleNamespace(supported_engines=["qnnpack"])
    monkeypatch.setattr(torch.backends, "quantized", engines)
    assert resolve(options).backends.weights.packed == (packed and "float32")


@pytest.mark.parametrize("is_native", [True, False])
def test_bfloat16_is_packed_where_the_cpu_multiplies_it(
    is_native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(packed_weights, "multiplies_bfloat16", lambda: is_native)
    make_target(tmp_path)
    for weight_dtype in ("auto", "stored"):
        options = config(tmp_path, dtype="bfloat16", weight_dtype=weight_dtype)
        assert resolve(options).backends.weights.packed == ("bfloat16" if is_native else None)
    asked = config(tmp_path, weight_dtype="bfloat16")
    if is_native:
        assert resolve(asked).backends.weights.packed == "bfloat16"
        return
    message = "weight_dtype is 'bfloat16', but this CPU does not multiply bfloat16 natively"
    with pytest.raises(ValueError, match=message):
        resolve(asked)


@pytest.mark.skipif(not multiplies_bfloat16(), reason="needs AVX512-BF16 or AMX")
@pytest.mark.parametrize(("dtype", "head"), [("float32", Float16), ("bfloat16", BFloat16)])
def test_models_in_bfloat16_have_the_head_in_it(dtype: Any, head: type, tmp_path: Path):
    make_target(tmp_path, tie_word_embeddings=False)
    options = config(tmp_path, method="none", dtype=dtype, weight_dtype="bfloat16")
    engine = make_engine(options)
    model: Any = engine.runner.model
    assert isinstance(model.output.product, head)
    assert isinstance(model.layers[0].self_attn.qkv_proj.product, BFloat16)
    assert all(map(len, run(engine, PROMPTS, COLD)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafter_can_have_a_format_of_its_own(tmp_path: Path, dtype: str):
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    make_target(tmp_path / "target", family=Qwen3MoeForCausalLM, **shape)
    draft = str(make_draft(tmp_path / "draft", width=32))
    options = {"dtype": dtype, "weight_dtype": "auto", "adaptive": False}
    target = tmp_path / "target"
    plain = run(make_engine(config(target, method="none", **options)), PROMPTS, COLD)
    engine = make_engine(config(target, draft=draft, draft_weight_dtype="int8", **options))
    assert run(engine, PROMPTS, COLD) == plain
    assert engine.stats.draft_counts.num_verified > 0
    drafter: Any = engine.components.proposers.by_name["dflash"]
    assert isinstance(drafter.model.layers[0].mlp.gate_up_proj.product, Int8)
    assert drafter.model.output.product is engine.components.runner.model.output.product
    message = "draft_weight_dtype is 'fp8', but .*; use draft_weight_dtype auto"
    with pytest.raises(ValueError, match=message):
        resolve(config(target, draft=draft, draft_weight_dtype="fp8", **options))


def test_gpu_is_a_one_line_error():
    nothing: Any = None
    message = "weight_dtype is 'float16', but the device is cuda:0, and packed weights run on a CPU"
    with pytest.raises(ValueError, match=message):
        packed_format("float16", nothing, [], torch.device("cuda", 0), torch.bfloat16)
    assert packed_format("int4", nothing, [], torch.device("cuda", 0), torch.bfloat16) is None


def test_torch_without_fbgemm_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_target(tmp_path)
    engines = SimpleNamespace(supported_engines=["qnnpack"])
    monkeypatch.setattr(torch.backends, "quantized", engines)
    message = "weight_dtype is 'float16', but torch has no FBGEMM here, which needs a CPU with AVX2"
    with pytest.raises(ValueError, match=message):
        resolve(config(tmp_path, weight_dtype="float16"))


def test_memory_for_loading_covers_the_packed_weights(tmp_path: Path):
    make_target(tmp_path, tie_word_embeddings=True, intermediate_size=64)
    target = check_target_tensors(tmp_path, load_target_config(tmp_path))
    linears = [m for m in target.modules() if isinstance(m, Linear)]
    values = sum(linear.weight.numel() for linear in linears)
    plain = weight_bytes(target, torch.float32, fp8=False)
    head = target.embed_tokens.weight.numel()
    packed = weight_bytes(target, torch.float32, fp8=False, packed="float16")
    assert packed == plain - 2 * values + 2 * head
    assert weight_bytes(target, torch.float32, fp8=False, packed="float32") == plain + 4 * head


def test_reports_name_the_packed_format(tmp_path: Path):
    make_target(tmp_path / "target")
    make_draft(tmp_path / "draft")
    options = {"draft": str(tmp_path / "draft"), "weight_dtype": "int4"}
    resolved = resolve(config(tmp_path / "target", **options))
    bill = memory_facts(resolved)
    assert bill["held in"] == "int4, heads in float16; the most at loading"
    assert shapes_of(resolved).widths == Widths(0.625, 2, 4, 4, draft=0.625)


def test_info_counts_the_types_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tensors = tensors_of("llama", model_of("llama"))
    file = write(tmp_path / "tiny.gguf", metadata_of("llama"), tensors, "Q4_1")
    facts = describe(gguf_directory(file))
    assert facts["tensors"].startswith("15 in Q4_1, 5 in F32; dequantized when loaded")
