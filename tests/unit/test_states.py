"""States of recurrent layers after blocks of which some rows were accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.recurrent_backend import RecurrentPlan
from strobe.kernels.kept_rows import SINGLE_ROWS
from strobe.kernels.reference_recurrent import CHUNK, FEW, apply_changes, delta_rule, mix
from strobe.kv.states import StateSpec, StateStore
from strobe.step import StateCopy

SPEC = StateSpec(layers=2, heads=4, key_heads=2, key_dim=6, value_dim=5, kernel=4)
CPU = torch.device("cpu")
PENDING = 5


def batch_of(spans: Sequence[tuple[int, int, int]], *, grouped: bool) -> Batch:
    """Spans are (slot, start, rows), one after another. grouped: the host knows their sizes."""
    slots, starts, sizes = torch.tensor(spans).T.unbind()
    total = int(sizes.sum())
    nothing: Any = None
    return Batch(
        ids=nothing,
        positions=torch.zeros(total, dtype=torch.int64),
        kv_slots=[nothing],
        slots=slots,
        starts=starts,
        sizes=sizes,
        row_starts=sizes.cumsum(0) - sizes,
        offsets=nothing,
        longest=int(sizes.max()),
        draft_lengths=nothing,
        tables=nothing,
        page_size=1,
        row_counts=sizes.tolist() if grouped else (),
    )


class Rows:
    """The layers' inputs per token, which do not depend on the other rows of a batch."""

    def __init__(self, spec: StateSpec = SPEC, count: int = 300):
        noise = torch.Generator().manual_seed(3)
        self.x = torch.randn(spec.layers, count, spec.channels, generator=noise)
        self.decay = -torch.rand(spec.layers, count, spec.heads, generator=noise)
        self.rate = torch.rand(spec.layers, count, spec.heads, generator=noise)
        self.weight = torch.randn(spec.layers, spec.channels, spec.kernel, generator=noise)

    def run(self, plan: RecurrentPlan, tokens: Sequence[int]) -> Tensor:
        """Return the outputs of every layer, [T, L, Hv, Dv]."""
        chosen, spec = list(tokens), plan.states.spec
        answers = [
            mix(
                x[chosen],
                decay[chosen],
                rate[chosen],
                weight,
                plan.groups,
                plan.stored(layer),
                spec,
            )
            for layer, (x, decay, rate, weight) in enumerate(
                zip(self.x, self.decay, self.rate, self.weight, strict=True)
            )
        ]
        return torch.stack(answers, 1)


def step(
    store: StateStore,
    rows: Rows,
    spans: Sequence[tuple[int, int, Sequence[int]]],
    *,
    grouped: bool = False,
) -> Tensor:
    """Run one forward over spans of (slot, start, tokens)."""
    nothing: Any = None
    sizes = [(slot, start, len(tokens)) for slot, start, tokens in spans]
    planned = batch_of(sizes, grouped=grouped)
    plan = RecurrentPlan(nothing, planned, store)
    return rows.run(plan, [token for _, _, tokens in spans for token in tokens])


def store(pending: int = PENDING) -> StateStore:
    new = StateStore(SPEC, 3, pending, torch.float32, CPU)
    for tensor in new.tensors:
        tensor.fill_(float("nan"))  # left by an earlier request
    new.length.fill_(77)
    return new


@pytest.mark.parametrize("accepted", range(PENDING))
@pytest.mark.parametrize("prompt", [1, 3, 4, 9])
def test_rejected_rows_leave_no_trace(accepted: int, prompt: int):
    """State and outputs after partly accepted blocks equal a run of the tokens alone, up to the
    rounding of vectorized code."""
    rows, cut, alone = Rows(), store(), store()
    true = list(range(40))
    start = 0
    for states in (cut, alone):
        step(states, rows, [(1, 0, true[:prompt])])
    start = prompt
    for turn in range(4):
        size = 1 + (accepted if turn % 2 == 0 else (accepted + turn) % PENDING)
        block = true[start : start + size] + [200 + turn + i for i in range(PENDING - size)]
        output = step(cut, rows, [(1, start, block)])[:size]
        expected = [step(alone, rows, [(1, i, [true[i]])]) for i in range(start, start + size)]
        torch.testing.assert_close(output, torch.cat(expected), atol=1e-6, rtol=1e-6)
        start += size
    longer = true[start : start + PENDING + 1]  # which update the state at once
    for states in (cut, alone):
        step(states, rows, [(1, start, longer)])
    torch.testing.assert_close(cut.state[:, 1], alone.state[:, 1], atol=1e-6, rtol=1e-6)
    assert torch.equal(cut.window[:, 1, :3], alone.window[:, 1, :3])
    assert cut.length[1] == alone.length[1] == start + len(longer)
    assert cut.state[:, 0].isnan().all(), "another slot's state changed"


@pytest.mark.parametrize("pending", [1, 16])
def test_state_is_written_once_in_a_few_single_rows(pending: int):
    """Also without drafts, when a block has one row, and with room for more rows."""
    states, rows = store(pending), Rows()
    step(states, rows, [(1, 0, range(20))])
    lengths, written = [], []
    for start in range(20, 30):
        before = states.state[:, 1].clone()
        step(states, rows, [(1, start, [start])])
        lengths.append(int(states.length[1]))
        written.append(not torch.equal(before, states.state[:, 1]))
    assert lengths == [20] * SINGLE_ROWS + [24] * SINGLE_ROWS + [28] * 2
    assert [start for start, new in enumerate(written, 20) if new] == [24, 28]


