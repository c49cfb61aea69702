"""Parts of a model and of its sampling on one of several ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from strobe.models.linear import Linear
from strobe.parallel.rank_ops import partial_linears
from strobe.parallel.rank_sampling import RankRows
from strobe.sampling.sampling_ops import SamplingOps
from strobe.sampling.sampling_state import LogitRows, Sampled, SamplingMode, SamplingState
from tests.support.rank_threads import Exchange, ThreadGroup

CPU = torch.device("cpu")


def test_partial_linears_follow_the_split_and_not_names():
    model = nn.ModuleDict(
        {
            "mixer_out": Linear(4, 3, bias=True, split="inputs"),
            "experts_out": Linear(4, 3, bias=True, experts=2, split="experts"),
            "down_proj": Linear(4, 3, bias=True),
        }
    )
    for parameter in model.parameters():
        parameter.requires_grad_(False).fill_(1)
    first = partial_linears(model, ThreadGroup(Exchange(2), 0))
    assert first == {model["mixer_out"], model["experts_out"]}
    biases = {name: linear.bias for name, linear in model.items()}
    assert all(bias.all() for bias in biases.values())
    assert partial_linears(model, ThreadGroup(Exchange(2), 1)) == first
    assert {name for name, bias in biases.items() if bias.any()} == {"experts_out", "down_proj"}


def test_ranks_sample_shares_of_the_rows_and_get_all_results():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 6, generator=generator)
    rows = LogitRows(torch.zeros(5, dtype=torch.int64), torch.arange(5))
    mode = SamplingMode(logprobs=1, margins=True)
    expected = SamplingState(1, 6, CPU, SamplingOps()).sample(logits, rows, mode)
    exchange = Exchange(2)
    results = dict[int, list[Sampled]]()

    def run(rank: int) -> None:
        state = SamplingState(
            1, 6, CPU, SamplingOps(), ranks=RankRows(ThreadGroup(exchange, rank), 6)
        )
        columns = logits[:, 3 * rank : 3 * rank + 3]
        results[rank] = [state.sample(part, rows, mode) for part in (logits, columns)]

    threads = [threading.Thread(target=run, args=[rank]) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for sampled in (*results[0], *results[1]):
        for actual, whole in zip(tensors(sampled), tensors(expected), strict=True):
            torch.testing.assert_close(actual, whole, rtol=0, atol=0)


def tensors(sampled: Sampled) -> list[Tensor]:
    scores: Any = sampled.scores
    return [sampled.tokens, sampled.margins, *scores]
