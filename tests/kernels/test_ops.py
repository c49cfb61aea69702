"""Models with Triton kernels against the same models in plain torch, over a simple cache, and the
kernels that a layer launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma4ForCausalLM,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from strobe.attention.backend import Batch
from strobe.attention.recurrent_backend import RecurrentPlan
from strobe.kernels import linear
from strobe.kernels.coded import CodedWeight, coded_gemm
from strobe.kv.kv_store import NO_SCALE, KVScale, KVSpec, KVStore
from strobe.kv.states import StateStore
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.heads.head import BlockRows, Drafts
from strobe.models.model_config import DecoderConfig, TargetConfig
from strobe.models.ops import triton_ops
from strobe.models.ops.torch_ops import TorchOps
from strobe.models.ops.triton_ops import TritonOps
from strobe.models.quantization.kernel_weights import join_all, join_parts
from strobe.models.quantization.methods import METHODS, hold_stored
from strobe.models.weight_loading import load_draft, load_target
from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.runner.step_ops.triton_step_ops import TritonStepOps
from strobe.sampling.candidates import Candidates, HeadOutputs
from strobe.sampling.sampler import RowParams, best_two
from strobe.sampling.walk import WalkNoise
from tests.support.draft_heads import HEADS
from tests.support.full_marks import full_where
from tests.support.int8_format import Int8, to_int8
from tests.support.quantized_checkpoints import is_linear, quantize
from tests.support.recurrent_checkpoints import EXPERTS, make_hybrid, make_next
from tests.support.stored_weights import store
from tests.support.tiny_checkpoints import make_draft, make_target

IDS, ROWS = [3, 1, 4, 1, 5], 5


class Cache:
    """Keys and values of one sequence from its start, with attention over all of it."""

    def __init__(self, decoder: DecoderConfig, device: torch.device):
        shapes = [decoder.shape_of(i) for i in range(len(decoder.masks))]
        self.layers = [
            torch.zeros(ROWS, 2, shape.num_kv_heads, shape.head_dim, device=device)
            for shape in shapes
        ]
        self.rows, self.sizes = torch.arange(ROWS, device=device), None

    def slots(self, layer: int) -> Tensor:
        return self.rows

    def scale(self, layer: int) -> KVScale:
        return NO_SCALE

    def kv(self, layer: int) -> Tensor:
        return self.layers[layer]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.layers[layer][:, 0], self.layers[layer][:, 1] = k, v
        return self.over(layer, q, sinks)

    def over(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        data = self.layers[layer]
        keys, values = data.repeat_interleave(q.shape[1] // data.shape[2], 2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[2] ** -0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if sinks is not None:
            total = total + sinks.exp()[:, None, None]
        return torch.einsum("hqk,khd->qhd", weights / total, values).flatten(1)


def plan_of(config: TargetConfig, cache: Cache, device: torch.device) -> Any:
    """The cache's attention, with the states of recurrent layers where there are any."""
    if config.states is None:
        return cache
    nothing: Any = None
    one = torch.zeros(1, dtype=torch.int64, device=device)
    batch = Batch(
        ids=nothing,
        positions=torch.arange(ROWS, device=device),
        kv_slots=[nothing],
        slots=one,
        starts=one,
        sizes=one + ROWS,
        row_starts=one,
        offsets=torch.arange(ROWS, device=device),
        longest=ROWS,
        draft_lengths=one,
        tables=nothing,
        page_size=1,
    )
    states = StateStore(config.states, 1, 2, torch.float32, device)
    return RecurrentPlan(cache, batch, states)


def contiguous(model: torch.nn.Module) -> None:
    """Make parameters contiguous; loading arranges them for a CPU's GEMMs."""
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()


