"""Even routing and the profile of `strobe bench step`. No time is asserted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from transformers import Gemma4ForCausalLM, Qwen3MoeForCausalLM

from strobe.kernels.reference_experts import route
from strobe.models.architectures import load_target_config
from strobe.models.families.experts import Router
from strobe.models.families.gemma4 import Gemma4Router
from strobe.models.linear import LinearView
from strobe.models.model_config import ExpertShape
from strobe.models.ops.torch_ops import TorchOps
from strobe.models.weight_loading import load_target
from strobe.tools.bench import floor, profiling, published_shapes, rates
from strobe.tools.bench.even_routing import route_evenly
from tests.support.tiny_checkpoints import make_target

MOE = {"moe_intermediate_size": 24, "num_experts": 16, "num_experts_per_tok": 3}
GEMMA: dict[str, Any] = {
    "family": Gemma4ForCausalLM,
    "rope_theta": None,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "enable_moe_block": True,
    "num_experts": 16,
    "top_k_experts": 3,
    "moe_intermediate_size": 24,
}
QUICK = ["--device=cpu", "--concurrency=2", "--steps=2", "--warmup=1", "--prompt-len=8"]


def routers(path: Path, **changes: Any) -> list[Any]:
    make_target(path, num_hidden_layers=2, **changes)
    options: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32}
    model = load_target(path, load_target_config(path), **options, device=torch.device("cpu"))
    route_evenly(model, 2000)
    return [layer for layer in model.modules() if isinstance(layer, Router | Gemma4Router)]


def chosen(router: Any, x: Tensor) -> Tensor:
    return route(router.logits(TorchOps(), x), router.routing)[1]


@pytest.mark.parametrize("family", [{"family": Qwen3MoeForCausalLM, **MOE}, GEMMA])
def test_even_routing_draws_distinct_experts_evenly(tmp_path: Path, family: dict[str, Any]):
    x = torch.randn(2000, 32, generator=torch.Generator().manual_seed(1))
    first, second = (chosen(router, x) for router in routers(tmp_path / "first", **family))
    assert (first.sort(-1).values.diff(dim=-1) > 0).all(), "no expert twice in a row"
    expected = 2000 * 3 / 16
    assert ((first.flatten().bincount(minlength=16) - expected).abs() < 5 * expected**0.5).all()
    assert not torch.equal(first, second), "layers draw their own experts"
    again, _ = (chosen(router, x[:7] + 1) for router in routers(tmp_path / "again", **family))
    assert torch.equal(again, first[:7]), "neither rows nor runs matter"


def test_even_routing_leaves_out_what_nobody_reads():
    """A router joined with a shared expert's gate has 12 + 1 outputs and 3 to fill up."""
    router = Router(32, ExpertShape(12, 3, 8, (True,)))
    router.joined = LinearView(torch.randn(16, 32))
    route_evenly(nn.Sequential(router), 5)
    assert router.logits(TorchOps(), torch.randn(5, 32)).shape == (5, 13)


def test_even_routing_needs_experts(main: Callable[..., Any]):
    status, out, err = main("bench", "step", *QUICK, "--routing=even")
    assert (status, out) == (2, "")
    assert "routing is 'even', but these shapes have no experts" in err


def test_step_with_even_routing_and_profile(
    main: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rates, "_CPU", (1 << 20, 64))
    make_target(tmp_path / "target", family=Qwen3MoeForCausalLM, **MOE)
    file = tmp_path / "figures.json"
    flags = [f"--target={tmp_path / 'target'}", f"--json={file}", "--routing=even", "--profile"]
    flags.append("--prefill=2x8")
    status, out, err = main("bench", "step", *QUICK, *flags)
    assert (status, err) == (0, "")
    assert "Operations of a step: plain, 2 requests of 8 tokens" in out
    assert "target: experts" in out
    assert "Operations of a prefill: plain, 2 prompts of 8 tokens" in out
    figures = json.loads(file.read_text())
    for row in (*figures["rows"], *figures["prefill"]):
        launches = {part["name"]: part["launches"] for part in row["profile"]["operations"]}
        assert launches["aten::topk"] == load_target_config(tmp_path / "target").decoder.num_layers
        assert row["profile"]["idle_ms"] is None


@pytest.mark.parametrize(
    ("events", "times", "idle"),
    [
        ([], {}, 0),
        ([("b", 6, 9), ("a", 2, 4)], {"a": [2], "b": [3]}, 2),
        ([("a", 0, 10), ("b", 1, 13), ("b", 2, 14)], {"a": [10], "b": [3, 1]}, 0),
        ([("a", 0, 10), ("b", 2, 5), ("c", 12, 13)], {"a": [10], "b": [0], "c": [1]}, 2),
        ([("a", 3, 9), ("b", 3, 5), ("c", 9, 9)], {"a": [4], "b": [2], "c": [0]}, 0),
    ],
    ids=["none", "gap", "overlap", "containment", "equal starts"],
)
def test_added_times_count_overlaps_once(
    events: list[tuple[str, float, float]], times: dict[str, list[float]], idle: float
):
    assert profiling.added_times(events) == (times, idle)


def test_gpu_profile_adds_up_to_busy_time():
    spans = [
        ("gemm", 1000, 5000), ("sort", 1500, 5500), ("gemm", 6500, 8500), ("memcpy", 6500, 7500),
    ]  # fmt: skip
    device = {"device_type": DeviceType.CUDA, "use_device": "cuda"}
    kernels = [FunctionEvent(0, name, 0, start, end, **device) for name, start, end in spans]
    range_ = FunctionEvent(0, "range", 0, 0, 9000, is_user_annotation=True, **device)
    launch = FunctionEvent(0, "cudaLaunchKernel", 0, 0, 900)
    profile = profiling.Profile(torch.device("cpu"))
    profile.device, profile.steps = torch.device("cuda"), 2
    profile._profile = SimpleNamespace(events=lambda: EventList([launch, range_, *kernels]))
    figures = profile.figures()
    rows = [(row["name"], row["launches"], row["ms"]) for row in figures["operations"]]
    assert rows == [("gemm", 1, 2.5), ("memcpy", 0.5, 0.5), ("sort", 0.5, 0.25)]
    assert figures["idle_ms"] == 0.5
    (section,) = profiling.operations_section("Operations", figures)
    assert section.note == "GPU busy: 3.250 ms; idle between operations: 0.500 ms"


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("qwen3-8b", None),
        ("qwen3-coder-30b-a3b", None),
        ("qwen3.5-35b-a3b", None),
        ("gpt-oss-20b", 0.53),
    ],
)
def test_parts_add_up_to_the_work_of_a_step(name: str, packed: float | None):
    with published_shapes.directories(name) as (target, _):
        config = load_target_config(Path(target))
    shapes = floor.Shapes(config, None, 4, floor.Widths(2, 2, 2, 2, experts=packed))
    unit = floor.Rates(1.0, 1.0, 1.0, 1.0)
    parts, whole = profiling.floor_by_part(shapes, unit, 8, 300), shapes.verify(8, 300)
    assert min(part["bytes"] for part in parts) > 0
    assert sum(part["bytes"] for part in parts) == pytest.approx(whole.bytes)
    assert sum(part["operations"] for part in parts) == pytest.approx(whole.operations)
