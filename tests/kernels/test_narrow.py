"""Which drafts are verified, and where their rows stand: the kernels against their twins."""

from __future__ import annotations

import random

import pytest
import torch
from layouts import facts, spans_of

from strobe.kernels import narrow as kernels
from strobe.runner.batch import lay_out
from strobe.runner.buckets import Buckets
from strobe.speculation.allocate import choose_drafts


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("spans", "width"), [(1, 3), (5, 7), (33, 15), (200, 15)])
def test_chooses_most_likely_drafts(
    device: torch.device, spans: int, width: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    margins = (torch.rand(spans, width + 1, generator=noise) * 6).to(device)[:, :width]
    rates = torch.rand(width, 13, generator=noise).cumsum(1) / 13
    made = torch.randint(0, width + 1, (spans,), generator=noise).to(device)
    drafts = made + torch.randint(0, 3, (spans,), generator=noise).to(device)
    whole = int(made.sum())
    for count in {0, 1, whole // 3, whole - 1, whole, whole + 9} - {-1}:
        found = kernels.choose(margins, rates.to(device), made, drafts, count)
        wanted = choose_drafts(margins, rates.to(device), made, count)
        assert found.tolist() == (drafts - made + wanted).tolist()


def test_equal_chances_go_to_earlier_places_first(device: torch.device) -> None:
    margins, made = torch.zeros(5, 3, device=device), torch.tensor([3, 3, 1, 0, 3], device=device)
    rates = torch.ones(3, 13, device=device)  # all are certain
    for count, wanted in ((6, [2, 2, 1, 0, 1]), (7, [2, 2, 1, 0, 2]), (8, [3, 2, 1, 0, 2])):
        assert kernels.choose(margins, rates, made, made, count).tolist() == wanted


@pytest.mark.parametrize("seed", range(40))
def test_a_narrowed_layout(device: torch.device, seed: int) -> None:
    rng = random.Random(seed)
    spans = spans_of(rng, 7)
    made = [span.num_drafts if span.method is not None else 0 for span in spans]
    counts = [rng.randint(0, n) for n in made]
    most = rng.choice([8, 300])
    shape = Buckets(most, 7, 8).shape_of(spans, sum(counts))
    if rng.random() < 0.3:
        shape = shape._replace(spans=most + 1)
    wide = lay_out(spans, device, shape, padded=True, spare_slot=most)
    kept = [span.num_drafts - n + k for span, n, k in zip(spans, made, counts, strict=True)]
    drafts = torch.tensor(kept + [0] * (shape.spans - len(spans)), device=device)
    wanted = wide.narrow(drafts, shape)
    packed = kernels.narrow(wide, drafts, shape)
    assert packed.shape == wanted.packed.shape
    found = wanted.with_packed(packed)
    assert facts(found) == facts(wanted)
