"""The target against transformers: every layer's residual stream, logits and greedy text."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LAYERS, VOCAB, edit_json, greedy, make_engine, make_target, run

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import Request, SamplingParams

WINDOWED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "rope_theta": 500.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e4,
}


def legacy_rope(path: Path) -> None:
    """The form of older checkpoints: rope_theta at the top, no rope_parameters."""
    theta = json.loads((path / "config.json").read_text())["rope_parameters"]["rope_theta"]
    edit_json(path / "config.json", rope_parameters=None, rope_theta=theta, rope_scaling=None)


def legacy_window(path: Path) -> None:
    """The form of older checkpoints: no layer_types, only the number of full layers."""
    edit_json(path / "config.json", layer_types=None)


@dataclass(frozen=True)
class Case:
    changes: dict[str, Any]
    after: Callable[[Path], None] = lambda path: None
    shards: str | None = None


CASES = {
    "untied, grouped": Case({}),
    "tied": Case({"tie_word_embeddings": True}),
    "one key-value head": Case({"num_key_value_heads": 1}),
    "as many key-value heads": Case({"num_key_value_heads": 4}),
    "heads as wide as hidden allows": Case({"head_dim": 8}),
    "odd number of heads": Case({"num_attention_heads": 3, "num_key_value_heads": 1}),
    "attention bias": Case({"attention_bias": True}),
    "rope at the top": Case({"rope_theta": 777.0}, legacy_rope),
    "stretched by yarn": Case({"rope_parameters": YARN, "max_position_embeddings": 128}),
    "stretched as llama 3.1": Case({"rope_parameters": LLAMA3}),
    "another epsilon": Case({"rms_norm_eps": 1e-3}),
    "sliding layers by type": Case(
        {
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": WINDOWED,
        }
    ),
    "sliding layers by number": Case(
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, legacy_window
    ),
    "a window that is not used": Case(
        {"use_sliding_window": False, "sliding_window": 5, "max_window_layers": 2}, legacy_window
    ),
    "a window without a size": Case(
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, legacy_window
    ),
    "several files": Case({}, shards="20KB"),
    "several files, tied": Case({"tie_word_embeddings": True}, shards="20KB"),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, directory)"""
    case = CASES[request.param]
    path = tmp_path_factory.mktemp("target")
    hf = make_target(path, seed=len(request.param), shards=case.shards, **case.changes)
    case.after(path)
    assert (path / "model.safetensors.index.json").exists() == (case.shards is not None)
    return hf, path


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    noise = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in lengths]


@torch.no_grad()
def layer_outputs(hf: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(residual stream after 0, 1, ... layers [T, N + 1, H], logits [T, V])."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(
            lambda module, inputs, out: seen.append(out if torch.is_tensor(out) else out[0])
        )
        for layer in [hf.model.embed_tokens, *hf.model.layers]
    ]
    try:
        logits = hf(torch.tensor([tokens])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([s[0] for s in seen], 1), logits


def record(engine: Engine) -> dict[tuple[Request, int], torch.Tensor]:
    """Let the target's runner capture every layer; by request and position, the last row seen."""
    runner = engine.parts.runner
    runner.capture = tuple(range(len(runner.masks) + 1))
    seen: dict[tuple[Request, int], torch.Tensor] = {}
    arrange, forward = runner.arrange, runner.forward
    plans: list[Any] = []

    def arranging(plan: Any, proposal: Any) -> Any:
        plans.append(plan)
        return arrange(plan, proposal)

    def forwarding(batch: Any, greedy: bool) -> Any:
        out = forward(batch, greedy=greedy)
        owners = [plans[-1].spans[i].request for i in batch.layout.span_of_row.tolist()]
        for i, key in enumerate(zip(owners, batch.places.positions.tolist(), strict=True)):
            seen[key] = out.hidden[i]
        return out

    runner.arrange, runner.forward = arranging, forwarding
    return seen


GEOMETRY = [(1, 1), (16, 7), (64, 5), (256, 64), (16, 3)]
"""(page size, most rows per step)"""


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY)
def test_every_layer_and_the_logits_agree_however_the_prompt_is_cut(
    model: tuple[Any, Path], page_size: int, budget: int
):
    hf, path = model
    config = EngineConfig(
        target=str(path),
        page_size=page_size,
        max_model_len=64,
        max_num_seqs=min(3, budget),
        max_num_batched_tokens=budget,
    )
    engine = make_engine(config)
    seen = record(engine)
    requests: list[Request] = []
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    run(engine, prompts([11, 1, 30]), sampling, each_step=requests.extend)
    by_request: dict[Request, list[int]] = defaultdict(list)
    for request, position in seen:
        by_request[request].append(position)
    assert len(by_request) == 3
    for request, positions in by_request.items():
        assert sorted(positions) == list(range(len(request.tokens) - 1))
        wanted, logits = layer_outputs(hf, request.tokens[:-1])
        found = torch.stack([seen[request, p] for p in range(len(positions))])
        found = found.view(len(positions), *wanted.shape[1:])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)
        head = engine.parts.runner.model.head(found[:, -1])
        torch.testing.assert_close(head, logits, atol=1e-4, rtol=1e-5)


def test_greedy_text_is_what_transformers_generates(model: tuple[Any, Path]):
    hf, path = model
    texts = prompts([3, 17, 40, 1, 8])
    engine = make_engine(EngineConfig(target=str(path), max_model_len=128, page_size=4))
    found = run(engine, texts, SamplingParams(temperature=0, max_tokens=40))
    wanted = [greedy(hf, prompt, 40) for prompt in texts]
    assert found == wanted
    assert len({token for out in found for token in out}) > 10, "too uniform to prove much"


def test_the_tiny_target_has_no_near_ties(target: Any):
    for prompt in prompts([3, 17, 40, 1, 8]):
        tokens = prompt + greedy(target.hf, prompt, 40)
        best = layer_outputs(target.hf, tokens)[1][len(prompt) - 1 : -1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3


def test_half_precision_weights_run_in_single_precision_on_a_cpu(tmp_path: Path):
    hf = make_target(tmp_path).to(torch.bfloat16)
    hf.save_pretrained(tmp_path)
    engine = make_engine(EngineConfig(target=str(tmp_path), max_model_len=64))
    assert engine.resolved.target.dtype == "bfloat16"
    weight = engine.parts.runner.model.embed_tokens.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, hf.model.embed_tokens.weight.float())
    seen = record(engine)
    (out,) = run(engine, prompts([20]), SamplingParams(temperature=0, max_tokens=10))
    again = type(hf).from_pretrained(tmp_path, dtype=torch.float32).eval()
    wanted, _ = layer_outputs(again, prompts([20])[0] + out[:-1])
    request = next(iter(seen))[0]
    found = torch.stack([seen[request, p] for p in range(len(wanted))]).view(wanted.shape)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


def test_the_tiny_target_is_as_deep_as_the_drafters_expect(target: Any):
    assert len(target.hf.model.layers) == LAYERS
