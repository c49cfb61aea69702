"""Log probabilities of rows against plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch

from strobe.sampling.logprobs import Scores, concat, score


def slow(row: list[float], token: int, top: int) -> tuple[float, int, list[int], list[float]]:
    """Return (log probability, rank, best ids, their log probabilities) by definition."""
    total = math.log(sum(math.exp(x) for x in row))
    rank = 1 + sum(x > row[token] for x in row)
    best = sorted(range(len(row)), key=lambda i: (-row[i], i))[:top]
    return row[token] - total, rank, best, [row[i] - total for i in best]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top", [0, 1, 5, 37])
def test_scores_match_definition(top: int, dtype: torch.dtype):
    rng = random.Random(top)
    rows = [rng.sample([i / 8 for i in range(-60, 60)], 37) for _ in range(9)]
    tokens = [rng.randrange(37) for _ in rows]
    scores = score(torch.tensor(rows, dtype=dtype), torch.tensor(tokens), top)
    assert scores.values.dtype == scores.top_values.dtype == torch.float32
    assert scores.top_ids.shape == scores.top_values.shape == (9, top)
    for i, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        value, rank, ids, values = slow(row, token, top)
        assert math.isclose(scores.values[i].item(), value, abs_tol=1e-5)
        assert scores.ranks[i].item() == rank
        assert scores.top_ids[i].tolist() == ids
        assert torch.allclose(scores.top_values[i], torch.tensor(values), atol=1e-5)


def test_ties_share_the_better_rank_and_lower_id_comes_first():
    row = [1.0, 3.0, 2.0, 3.0, 2.0, 3.0]
    scores = score(torch.tensor([row] * 6), torch.arange(6), 5)
    assert scores.ranks.tolist() == [6, 1, 4, 1, 4, 1]
    assert scores.top_ids.tolist() == [[1, 3, 5, 2, 4]] * 6


def test_named_tokens_precede_the_top_tokens_in_their_order():
    rng = random.Random(3)
    rows = [rng.sample([i / 8 for i in range(-60, 60)], 37) for _ in range(4)]
    named = torch.tensor([[30, 2], [2, 30], [7, 7], [0, 36]])
    logits, tokens = torch.tensor(rows), torch.arange(4)
    scores, plain = score(logits, tokens, 5, named), score(logits, tokens, 5)
    assert torch.equal(scores.top_ids, torch.cat([named, plain.top_ids], 1))
    assert torch.equal(scores.top_values[:, 2:], plain.top_values)
    for row, ids, values in zip(rows, named.tolist(), scores.top_values.tolist(), strict=True):
        for token, value in zip(ids, values, strict=False):
            assert math.isclose(value, slow(row, token, 0)[0], abs_tol=1e-5)


def test_scoring_keeps_logits_and_accepts_no_rows():
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    score(logits, torch.tensor([0, 1, 2, 3]), 2)
    assert torch.equal(logits, before)
    none = score(logits[:0], torch.zeros(0, dtype=torch.int64), 2)
    assert [tuple(part.shape) for part in none] == [(0,), (0,), (0, 2), (0, 2)]


def test_parts_are_joined_in_order():
    logits = torch.randn(7, 9, generator=torch.Generator().manual_seed(1))
    tokens = torch.arange(7)
    at_once = score(logits, tokens, 3)
    parts = [score(logits[a:b], tokens[a:b], 3) for a, b in ((0, 3), (3, 4), (4, 7))]
    for joined in (concat(parts), concat([at_once])):
        assert isinstance(joined, Scores)
        assert all(torch.equal(a, b) for a, b in zip(joined, at_once, strict=True))
