"""A target with recurrent layers on a GPU: captured steps give the bits of eager ones, and the same
tokens with speculation on and off in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hybrid import make_hybrid
from matrix import Pair, PlainAnswers, compare, plain_answers, some
from parity import prompts
from tiny import make_draft, run

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 64


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target = tmp_path_factory.mktemp("target")
    make_hybrid(target, head_dim=WIDTH)
    draft = make_draft(tmp_path_factory.mktemp("draft"), width=WIDTH)
    return Pair(target, draft, "cuda", WIDTH)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainAnswers:
    return PlainAnswers(pair)


@pytest.mark.parametrize("c", some(), ids=str)
def test_outputs_equal_plain_decoding(c: Any, pair: Pair, plain: PlainAnswers):
    engine = compare(c, pair, plain(c.workload))
    assert engine.resolved.choice.attention == "triton"
    assert len(engine.graphs) > 0 or c.proposer == "ngram"  # whose steps may all differ


def test_a_gpu_alone_decodes_what_a_cpu_does(pair: Pair):
    on_cpu = Pair(pair.target, pair.draft, "cpu", WIDTH)
    for name in ("greedy", "sampled"):
        assert plain_answers(pair, name) == plain_answers(on_cpu, name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_captured_steps_give_the_bits_of_eager_ones(dtype: str, pair: Pair):
    """The states that both leave behind are compared, too."""
    cold = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    texts, found = prompts([3, 17, 40, 1, 8, 29]), list[Any]()
    for graphs in (True, False):
        config = EngineConfig(
            str(pair.target), draft=str(pair.draft), device="cuda", dtype=dtype, max_model_len=128,
            max_num_seqs=4, overlap=1, kv_cache_memory="64MiB",
        )  # fmt: skip
        one = Engine(config)
        if not graphs:
            one.graphs.run = lambda key, inputs, body: body(inputs)  # type: ignore[method-assign]
            one.proposers.proposers["dflash"].graphs = one.graphs  # type: ignore[attr-defined]
        states = one.parts.states
        assert states is not None
        tokens = run(one, texts, cold)
        found.append((tokens, states.state[:, :-1].clone(), states.window[:, :-1].clone()))
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.equal(ours, theirs)


def test_steady_steps_do_not_wait(pair: Pair):
    config = EngineConfig(
        str(pair.target), draft=str(pair.draft), device="cuda", max_model_len=512, max_num_seqs=4,
        overlap=2, kv_cache_memory="64MiB",
    )  # fmt: skip
    one = Engine(config)
    endless = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    asked = [one.add(text, endless) for text in prompts([3, 17, 40, 8])]
    while not all(request.num_output > 20 for request in asked):
        one.step()
    launch = one.launch

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    one.launch = watched  # type: ignore[method-assign]
    for _ in range(15):
        one.step()
    for request in asked:
        one.finish(request, "abort")
    while one.has_work:
        one.step()
