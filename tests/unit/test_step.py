"""Spans and plans: the values that cross rooms in one step."""

from __future__ import annotations

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.step import Plan, Span


def span(drafts: int, *, tokens: tuple[int, ...] | None = None, method: str = "dflash") -> Span:
    request = Request("r", [1], SamplingParams(), seed=0, method=method, num_drafts=drafts)
    rows = 1 + drafts if tokens is None else 1
    return Span(request, 0, 0, 0, tokens, drafts, rows)


def listed(plan: Plan) -> dict[str, list[int]]:
    return {method: list(spans) for method, spans in plan.methods.items()}


def test_a_span_counts_its_host_tokens_or_its_one_tail():
    assert span(3).num_tokens == 1
    assert span(0, tokens=(4, 5, 6)).num_tokens == 3


def test_the_longest_draft_of_any_span_is_the_plans():
    assert Plan(()).num_drafts == 0
    assert Plan((span(2), span(5), span(0))).num_drafts == 5


def test_only_spans_that_draft_are_listed_under_their_method():
    spans = (span(2), span(0), span(3, method="ngram"), span(1), span(0, method="ngram"))
    assert listed(Plan(spans)) == {"dflash": [0, 3], "ngram": [2]}


def test_a_plan_without_known_lengths_stays_itself():
    plan = Plan((span(3),))
    assert plan.shorten(None) is plan


def test_shorten_takes_rows_along_with_drafts():
    plan = Plan((span(3), span(5), span(2)), admitted=((1, span(0).request, 7),))
    shorter = plan.shorten((3, 2, 0))
    assert [(s.drafts, s.rows) for s in shorter.spans] == [(3, 4), (2, 3), (0, 1)]
    assert [s.num_tokens for s in shorter.spans] == [1, 1, 1]
    assert shorter.admitted == plan.admitted
    assert [(s.drafts, s.rows) for s in plan.spans] == [(3, 4), (5, 6), (2, 3)]


def test_shorten_never_lengthens_a_draft():
    plan = Plan((span(2),))
    assert plan.shorten((9,)).spans == plan.spans


def test_shorten_leaves_prefill_chunks_alone():
    chunk, tail = span(0, tokens=(1, 2, 3)), span(4)
    shorter = Plan((chunk, tail)).shorten((0, 1))
    assert shorter.spans[0] is chunk
    assert shorter.num_drafts == 1
    assert listed(shorter) == {"dflash": [1]}
    assert listed(Plan((chunk, tail)).shorten((0, 0))) == {}