def run_both(
    path: Path, device: torch.device, *, fp8: bool = False, held: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Run five rows by kernels and in plain torch. Return pairs of every layer's output, then of
    every layer's keys and values, then of the logits; check that the argmax is equal. fp8: the
    kernels' model keeps FP8 linear layers in FP8. held: it keeps quantized weights as stored."""
    config = load_target_config(path)
    layers = range(config.decoder.num_layers + 1)
    options: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32, "device": device}
    plain = load_target(path, config, **options)
    own = hold_stored(config, path) if held else config
    fused = load_target(path, own, **options, fp8=fp8)
    ids, places = torch.tensor(IDS, device=device), torch.arange(ROWS, device=device)
    caches = [Cache(config.decoder, device) for _ in range(2)]
    contiguous(fused)
    join_all(fused)
    join_parts(fused)
    fused.ops = TritonOps(device, torch.float32)
    x, expected = plain(ids, places, plan_of(config, caches[0], device), tuple(layers))
    y, actual = fused(ids, places, plan_of(config, caches[1], device), tuple(layers))
    assert expected is not None
    assert actual is not None
    if not fp8:
        assert torch.equal(fused.argmax(y), plain.argmax(x))
    return [
        *zip(actual.chunk(len(layers), 1), expected.chunk(len(layers), 1), strict=True),
        *zip(caches[1].layers, caches[0].layers, strict=True),
        (fused.head(y), plain.head(x)),
    ]


