"""The kernels that choose drafts and narrow a layout, against their torch twins."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from strobe.kernels import narrow as kernels
from strobe.kernels import reference_narrow as twin
from strobe.kernels.evidence import KNOTS
from strobe.runner.buckets import Buckets
from strobe.runner.layout import lay_out
from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.sampling.sampler import MAX_MARGIN
from strobe.speculation.acceptance import knot_weights, margin_evidence
from tests.support.full_marks import full_where
from tests.support.random_layouts import facts, spans_of

SHORT_SEEDS = {1: 6, 5: 6, 33: 1, 70: 0, 200: 0}
"""How many of the seeds `make test` runs, by the number of spans."""


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_chances_by_triton_torch_and_numpy_agree(
    device: torch.device, seed: int, nan: bool
) -> None:
    """All three read the terms of evidence in `strobe.kernels.evidence`."""
    rng = np.random.default_rng(seed)
    margins = rng.gamma(1.5, 2.0, (9, 7)).clip(max=MAX_MARGIN)
    margins[0] = MAX_MARGIN  # beyond the last knot
    margins[1] = 0.0
    if nan:
        margins[2] = np.nan
    num_proposed = np.append([7, 7, 7], rng.integers(0, 8, 6))
    rates = np.sort(rng.random((7, KNOTS)))
    evidence = margin_evidence(np.nan_to_num(margins), num_proposed)
    by_host = np.einsum("nkb,kb->nk", knot_weights(evidence), rates)
    inputs = [torch.from_numpy(part).float().to(device) for part in (margins, rates)]
    proposed = torch.from_numpy(num_proposed).to(device)
    by_triton = kernels.chances(*inputs, proposed).cpu().numpy()
    by_torch = twin.chances(*inputs, proposed).cpu().numpy()
    exists = np.arange(7) < num_proposed[:, None]
    np.testing.assert_allclose(by_triton[exists], by_torch[exists], rtol=1e-6)
    np.testing.assert_allclose(by_torch[exists], by_host.cumprod(1)[exists], rtol=1e-5)
    assert (by_triton[~exists] == -1).all()


@full_where(lambda spans, seed: seed >= SHORT_SEEDS[spans])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("spans", "width"), [(1, 3), (5, 7), (33, 15), (70, 15), (200, 15)])
def test_chooses_most_likely_drafts(
    device: torch.device, spans: int, width: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    margins = (torch.rand(spans, width + 1, generator=noise) * 6).to(device)[:, :width]
    rates = torch.rand(width, 13, generator=noise).cumsum(1) / 13
    proposed = torch.randint(0, width + 1, (spans,), generator=noise).to(device)
    drafts = proposed + torch.randint(0, 3, (spans,), generator=noise).to(device)
    total = int(proposed.sum())
    for count in {0, 1, total // 3, total - 1, total, total + 9} - {-1}:
        actual = kernels.choose(margins, rates.to(device), proposed, drafts, count)
        expected = twin.choose(margins, rates.to(device), proposed, drafts, count)
        assert actual.tolist() == expected.tolist()


def test_equal_chances_go_to_earlier_places_first(device: torch.device) -> None:
    margins, proposed = torch.zeros(5, 3, device=device), torch.tensor([3, 3, 1, 0, 3])
    proposed = proposed.to(device)
    rates = torch.ones(3, 13, device=device)  # all are certain
    for count, expected in ((6, [2, 2, 1, 0, 1]), (7, [2, 2, 1, 0, 2]), (8, [3, 2, 1, 0, 2])):
        assert kernels.choose(margins, rates, proposed, proposed, count).tolist() == expected


@pytest.mark.parametrize("seed", range(40))
def test_narrowed_layout_matches_torch_twin(device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    spans = spans_of(rng, 7)
    proposed = [span.num_drafts if span.method is not None else 0 for span in spans]
    counts = [rng.randint(0, n) for n in proposed]
    max_spans = rng.choice([8, 300])
    shape = Buckets(max_spans, 7, 8).shape_of(spans, sum(counts))
    if rng.random() < 0.3:
        shape = shape._replace(spans=max_spans + 1)
    wide = lay_out(spans, device, shape, padded=True, spare_slot=max_spans)
    kept = [span.num_drafts - n + k for span, n, k in zip(spans, proposed, counts, strict=True)]
    drafts = torch.tensor(kept + [0] * (shape.spans - len(spans)), device=device)
    expected = wide.narrowed(StepOps().narrow(wide, drafts, shape), shape)
    packed = kernels.narrow(wide, drafts, shape)
    assert packed.shape == expected.packed.shape
    assert facts(expected.with_packed(packed)) == facts(expected)
