"""Plans, spans and events: plain data that one step passes between modules."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from strobe.request import TokenLogprob
from strobe.sampling_params import SamplingParams, StructuredOutputs
from strobe.step import (
    TAIL,
    Admission,
    PageWrite,
    Plan,
    RequestStart,
    Span,
    StepResult,
    TokenEvent,
)

if TYPE_CHECKING:
    from conftest import Target

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingParams(
    temperature=0.5, stop=["a"], logit_bias={3: 1.0}, structured_outputs={"regex": "a*"}
)


def device_drafts(drafts: int, method: str = "dflash", slot: int = 0) -> Span:
    """Return a span whose drafts come from the device."""
    return Span(slot, 9, 12, (TAIL,), drafts, method if drafts else None, 1 + drafts)


def plan() -> Plan:
    return Plan(
        (
            Span(2, 0, 0, (4, 5, 6), num_logits=1, scored_tokens=(5, 6), top_logprobs=3),
            device_drafts(3),
            Span(1, 7, 7, (8, 9, 10), 2, None, 3),
        ),
        (PageWrite(2, 0, (3, 1)), PageWrite(0, 4, (2,))),
        (Admission(2, 0, (4, 5, 6), 3, SAMPLING, 77, 1, frozenset([7, 23])),),
    )


def test_step_imports_no_torch():
    code = "import sys, strobe.step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_span_rows_are_tokens_and_device_drafts():
    assert (device_drafts(3).num_rows, device_drafts(3).num_context_rows) == (4, 1)
    assert (device_drafts(0).num_rows, device_drafts(0).num_context_rows) == (1, 1)
    chunk = Span(0, 0, 0, (4, 5, 6))
    assert (chunk.num_rows, chunk.num_context_rows) == (3, 3)


def test_host_drafts_are_last_span_tokens():
    known = Span(0, 7, 7, (8, 9, 10), 2, None, 3)
    assert (known.num_rows, known.num_context_rows) == (3, 1)


def test_only_device_drafting_spans_are_listed_by_method():
    known = Span(0, 7, 7, (8, 9, 10), 2, None, 3)
    spans = (
        device_drafts(2),
        device_drafts(0),
        device_drafts(3, "other"),
        known,
        device_drafts(1),
        device_drafts(0, "other"),
    )
    assert Plan(spans).methods == {"dflash": [0, 4], "other": [2]}
    assert Plan(()).methods == {}


def test_pickled_plan_equals_itself():
    original = plan()
    again = pickle.loads(pickle.dumps(original))
    assert again == original
    assert again is not original
    assert again.admitted[0].sampling == SAMPLING
    assert isinstance(again.admitted[0].sampling.structured_outputs, StructuredOutputs)
    assert again._replace(spans=again.spans[:2]) != original


def test_pickled_results_and_events_equal_themselves():
    logprob = TokenLogprob(4, -0.5, 1, ((4, -0.5), (9, -2.0)))
    result = StepResult(
        [[1], [2, 3]],
        [0, 1],
        [0, 3],
        [[0.0], [0.5]],
        {1: [logprob, logprob]},
        {0: [logprob]},
        {0: "Why."},
    )
    start = RequestStart("dflash", None, 16, 0.25, (None, logprob), frozenset([7]))
    event = TokenEvent("key", 1, [2, 3], "stop", 7, None, 3, 1, [logprob], 20, start)
    for value in (result, event):
        assert pickle.loads(pickle.dumps(value)) == value


def test_plan_repr_is_readable():
    text = repr(plan())
    assert "Span(slot=0, start=9, max_start=12, tokens=(-1,), num_drafts=3, method='dflash'" in text
    assert "PageWrite(slot=0, first=4, pages=(2,), group=0)" in text
    assert "Admission(slot=2, length=0, tokens=(4, 5, 6), num_prompt=3" in text
    assert " at 0x" not in text
    assert len(text) < 2000


def test_valid_plan_passes_the_check():
    plan().check(3, [4])
    Plan().check(1, [2])
    plan()._replace(pages=(PageWrite(0, 1, (8,), group=1),)).check(3, [4, 9])


WRONG: dict[str, tuple[Plan, str]] = {
    "a span's slot": (Plan((device_drafts(0, slot=4),)), "slot 4 of 4 in Span"),
    "a negative slot": (Plan((device_drafts(0, slot=-1),)), "slot -1 of 4 in Span"),
    "an admission's slot": (
        Plan(admitted=(Admission(9, 0, (1,), 1, SAMPLING, 0, 0, frozenset()),)),
        "slot 9 of 4 in Admission",
    ),
    "the slot of pages": (Plan(pages=(PageWrite(4, 0, (1,)),)), "slot 4 of 4 in PageWrite"),
    "a page beyond the pool": (Plan(pages=(PageWrite(0, 0, (1, 8)),)), "page beyond 8"),
    "an unknown page group": (
        Plan(pages=(PageWrite(0, 0, (1,), group=1),)),
        "a page group that does not exist",
    ),
    "the reserved page": (Plan(pages=(PageWrite(0, 0, (0,)),)), "PageWrite"),
}


@pytest.mark.parametrize("name", WRONG)
def test_plan_with_unknown_slot_or_page_is_rejected(name: str):
    wrong, message = WRONG[name]
    with pytest.raises(AssertionError, match=message):
        wrong.check(4, [8])


@pytest.mark.parametrize("name", WRONG)
def test_engine_rejects_invalid_plan_untouched(target: Target, name: str):
    from strobe.config import EngineConfig
    from strobe.engine.engine import Engine

    wrong, message = WRONG[name]
    config = EngineConfig(
        target=str(target.path),
        max_num_seqs=4,
        max_model_len=24,
        page_size=4,
        kv_cache_memory=8 * 4 * 2 * 2 * 16 * 4 * 5,
    )
    engine = Engine(config)
    assert engine.components.pool.num_pages == 8
    engine.add([3, 1, 4], SamplingParams(max_tokens=9, temperature=0.0))
    engine.step()
    calls: list[object] = []
    engine.runner.model.forward = lambda *args: calls.append(args)  # type: ignore[method-assign]
    good = engine.scheduler.plan()
    cursor, tables = engine.state.cursor.clone(), engine.state.tables.clone()
    joined = Plan(*[ours + theirs for ours, theirs in zip(good[:3], wrong[:3], strict=True)])
    with pytest.raises(AssertionError, match=message):
        engine.launch(joined)
    assert not calls
    assert engine.state.cursor.equal(cursor)
    assert engine.state.tables.equal(tables)
