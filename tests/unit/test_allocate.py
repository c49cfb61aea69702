"""Drafts verified in a step: the most likely ones, over all requests."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from strobe.kernels.reference_narrow import chances, choose_drafts
from strobe.runner.buckets import Buckets
from strobe.runner.layout import Shape, exact_shape, lay_out
from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.speculation.acceptance import DraftChances, knot_weights, margin_evidence
from strobe.speculation.allocate import verified_drafts
from strobe.speculation.policy_config import PolicyConfig
from strobe.step import TAIL, Span, num_rows
from tests.support.random_layouts import facts, spans_of

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
    margins, max_drafts = rng.gamma(1.5, 2.0, (6, 7)), rng.integers(0, 8, 6)
    host = DraftChances((7,), PolicyConfig())
    block_evidence = knot_weights(margin_evidence(margins, max_drafts))
    host.observe(0, block_evidence, np.full(6, 7), rng.integers(0, 8, 6))
    inputs = [torch.from_numpy(x) for x in (margins, host.table(0), max_drafts)]
    expected = host.chances(0, block_evidence)
    np.testing.assert_allclose(chances(*inputs).numpy(), expected)


@pytest.mark.parametrize("seed", range(40))
def test_choice_maximizes_expected_drafts(seed: int):
    rng = random.Random(seed)
    spans, width = rng.randint(1, 4), rng.randint(1, 4)
    margins = torch.tensor([[rng.uniform(0, 5) for _ in range(width)] for _ in range(spans)])
    rates = torch.tensor([sorted(rng.random() for _ in range(13)) for _ in range(width)])
    max_drafts = [rng.randint(0, width) for _ in range(spans)]
    count = rng.randint(0, sum(max_drafts) + 1)
    expected = chances(margins, rates, torch.tensor(max_drafts)).double()

    def tokens(counts: tuple[int, ...]) -> float:
        return sum(float(expected[i, :n].sum()) for i, n in enumerate(counts))

    choice = choose_drafts(margins, rates, torch.tensor(max_drafts), count).tolist()
    assert sum(choice) == min(count, sum(max_drafts))
    assert all(n <= limit for n, limit in zip(choice, max_drafts, strict=True))
    choices = itertools.product(*[range(n + 1) for n in max_drafts])
    best = max(tokens(counts) for counts in choices if sum(counts) <= count)
    assert tokens(tuple(choice)) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_without_margins_every_request_gets_as_many(padded: bool):
    spans = [Span(i, 5, 5, (TAIL,), n, "dflash", 1 + n) for i, n in enumerate((3, 3, 1, 3))]
    spans.append(Span(4, 5, 5, (7, 8, 9), 2, None, 3))  # host drafts, always verified
    shape = Buckets(8, 3, 4).shape_of(spans) if padded else exact_shape(spans)
    layout = lay_out(spans, CPU, shape, padded=padded, spare_slot=8)
    for count, expected in ((7, [2, 2, 1, 2]), (5, [2, 1, 1, 1]), (0, [0] * 4), (99, [3, 3, 1, 3])):
        verified = verified_drafts(layout, None, (), count, StepOps()).tolist()
        assert verified[:5] == [*expected, 2]
        assert not any(verified[5:])


@pytest.mark.parametrize("seed", range(60))
def test_narrowed_layout_matches_fresh_layout(seed: int):
    rng = random.Random(seed)
    spans = spans_of(rng, 7)
    device_drafts = [span.num_drafts if span.method is not None else 0 for span in spans]
    counts = [rng.randint(0, n) for n in device_drafts]
    shape = Buckets(8, 7, 8).shape_of(spans, sum(counts))
    assert shape.rows >= num_rows(spans, sum(counts))
    wide = lay_out(spans, CPU, shape, padded=True, spare_slot=8)
    padding = [0] * (shape.spans - len(spans))
    assert wide.device_drafts.tolist() == device_drafts + padding
    host = [span.num_drafts - n for span, n in zip(spans, device_drafts, strict=True)]
    drafts = torch.tensor([n + h for n, h in zip(counts, host, strict=True)] + padding)
    narrowed = wide.narrowed(StepOps().narrow(wide, drafts, shape), shape)
    remaining = [
        span if span.method is None else span._replace(num_drafts=n, num_logits=1 + n)
        for span, n in zip(spans, counts, strict=True)
    ]
    expected = lay_out(remaining, CPU, shape, padded=True, spare_slot=8)
    assert facts(narrowed) == facts(expected)


def test_narrowed_step_takes_smallest_fitting_bucket():
    buckets = Buckets(20, 7, 8)
    spans = [Span(i, 5, 5, (TAIL,), 7, "dflash", 8) for i in range(20)]
    assert buckets.shape_of(spans) == Shape(20, 160, 8, 7, 8)
    assert buckets.shape_of(spans, 44) == Shape(20 + 1, 64, 8, 7, 8)
    assert buckets.shape_of(spans, 45) == Shape(20 + 1, 128, 8, 7, 8)
    short = [span._replace(num_drafts=2, num_logits=3) for span in spans]
    assert buckets.shape_of(short, 12) == Shape(20 + 1, 32, 4, 3, 4)
    assert exact_shape(spans).rows == 160