@pytest.mark.parametrize("grouped", [False, True])
def test_mixed_spans_give_the_same_outputs_as_alone(grouped: bool):
    """A prompt chunk, a block, a new sequence and a padding span."""
    rows, crowd, alone = Rows(), store(), store()
    for states in (crowd, alone):
        step(states, rows, [(0, 0, range(30))])
        step(states, rows, [(2, 0, range(100, 107))])
        step(states, rows, [(2, 7, range(107, 112))])
    spans = [(2, 9, range(109, 113)), (0, 30, range(30, 60)), (1, 0, [9]), (3, 0, [])]
    outputs = step(crowd, rows, spans[:3] if grouped else spans, grouped=grouped)
    expected = [step(alone, rows, [span]) for span in spans[:3]]
    torch.testing.assert_close(outputs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(crowd.state[:, :3], alone.state[:, :3], atol=1e-5, rtol=1e-5)
    assert crowd.length[:3].tolist() == [60, 0, 9]


@pytest.mark.parametrize("cuts", [[130], [64, 66], [1, 17, 63, 49], [5] * 26])
def test_chunking_changes_nothing(cuts: list[int]):
    rows, held, single = Rows(), store(), store()
    first, answers = 0, list[Tensor]()
    for count in cuts:
        answers.append(step(held, rows, [(0, first, range(first, first + count))]))
        first += count
    expected = torch.cat([step(single, rows, [(0, i, [i])]) for i in range(130)])
    torch.testing.assert_close(torch.cat(answers), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("count", [FEW + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 2])
def test_chunks_match_rows(count: int):
    """Includes repeated keys, which make a chunk's changes depend on each other the most."""
    noise = torch.Generator().manual_seed(count)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, count, 3, 8, generator=noise), dim=-1)
    k[:, count // 3 : count // 2] = k[:, :1]
    v = torch.randn(2, count, 3, 4, generator=noise)
    gates = torch.stack([-torch.rand(2, count, 3) * 0.1, torch.rand(2, count, 3)], 2)
    state = torch.randn(2, 3, 8, 4, generator=noise)
    output, end, changes = delta_rule(state, q, k, v, gates)
    again = apply_changes(state, gates[:, :, 0], k, changes)
    answers: list[Tensor] = []
    for i in range(count):
        row = (part[:, i : i + 1] for part in (q, k, v, gates))
        answer, state, _ = delta_rule(state, *row)
        answers.append(answer)
    torch.testing.assert_close(output, torch.cat(answers, 1), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(end, state, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(again, state, atol=2e-5, rtol=1e-5)


def test_row_changes_apply_bitwise():
    """Rows computed together, one after another, or applied a step later give the same sums, so
    that speculation changes no state."""
    noise = torch.Generator().manual_seed(5)
    q, k = torch.nn.functional.normalize(torch.randn(2, 2, 5, 2, 8, generator=noise), dim=-1)
    v, state = torch.randn(2, 5, 4, 4, generator=noise), torch.randn(2, 4, 8, 4, generator=noise)
    gates = torch.stack([-torch.rand(2, 5, 4), torch.rand(2, 5, 4)], 2)
    _, end, changes = delta_rule(state, q, k, v, gates)
    assert torch.equal(apply_changes(state, gates[:, :, 0], k, changes), end)
    gates[:, 3:], changes[:, 3:] = 0, 0
    _, middle, _ = delta_rule(state, q[:, :3], k[:, :3], v[:, :3], gates[:, :3])
    assert torch.equal(apply_changes(state, gates[:, :, 0], k, changes), middle)


@pytest.mark.parametrize("grouped", [False, True])
def test_kept_state_is_that_of_the_accepted_rows(grouped: bool):
    """Also within a block, of which more rows were accepted, and after single rows."""
    rows = Rows()
    for border in range(9, 14):
        states = store()
        states.kept_state, states.kept_window = (
            torch.full((2, *shape), float("nan"))
            for shape in (states.kept_state.shape[1:], states.kept_window.shape[1:])
        )
        step(states, rows, [(1, 0, range(9))], grouped=grouped)
        step(states, rows, [(1, 9, [9, 10, 11, 12, 200])], grouped=grouped)
        states.copy([StateCopy(slot=1, row=1, length=border, keeps=True)])
        true = store()
        step(true, rows, [(0, 0, range(border))])
        torch.testing.assert_close(states.kept_state[1], true.state[:, 0], atol=1e-5, rtol=1e-5)
        assert torch.equal(states.kept_window[1], true.window[:, 0, :3])
        step(states, rows, [(1, 13, range(13, 23))], grouped=grouped)
        before = states.kept_state.clone()
        states.copy([StateCopy(slot=1, row=1, length=border, keeps=True)])  # of a later step
        assert torch.equal(states.kept_state[1], before[1])
        states.copy([StateCopy(slot=2, row=1, length=border, keeps=False)])
        again = step(states, rows, [(2, border, range(border, border + 3))], grouped=grouped)
        assert not states.state[:, 0].isfinite().any(), "another slot's state changed"
        expected = step(true, rows, [(0, border, range(border, border + 3))])
        torch.testing.assert_close(again, expected, atol=1e-5, rtol=1e-5)
