"""A request whose logits are NaN ends with an error, and changes no other request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import drain, make_engine
from tests.support.full_marks import full_where
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.tiny_checkpoints import VOCAB, make_draft, make_target

COLD = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias=None)
BAD = 59
"""The token whose embedding is NaN."""
TEXTS = [[(7 * i + n) % 50 for i in range(n)] for n in (9, 20, 5, 31)]
SETTINGS = [
    pytest.param(
        sampling,
        method,
        marks=[pytest.mark.full] if sampling == "sampled" or method in ("dflash", "ngram") else [],
    )
    for sampling in ("greedy", "sampled", "processed")
    for method in ("none", "dflash", "ngram", "dflash+ngram")
]
PARAMS: dict[str, SamplingParams] = {
    "greedy": COLD,
    "sampled": COLD.clone(temperature=1.0, seed=3, top_k=20),
    "processed": COLD.clone(temperature=1.0, seed=3, frequency_penalty=0.5, logprobs=2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return targets, by their kind, whose logit of BAD is 0."""
    paths: dict[str, Path] = {}
    for kind, make in {"attention": make_target, "recurrent": make_hybrid}.items():
        paths[kind] = path = tmp_path_factory.mktemp(kind)
        make(path)
        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"][BAD] = 0.0
        save_file(tensors, path / "model.safetensors")
    return paths


@pytest.fixture(scope="module")
def path(paths: dict[str, Path]) -> Path:
    return paths["attention"]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(
        tmp_path_factory.mktemp("draft"), layer_types=["sliding_attention", "full_attention"],
        window=24, sinks=True,
    )  # fmt: skip


def engine_of(path: Path, **options: Any) -> Engine:
    """Return an engine whose target has NaN for the BAD token."""
    engine = make_engine(EngineConfig(str(path), max_model_len=64, page_size=4, **options))
    model: Any = engine.runner.model
    model.embed_tokens.weight.data[BAD] = float("nan")
    return engine


def without_bad(params: SamplingParams) -> SamplingParams:
    return params.clone(logit_bias={BAD: -100.0})


def add(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Request]:
    return [engine.add(prompt, params) for prompt in prompts]


def check_failed(request: Request, output: list[int]) -> None:
    assert request.finish_reason == "error"
    assert "logits are NaN" in (request.error or "")
    assert request.output_ids == output


@full_where(
    lambda kind, sampling, method, overlap: (
        ((kind == "recurrent") + (sampling == "greedy") + (method == "none") + overlap) % 2 == 0
        or (kind == "recurrent") is (sampling == "greedy")
    )
)
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize(("sampling", "method"), SETTINGS)
@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_nan_request_ends_with_error_and_others_are_unchanged(
    kind: str, sampling: str, method: str, overlap: int, paths: dict[str, Path], drafter: Path
):
    """NaN in the prompt or in the answer; other requests run along and reuse pages and slots."""
    path = paths[kind]
    params = without_bad(PARAMS[sampling])
    plain = engine_of(path)
    expected = add(plain, TEXTS, params)
    drain(plain, expected)
    options: dict[str, Any] = {} if method == "none" else {"num_drafts": 7}
    options |= {"max_num_seqs": 3, "max_num_batched_tokens": 40, "kv_cache_memory": 300_000}
    engine = engine_of(path, draft=str(drafter), method=method, overlap=overlap, **options)
    for _ in range(2):
        first = add(engine, TEXTS[:2], params)
        in_prompt = engine.add([*TEXTS[3][:20], BAD, *TEXTS[3][:20]], params)
        in_answer = engine.add(TEXTS[1], params.clone(logit_bias={BAD: 100.0}))
        rest = add(engine, TEXTS[2:], params)
        drain(engine, [*first, in_prompt, in_answer, *rest])
        check_failed(in_prompt, [])
        check_failed(in_answer, [BAD])
        outputs = [request.output_ids for request in (*first, *rest)]
        assert outputs == [request.output_ids for request in expected]


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("kind", ["attention", "recurrent"])
def test_nan_in_rows_past_the_context_changes_no_other_request(
    kind: str, overlap: int, paths: dict[str, Path], drafter: Path
):
    """All requests' drafts past the end of the context write to one page."""
    path = paths[kind]
    params = without_bad(COLD.clone(max_tokens=None))
    prompts = [[(5 * i + n) % 50 for i in range(n)] for n in (60, 58)]
    plain = engine_of(path)
    expected = add(plain, prompts, params)
    drain(plain, expected)
    engine = engine_of(
        path, draft=str(drafter), num_drafts=7, adaptive=False, overlap=overlap, max_num_seqs=3
    )
    requests = add(engine, prompts, params)
    bad = engine.add(prompts[0], params.clone(logit_bias={BAD: 100.0}))
    drain(engine, [*requests, bad])
    check_failed(bad, [BAD])
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert all(request.finish_reason == "length" for request in requests)


def test_pages_of_a_nan_request_are_not_cached(path: Path):
    engine = engine_of(path, max_num_batched_tokens=16, max_num_seqs=1)
    prompt = [*TEXTS[3][:17], BAD, *TEXTS[3][:20]]
    for cached in (0, 16):
        request = engine.add(prompt, COLD)
        drain(engine, [request])
        check_failed(request, [])
        assert request.num_cached == cached


@pytest.mark.parametrize("budget", [8, 64])
def test_scored_prompt_with_nan_ends_with_error(budget: int, path: Path):
    engine = engine_of(path, max_num_batched_tokens=budget, max_num_seqs=1)
    request = engine.add([*TEXTS[1], BAD, 1, 2], COLD.clone(prompt_logprobs=1))
    events = []
    while engine.has_work:
        events += engine.step()
    check_failed(request, [])
    (event,) = events
    scores = [score for score in event.start.prompt_logprobs if score is not None]
    assert all(score.logprob == score.logprob for score in scores)


def test_nan_scores_without_nan_maximum_end_with_error(path: Path):
    """An infinite logit is a maximum, but gives no log probability."""
    engine = engine_of(path)
    forward = engine.runner.model.head_part

    def infinite(x: Any) -> Any:
        logits = forward(x)
        logits[:, 3] = float("inf")
        return logits

    engine.runner.model.head_part = infinite
    request = engine.add(TEXTS[0], COLD.clone(logprobs=1))
    drain(engine, [request])
    check_failed(request, [])


@pytest.mark.parametrize("vocabulary", ["whole", "reduced"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_a_nan_drafter_change_no_token(
    temperature: float, vocabulary: str, path: Path, draft: Callable[..., Path]
):
    method = "probabilistic" if temperature else "greedy"
    engine = engine_of(path, draft=str(draft()), draft_sample_method=method)
    proposer: Any = engine.proposers["dflash"]
    proposer.model.norm.weight.data.fill_(float("nan"))
    if vocabulary == "reduced":
        proposer.model.target_ids = torch.arange(VOCAB)
    params = without_bad(COLD.clone(temperature=temperature, seed=5))
    requests = add(engine, TEXTS, params)
    drain(engine, requests)
    plain = engine_of(path)
    expected = add(plain, TEXTS, params)
    drain(plain, expected)
    assert [r.output_ids for r in requests] == [r.output_ids for r in expected]
    assert sum(r.draft_counts.num_verified for r in requests) > 0
