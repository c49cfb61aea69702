"""Candidates, their edges and the walk through them against their torch twins."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strobe.kernels import candidates
from strobe.kernels import reference_candidates as reference
from strobe.sampling.walk import WalkNoise, walk


def normal(device: torch.device, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("count", [1, 5, 16])
@pytest.mark.parametrize("vocab", [16, 2048, 5001])
def test_best_of_matches_twin(device: torch.device, vocab: int, count: int):
    """Logits of few values, so that many are equal, are a part of wider rows; some are infinite or
    no number."""
    logits = (normal(device, 3, vocab + 3)[:, :vocab] * 2).round().to(torch.bfloat16)
    logits[0, ::3] = -torch.inf
    logits[1, vocab // 2 :] = torch.nan
    logits[1, 3] = torch.inf
    values, ids = candidates.best_of(logits, count)
    expected_values, expected_ids = reference.best_of(logits, count)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(values, expected_values)


@pytest.mark.parametrize("vocab", [1000, 1024 + 5, 5001])
def test_best_of_the_twin_are_the_first_of_the_largest(vocab: int):
    """Many logits are equal, zeros of either sign among them."""
    logits = (normal(torch.device("cpu"), 4, vocab) * 2).round().to(torch.bfloat16)
    logits[0, ::3] = -torch.inf
    logits[1, vocab // 2] = torch.inf
    logits[2] = -logits[2].abs()
    values, ids = reference.best_of(logits, 3)
    order = torch.sort(logits.float(), dim=1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :3])
    assert torch.equal(values, order.values[:, :3])


@pytest.mark.parametrize("equal", [(), (0, 9), (1, 2), (2, 3), (3, 9)])
@pytest.mark.parametrize("vocab", [1024, 5001])
def test_best_of_the_twin_finds_equal_logits_among_different_ones(
    vocab: int, equal: tuple[int, ...]
):
    """equal: ranks of logits in row 1 that become one, the third being the last best one."""
    logits = normal(torch.device("cpu"), 3, vocab)
    ranked = logits[1].sort(descending=True)
    for rank in equal:
        logits[1, ranked.indices[rank]] = ranked.values[equal[0]]
    values, ids = reference.best_of(logits, 3)
    order = torch.sort(logits, dim=1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :3])
    assert torch.equal(values, order.values[:, :3])


@pytest.mark.parametrize("count", [3, 16])
@pytest.mark.parametrize("rank", [24, 64])
@pytest.mark.parametrize("with_hidden", [True, False])
@pytest.mark.parametrize("with_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edges_match_twin(
    device: torch.device,
    count: int,
    rank: int,
    with_hidden: bool,
    with_rows: bool,
    dtype: torch.dtype,
):
    left = normal(device, 100, rank).to(dtype)
    right = normal(device, 100, rank, seed=2).to(dtype)
    hidden = normal(device, 2, 4, rank, seed=3).to(dtype) if with_hidden else None
    unary = normal(device, 2, 4, count, seed=4)
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(100, (2, 4, count), generator=generator).to(device)
    anchor = torch.tensor([7, 99], device=device)
    rows = ids.flip(2) if with_rows else None
    terms = reference.EdgeTerms(
        unary=unary,
        ids=ids,
        anchor=anchor,
        left=left,
        right=right,
        hidden=hidden,
        scale=0.5,
        rows=rows,
    )
    got = candidates.edges(terms)
    expected = reference.edges(terms)
    bound = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)


@pytest.mark.parametrize("sampled", [True, False])
def test_walk_matches_twin(device: torch.device, sampled: bool):
    """Scores are whole numbers, so that many are equal; one is no number. One span of the sampled
    ones is greedy."""
    edges = (normal(device, 5, 7, 16, 16) * 2).round()
    edges[0, 2, :, 3] = torch.nan
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(150000, (5, 7, 16), generator=generator).to(device)
    noise = None
    if sampled:
        noise = WalkNoise(
            torch.arange(5, device=device) * 12345678901,
            torch.tensor([0, 3, 500, 70000, 1], device=device),
            torch.tensor([1.0, 0.0, 0.3, 2.0, 1e-9], device=device),
        )
    margins = torch.empty(5, 7, device=device)
    expected_margins = torch.empty(5, 7, device=device)
    tokens = candidates.walk(edges, ids, margins, noise)
    assert torch.equal(tokens, walk(edges, ids, expected_margins, noise))
    assert torch.equal(margins, expected_margins)
    assert torch.equal(candidates.walk(edges, ids, None, noise), tokens)


def test_path_is_the_best_one_step_after_another():
    """Slot 0 takes candidate 1; after it candidate 0 is best, though 2 is so after the others."""
    edges = torch.zeros(1, 2, 3, 3)
    edges[0, 0, :, 1] = 1.0
    edges[0, 1, :, 2] = 5.0
    edges[0, 1, 1] = torch.tensor([3.0, 1.0, 2.0])
    margins = torch.empty(1, 2)
    ids = torch.tensor([[[10, 11, 12], [20, 21, 22]]])
    assert walk(edges, ids, margins, None).tolist() == [[11, 20]]
    assert margins.tolist() == [[1.0, 1.0]]