MOE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 3}
GPT_OSS = {"intermediate_size": 32, "num_local_experts": 6, "num_experts_per_tok": 2}
GEMMA4: dict[str, Any] = {
    "family": Gemma4ForCausalLM,
    "embedding": 0.2,
    "final_logit_softcapping": 30.0,
    "rope_theta": None,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
GEMMA4_MOE: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
FAMILIES: dict[str, Callable[..., Any]] = {
    "qwen3": partial(make_target, family=Qwen3ForCausalLM),
    "llama": partial(make_target, family=LlamaForCausalLM),
    "qwen2": partial(make_target, family=Qwen2ForCausalLM),
    "biased": partial(make_target, family=LlamaForCausalLM, attention_bias=True, mlp_bias=True),
    "qwen3_moe": partial(make_target, family=Qwen3MoeForCausalLM, **MOE),
    "gpt_oss": partial(make_target, family=GptOssForCausalLM, **GPT_OSS),
    "qwen3_5": partial(make_hybrid, **HYBRID),
    "qwen3_5_moe": partial(make_hybrid, **HYBRID, **EXPERTS),
    "qwen3_next": partial(make_next, **HYBRID),
    "joined": partial(make_hybrid, **HYBRID, **EXPERTS | {"shared_expert_intermediate_size": 24}),
    "gemma4": partial(make_target, **GEMMA4),
    "gemma4_moe": partial(make_target, **GEMMA4, **GEMMA4_MOE),
}
"""Covers queries and keys with and without norms; biases, sinks, gates; values that are normed or
equal to the keys; rope over part of a head."""


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels_match_layer_operations(tmp_path: Path, device: torch.device, family: str):
    FAMILIES[family](tmp_path, head_dim=64, num_hidden_layers=2, hidden_size=64)
    for actual, expected in run_both(tmp_path, device):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


class CountingOps(TorchOps):
    """Counts a forward's calls of the operations by which layers differ."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def attention(self, *args: Any, **options: Any) -> Tensor:
        self.calls["attention"] += 1
        return super().attention(*args, **options)

    def experts(self, *args: Any, **options: Any) -> Tensor:
        self.calls["experts"] += 1
        return super().experts(*args, **options)

    def delta_rule(self, *args: Any, **options: Any) -> Tensor:
        self.calls["delta_rule"] += 1
        return super().delta_rule(*args, **options)


@pytest.mark.parametrize(
    ("family", "calls"),
    [
        ("qwen3", {"attention": 2}),
        ("qwen3_moe", {"attention": 2, "experts": 2}),
        ("gpt_oss", {"attention": 2, "experts": 2}),
        ("gemma4_moe", {"attention": 2, "experts": 2}),
        ("qwen3_5", {"attention": 1, "delta_rule": 1}),
        ("qwen3_5_moe", {"attention": 1, "delta_rule": 1, "experts": 2}),
    ],
)
def test_layers_call_ops_for_fusable_work(
    tmp_path: Path, device: torch.device, family: str, calls: dict[str, int]
):
    FAMILIES[family](tmp_path, head_dim=64, num_hidden_layers=2, hidden_size=64)
    config = load_target_config(tmp_path)
    model = load_target(tmp_path, config, max_positions=16, dtype=torch.float32, device=device)
    model.ops = CountingOps()
    ids, places = torch.tensor(IDS, device=device), torch.arange(ROWS, device=device)
    model(ids, places, plan_of(config, Cache(config.decoder, device), device), ())
    assert model.ops.calls == calls


DENSE = ("layers.0.", "layers.1.self_attn.q_proj", "layers.1.mlp.g", "layers.2.mlp.down_proj")


def test_fp8_and_dense_weights_mix(tmp_path: Path, device: torch.device):
    """The first layer is dense and so exact; later ones have FP8 linear layers before and after
    dense ones."""
    make_target(tmp_path / "fp8", head_dim=64, num_hidden_layers=3, hidden_size=64)

    def stored(name: str) -> bool:
        return is_linear(name) and not name.removeprefix("model.").startswith(DENSE)

    quantize(tmp_path / "fp8", tmp_path / "plain", (128, 128), stored=stored)
    pairs = run_both(tmp_path / "fp8", device, fp8=True)
    features, caches, logits = pairs[:4], pairs[4:7], pairs[7]
    for actual, expected in features[:2]:
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    keys_and_values = tuple(map(torch.stack, zip(*caches, strict=True)))
    for actual, expected in [*features[2:], keys_and_values, logits]:
        error = (actual - expected).norm() / expected.norm()
        assert 1e-3 < error < 0.1, "measured 0.027 to 0.048, since x is in FP8, too"


@pytest.mark.parametrize("family", ["qwen3", "biased", "qwen3_moe"])
def test_formats_without_a_kernel_are_dequantized(
    tmp_path: Path, device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(METHODS, "int8", Int8())
    FAMILIES[family](tmp_path / "int8", head_dim=64, num_hidden_layers=2, hidden_size=64)
    to_int8(tmp_path / "int8", tmp_path / "plain")
    for actual, expected in run_both(tmp_path / "int8", device):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "name"),
    [("qwen3", "NVFP4"), ("biased", "int4"), ("biased", "AWQ"), ("qwen3_moe", "FP8")],
)
def test_weights_held_as_stored_have_kernels(
    tmp_path: Path, device: torch.device, family: str, name: str, monkeypatch: pytest.MonkeyPatch
):
    FAMILIES[family](tmp_path / "held", head_dim=64, num_hidden_layers=2, hidden_size=64)
    store(tmp_path / "held", tmp_path / "plain", name, lambda n: n.endswith("_proj.weight"))
    products = list[CodedWeight]()

    def counted(x: Tensor, weight: CodedWeight, *rest: Any) -> Tensor:
        products.append(weight)
        return coded_gemm(x, weight, *rest)

    monkeypatch.setattr("strobe.kernels.linear.coded_gemm", counted)
    for actual, expected in run_both(tmp_path / "held", device, held=True):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert len(products) == 2 * (2 if family == "qwen3_moe" else 4)
    assert {len(weight.parts) for weight in products} == {1}  # joined


def pair(tmp_path: Path, device: torch.device, **changes: Any) -> tuple[Any, Any]:
    """Return a target and a drafter in plain torch."""
    options: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32, "device": device}
    make_target(tmp_path / "target", head_dim=64)
    target = load_target(tmp_path / "target", load_target_config(tmp_path / "target"), **options)
    path = make_draft(tmp_path / "draft", width=64, **changes)
    contiguous(target)
    return target, load_draft(path, load_draft_config(path), target, **options)


@pytest.mark.parametrize("changes", [{}, {"sinks": True}, {"bias": True}], ids=str)
def test_kernels_match_drafter_layer_operations(
    tmp_path: Path, device: torch.device, changes: dict[str, bool]
):
    """Compares the block's hidden states, tokens and keys and values, and the context's keys and
    values of all layers."""
    _, model = pair(tmp_path, device, **changes)
    decoder = model.config.decoder
    ids, places = (torch.tensor(x, device=device) for x in (IDS, [4, 5, 6, 7, 8]))
    features = torch.randn(ROWS, model.fc.in_features, generator=torch.Generator().manual_seed(3))
    features = features.to(device)
    results: list[list[Tensor]] = []
    for kernels in (False, True):
        if kernels:
            contiguous(model)
            model.ops = TritonOps(device, torch.float32)
        block = Cache(decoder, device)
        store = KVStore(KVSpec(((2, 64),) * 2, torch.float32), [2], 16, device)
        x, _ = model(ids, places, block)
        model.write_context(features, places, places + 16, store)
        results.append([x, *block.layers, model.head(x), model.argmax(x), store.data])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)


def lead(noise: WalkNoise, ops: StepOps, outputs: HeadOutputs, count: int) -> Candidates:
    """Return the candidates that lead the race of blocks of two drafts, without filters."""
    drafts = torch.arange(4, device=outputs.raw.device)
    temperature = noise.temperatures[drafts // 2].contiguous()
    none = torch.zeros_like(temperature)
    rows = RowParams(
        temperature=temperature,
        top_p=none + 1,
        min_p=none,
        top_k=none.long(),
        key=noise.keys[drafts // 2],
        position=noise.positions[drafts // 2] + drafts % 2,
    )
    places, joins = ops.race_candidates(
        outputs.logits(), rows, count, outputs.tokens, filtered=False
    )
    values = outputs.raw.gather(1, places).float()
    return Candidates(values.masked_fill(~joins, torch.nan), places)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # by the interpreter's NumPy
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@full_where(lambda head, sampled: sampled is (list(HEADS).index(head) % 2 == 0))
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("head", HEADS)
def test_kernels_match_drafters_with_heads(
    tmp_path: Path, device: torch.device, head: str, sampled: bool
):
    """Compares the rows of two blocks, their drafts and the evidence of these."""
    target, _ = pair(tmp_path, device)
    path = HEADS[head](tmp_path / "draft", tmp_path / "with head")
    options: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32, "device": device}
    model = load_draft(path, load_draft_config(path), target, **options)
    ids, places = (torch.tensor(x, device=device) for x in (IDS, [4, 5, 6, 7, 8]))
    offsets = torch.tensor([0, 1, 0, 1, 2], device=device)
    noise = None
    if sampled:
        keys = torch.tensor([3, 4], device=device)
        noise = WalkNoise(keys, keys + 1, torch.tensor([0.8, 0.0], device=device))

    def choose(logits: Tensor, first: int) -> Drafts:
        tokens, margins = best_two(logits.flatten(0, 1))
        shape = logits.shape[:2]
        return Drafts(tokens.view(shape), margins.view(shape))

    results: list[Any] = []
    for kernels in (False, True):
        step_ops = StepOps()
        if kernels:
            contiguous(model)
            model.ops = TritonOps(device, torch.float32)
            step_ops = TritonStepOps()
        x, _ = model(ids, places, Cache(model.config.decoder, device), offsets=offsets)
        block = BlockRows(
            hidden=x[:4].unflatten(0, (2, 2)),
            anchor=ids[:2],
            anchor_hidden=x[:4:2] if model.draft_head.reads_anchor else None,
            greedy=not sampled,
            margins=True,
            choose=choose,
            noise=noise,
            lead=partial(lead, noise, step_ops) if noise else None,
        )
        results.append([x, *model.draft_head(model, block)])
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-4)


class Launches(TorchDispatchMode):
    """Records device work in order: kernels by their role, torch's operations by their names;
    views and allocations do not count."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, attend: Cache):
        super().__init__()
        self.names: list[str] = []
        self.inside = False
        for name in ("gather_rows", "rms_norm", "qk_norm_rope_store", "context_store", "experts"):
            monkeypatch.setattr(triton_ops, name, self.recorded(name, getattr(triton_ops, name)))
        for name in ("gate", "add_norm"):
            call = getattr(triton_ops.gates, name)
            monkeypatch.setattr(triton_ops.gates, name, self.recorded(name, call))
        monkeypatch.setattr(triton_ops, "mix", self.recorded("mix", triton_ops.mix))
        monkeypatch.setattr(attend, "over", self.recorded("attention", attend.over))
        monkeypatch.setattr(linear, "launch", self.recorded_linear(linear.launch))

    def recorded(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            self.names.append(name)
            self.inside = True
            try:
                return call(*args, **options)
            finally:
                self.inside = False

        return wrapper

    def recorded_linear(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(config: Any, gemm: Any, *args: Any, **options: Any) -> Any:
            fields = options["x"]._asdict() | options["epilogue"]._asdict()
            fusions = ("norm", "scaled", "residual", "next_norm", "bias")
            words = [name for name in fusions if fields[name] is not None]
            words += [name for name in ("gated", "argmax") if getattr(gemm, name)]
            call = self.recorded(" ".join(["linear", *words]), launch)
            return call(config, gemm, *args, **options)

        return wrapper

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        free = func.is_view or "empty" in func.__name__
        if not self.inside and not free:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def launches(
    family: str, path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, layers: int = 2
) -> tuple[list[str], Tensor, Tensor | None]:
    """Run five rows of a model and its argmax by kernels. Return what it launched, the residual
    stream and the features after the first and the last layer."""
    FAMILIES[family](path, head_dim=64, num_hidden_layers=layers, hidden_size=64)
    config = load_target_config(path)
    model = load_target(path, config, max_positions=16, dtype=torch.float32, device=device)
    contiguous(model)
    join_all(model)
    model.ops = TritonOps(device, torch.float32)
    ids, places = torch.tensor(IDS, device=device), torch.arange(ROWS, device=device)
    attend = Cache(config.decoder, device)
    plan = plan_of(config, attend, device)
    with Launches(monkeypatch, attend) as recorded:
        x, features = model(ids, places, plan, (1, layers))
        model.argmax(x)
    return recorded.names, x, features


ATTENTION = ["qk_norm_rope_store", "attention", "linear residual next_norm"]
FIRST = ["linear norm", *ATTENTION]
LATER = ["linear norm scaled", *ATTENTION]
GATED = "linear norm scaled gated"
HEAD = ["rms_norm", "linear argmax"]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_dense_layer_has_six_launches(
    tmp_path: Path, device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
):
    """Norms, sums and copies, also of captured features, are fused into other kernels."""
    names, x, features = launches(family, tmp_path, device, monkeypatch, layers=3)
    assert names == [
        *("gather_rows", *FIRST, GATED, "linear residual next_norm"),
        *(*LATER, GATED, "linear residual next_norm"),
        *(*LATER, GATED, "linear residual", *HEAD),
    ]
    assert features is not None
    assert x.data_ptr() == features[:, 64:].data_ptr()


def test_drafter_block_and_context_add_no_launches(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    _, model = pair(tmp_path, device)
    contiguous(model)
    model.ops = TritonOps(device, torch.float32)
    ids, places = torch.tensor(IDS, device=device), torch.arange(ROWS, device=device)
    attend = Cache(model.config.decoder, device)
    store = KVStore(KVSpec(((2, 64),) * 2, torch.float32), [2], 16, device)
    features = torch.zeros(ROWS, model.fc.in_features, device=device)
    with Launches(monkeypatch, attend) as launches:
        x, _ = model(ids, places, attend)
        model.argmax(x)
        model.write_context(features, places, places, store)
    assert launches.names == [
        *("gather_rows", *FIRST, GATED, "linear residual next_norm"),
        *(*LATER, GATED, "linear residual"),
        *(*HEAD, "linear", "linear norm", "context_store"),
    ]


def test_layers_with_experts_run_by_kernels(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    names, _, _ = launches("qwen3_moe", tmp_path, device, monkeypatch)
    layer = [*FIRST, "rms_norm", "linear", "experts", "copy_.default"]
    assert names == ["gather_rows", *layer, *layer, *HEAD]


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "joined"])
def test_hybrid_layers_run_by_kernels(
    tmp_path: Path, device: torch.device, family: str, monkeypatch: pytest.MonkeyPatch
):
    """A shared MLP as large as an expert is one."""
    names, _, _ = launches(family, tmp_path, device, monkeypatch)
    dense = [GATED, "linear residual next_norm"]
    sparse = family != "qwen3_5"
    shared = ["linear gated", "linear", "linear", "gate"] if family == "qwen3_5_moe" else []
    mlp = ["rms_norm", *shared, "linear", "experts", "copy_.default"] if sparse else dense
    rule = ["linear norm", "mix"]
    attention = ["qk_norm_rope_store", "attention", "gate", "linear residual next_norm"]
    last = mlp if sparse else [GATED, "linear residual"]
    assert names == [
        *("gather_rows", *rule, "linear residual next_norm", *mlp),
        *("linear norm" if sparse else "linear norm scaled", *attention, *last, *HEAD),
    ]
