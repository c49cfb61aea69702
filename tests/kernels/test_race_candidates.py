"""The candidates of sampled drafts: the kernels against their torch twin, and the twin against the
sampler."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.runner.step_ops.triton_step_ops import TritonStepOps
from strobe.sampling.candidates import race_candidates
from strobe.sampling.noise import gumbel
from strobe.sampling.sampler import NO_TOKEN, RowParams, filter_mask, sample_rows
from tests.support.full_marks import full_where
from tests.support.reference_sampling import params

# Integer products wrap, as the noise requires, but the interpreter's NumPy warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]

OPTIONS = {
    "temperature": [1.0, 0.7, 0.0, 1.0, 2.0, 1e-9, 1.0],
    "top_p": [1.0, 0.8, 1.0, 1.0, 0.95, 1.0, 1.0],
    "top_k": [0, 20, 0, 3, 0, 0, 0],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.02, 0.0, 0.0],
}
"""Of seven rows: with and without filters, greedy, one that keeps only three tokens. The last row
has a NaN."""
NUM_ROWS = 7


def rows_of(device: torch.device) -> RowParams:
    rows = params(NUM_ROWS, **OPTIONS)._replace(
        key=torch.arange(NUM_ROWS) * -0x61C8864680B583EB, position=torch.arange(NUM_ROWS) * 3 + 5
    )
    return RowParams(*[column.to(device) for column in rows])


def logits_of(device: torch.device, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits that are a part of wider rows; one row has a NaN and an infinity."""
    generator = torch.Generator().manual_seed(vocab)
    logits = 3 * torch.randn(NUM_ROWS, vocab + 3, generator=generator)
    logits[-1, 4] = math.nan
    logits[-1, 5] = -math.inf
    return logits.to(device=device, dtype=dtype)[:, :vocab]


@full_where(lambda vocab, count, dtype: (vocab + count + dtype.itemsize // 2) % 2 == 0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 16])
@pytest.mark.parametrize("vocab", [16, 2048, 5001])
def test_kernels_match_twin(device: torch.device, vocab: int, count: int, dtype: torch.dtype):
    """A logarithm may differ in its last bit, which changes an order only if sums are that
    close."""
    logits = logits_of(device, vocab, dtype)
    rows = rows_of(device)
    chosen = torch.randperm(50_000, generator=torch.Generator().manual_seed(1))[:vocab]
    for tokens in (None, chosen.to(device)):
        found = TritonStepOps().race_candidates(logits, rows, count, tokens, filtered=True)
        expected = StepOps().race_candidates(logits, rows, count, tokens, filtered=True)
        assert torch.equal(found[1], expected[1])
        assert torch.equal(found[0][found[1]], expected[0][expected[1]])


def test_first_candidate_is_the_token_that_the_sampler_draws():
    logits = logits_of(torch.device("cpu"), 3000)
    rows = rows_of(torch.device("cpu"))
    columns, joins = race_candidates(logits, rows, 8, None, filtered=True)
    drawn = sample_rows(logits, rows, filtered=True)
    assert columns[:-1, 0].tolist() == drawn[:-1].tolist()
    assert joins[:, 0].all()
    assert drawn[-1] == NO_TOKEN, "the row with a NaN, whose candidates are its largest logits"
    assert columns[-1].tolist() == logits[-1].nan_to_num(nan=-math.inf).topk(8).indices.tolist()
    assert joins.sum(1).tolist()[3] == 3, "the row with top-k 3"
    assert columns[2].tolist() == logits[2].topk(8).indices.tolist(), "the greedy row"


def test_candidates_lead_the_race():
    logits = logits_of(torch.device("cpu"), 500)[:1]
    rows = RowParams(*[column[:1] for column in rows_of(torch.device("cpu"))])
    sums = logits + gumbel(rows.key, rows.position, 500)
    columns, _ = race_candidates(logits, rows, 6, None, filtered=False)
    assert columns.tolist() == sums.topk(6).indices.tolist()


def test_noise_is_that_of_the_targets_tokens():
    """A reduced head draws as the whole head would, if that gave its other tokens no chance."""
    rows = rows_of(torch.device("cpu"))
    logits = logits_of(torch.device("cpu"), 40)
    tokens = 7 * torch.arange(40) + 2
    whole = torch.full((NUM_ROWS, 300), -math.inf)
    whole[:, tokens] = logits
    few, _ = race_candidates(logits, rows, 4, tokens, filtered=True)
    drawn = sample_rows(whole, rows, filtered=True)
    assert tokens[few[:-1, 0]].tolist() == drawn[:-1].tolist()


@pytest.mark.parametrize("spread", [0.1, 4.0])
def test_filters_keep_what_the_sampler_keeps(spread: float):
    """The most probable tokens of rows with little spread do not reach top-p, so that all are
    sorted."""
    rows = rows_of(torch.device("cpu"))
    logits = spread * logits_of(torch.device("cpu"), 4000)[:-1]
    rows = RowParams(*[column[:-1] for column in rows])
    columns, joins = race_candidates(logits, rows, 16, None, filtered=True)
    scale = rows.temperature.clamp(min=1e-30).reciprocal()[:, None]
    weights = ((logits - logits.amax(1, keepdim=True)) * scale).exp()
    kept = filter_mask(weights, rows)
    sums = (logits * scale + gumbel(rows.key, rows.position, 4000)).masked_fill(~kept, -math.inf)
    for row in (0, 1, 3, 4):
        count = min(16, int(kept[row].sum()))
        assert int(joins[row].sum()) == count
        assert columns[row, :count].tolist() == sums[row].topk(count).indices.tolist()
