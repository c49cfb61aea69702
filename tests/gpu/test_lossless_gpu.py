"""The losslessness matrix on a GPU in fp32: our kernels, captured steps, the same tokens."""

from __future__ import annotations

import pytest
import torch
from matrix import COMBINATIONS, Combination, Pair, PlainAnswers, compare, plain_answers
from tiny import make_draft, make_target

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 64
"""Of a head: the least that the kernels have."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    target = tmp_path_factory.mktemp("target")
    make_target(target, head_dim=WIDTH)
    draft = make_draft(tmp_path_factory.mktemp("draft"), width=WIDTH)
    return Pair(target, draft, "cuda", WIDTH)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> PlainAnswers:
    return PlainAnswers(pair)


@pytest.mark.parametrize("c", COMBINATIONS, ids=str)
def test_outputs_equal_plain_decoding(c: Combination, pair: Pair, plain: PlainAnswers):
    engine = compare(c, pair, plain(c.workload))
    choice = engine.resolved.choice
    assert choice.kernels
    assert choice.attention == choice.draft_attention == "triton"
    assert len(engine.graphs) > 0


def test_a_gpu_alone_decodes_what_a_cpu_does(pair: Pair):
    on_cpu = Pair(pair.target, pair.draft, "cpu", WIDTH)
    for name in ("greedy", "stops", "sampled"):
        assert plain_answers(pair, name) == plain_answers(on_cpu, name)
