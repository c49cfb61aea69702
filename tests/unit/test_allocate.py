"""Which drafts are verified: those that make the step bring most."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from layouts import facts, spans_of

from strobe.runner.batch import Shape, exact_shape, lay_out
from strobe.runner.buckets import Buckets
from strobe.speculation.acceptance import DraftChances, evidence
from strobe.speculation.allocate import chances, most_promising, verified_drafts
from strobe.step import TAIL, Span, num_rows

CPU = torch.device("cpu")


def test_chance_is_product_of_margin_probabilities():
    margins = torch.tensor([[0.0, 2.0, 1.0], [40.0, 0.5, 3.0]])
    rates = torch.stack((torch.linspace(0, 0.96, 13), torch.linspace(0.4, 1, 13), torch.ones(13)))
    result = chances(margins, rates, torch.tensor([3, 2]))
    first = [0.0, 2**0.125]  # evidence: margins' eighth root, as the block's mean is 1
    second = [(40 * 20.25**3) ** 0.125, (0.5 * 20.25**3) ** 0.125]  # of two drafts: 20.25
    for row, at in zip(result.tolist(), (first, second), strict=True):
        rate, next_rate = 0.16 * at[0], 0.4 + 0.1 * at[1]
        assert row == pytest.approx([rate, rate * next_rate, rate * next_rate], abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_device_evidence_matches_host(seed: int):
    rng = np.random.default_rng(seed)
    margins, most = rng.gamma(1.5, 2.0, (6, 7)), rng.integers(0, 8, 6)
    host = DraftChances((7,), 0.8, 1.0)
    host.observe(0, evidence(margins, most), np.full(6, 7), rng.integers(0, 8, 6))
    inputs = torch.from_numpy(margins), torch.from_numpy(host.table(0)), torch.from_numpy(most)
    expected = host.chances(0, evidence(margins, most))
    np.testing.assert_allclose(chances(*inputs).numpy(), expected)


@pytest.mark.parametrize("seed", range(40))
def test_choice_maximizes_expected_drafts(seed: int):
    rng = random.Random(seed)
    spans, width = rng.randint(1, 4), rng.randint(1, 4)
    margins = torch.tensor([[rng.uniform(0, 5) for _ in range(width)] for _ in range(spans)])
    rates = torch.tensor([sorted(rng.random() for _ in range(13)) for _ in range(width)])
    most = [rng.randint(0, width) for _ in range(spans)]
    count = rng.randint(0, sum(most) + 1)
    gains = chances(margins, rates, torch.tensor(most)).double()

    def worth(counts: tuple[int, ...]) -> float:
        return sum(float(gains[i, :n].sum()) for i, n in enumerate(counts))

    found = most_promising(margins, rates, torch.tensor(most), count).tolist()
    assert sum(found) == min(count, sum(most))
    assert all(n <= limit for n, limit in zip(found, most, strict=True))
    others = itertools.product(*[range(n + 1) for n in most])
    best = max(worth(counts) for counts in others if sum(counts) <= count)
    assert worth(tuple(found)) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_without_margins_every_request_gets_as_many(padded: bool):
    spans = [Span(i, 5, 5, (TAIL,), n, "dflash", 1 + n) for i, n in enumerate((3, 3, 1, 3))]
    spans.append(Span(4, 5, 5, (7, 8, 9), 2, None, 3))  # the host's, which are left alone
    shape = Buckets(8, 3, 4).shape_of(spans) if padded else exact_shape(spans)
    layout = lay_out(spans, CPU, shape, padded, spare_slot=8)
    for count, wanted in ((7, [2, 2, 1, 2]), (5, [2, 1, 1, 1]), (0, [0] * 4), (99, [3, 3, 1, 3])):
        found = verified_drafts(layout, None, (), count).tolist()
        assert found[:5] == [*wanted, 2]
        assert not any(found[5:])


@pytest.mark.parametrize("seed", range(60))
def test_narrowed_layout_matches_fresh_layout(seed: int):
    rng = random.Random(seed)
    spans = spans_of(rng, 7)
    made = [span.num_drafts if span.method is not None else 0 for span in spans]
    counts = [rng.randint(0, n) for n in made]
    shape = Buckets(8, 7, 8).shape_of(spans, sum(counts))
    assert shape.rows >= num_rows(spans, sum(counts))
    wide = lay_out(spans, CPU, shape, padded=True, spare_slot=8)
    padding = [0] * (shape.spans - len(spans))
    assert wide.device_drafts.tolist() == made + padding
    host = [span.num_drafts - n for span, n in zip(spans, made, strict=True)]
    drafts = torch.tensor([n + h for n, h in zip(counts, host, strict=True)] + padding)
    found = wide.narrow(drafts, shape)
    left = [
        span if span.method is None else span._replace(num_drafts=n, num_logits=1 + n)
        for span, n in zip(spans, counts, strict=True)
    ]
    wanted = lay_out(left, CPU, shape, padded=True, spare_slot=8)
    assert facts(found) == facts(wanted)


def test_narrowed_step_takes_smallest_fitting_bucket():
    buckets = Buckets(20, 7, 8)
    spans = [Span(i, 5, 5, (TAIL,), 7, "dflash", 8) for i in range(20)]
    assert buckets.shape_of(spans) == Shape(20, 160, 8, 7, 8)
    assert buckets.shape_of(spans, 44) == Shape(20 + 1, 64, 8, 7, 8)
    assert buckets.shape_of(spans, 45) == Shape(20 + 1, 128, 8, 7, 8)
    short = [span._replace(num_drafts=2, num_logits=3) for span in spans]
    assert buckets.shape_of(short, 12) == Shape(20 + 1, 32, 4, 3, 4)
    assert exact_shape(spans).rows == 160
