"""Answers assembled from the engine's events: text, stop strings, pieces, log probabilities and the
speculation report."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from strobe.counters import DraftCounts
from strobe.outputs import AnswerBuilder, SpeculationReport, StreamDelta, logprobs_by_token
from strobe.request import TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.step import RequestStart, TokenEvent
from strobe.text.tokenizer import Tokenizer

END = 2
START = RequestStart("dflash", None, 0, 0.0, (), frozenset([END]))
TEXTS = [
    "Sort these words: pear, apple, fig. Then say: done.",
    "Zwölf Boxkämpfer jagen Viktor über den Sylter Deich 🦊🦊 und zurück",
    "one two one two one two three",
    "日本語のテキスト、そして😀終わり",
]


def scores_of(tokens: Sequence[int], top: int = 2) -> list[TokenLogprob]:
    """Return log probabilities that identify their token: -token / 100, rank by its parity."""
    best = tuple((n, -0.5 - n) for n in range(top))
    return [TokenLogprob(t, -t / 100, 1 + t % 2, best) for t in tokens]


def event(tokens: Sequence[int], reason: str | None = None, **reported: Any) -> TokenEvent:
    """Return an answer's first event."""
    return TokenEvent("r", 3, tokens, reason, **({"start": START} | reported))


def later(tokens: Sequence[int], reason: str | None = None, **reported: Any) -> TokenEvent:
    return event(tokens, reason, start=None, **reported)


def events(
    tokens: Sequence[int], rng: random.Random, params: SamplingParams, reason: str = "length"
) -> Iterator[TokenEvent]:
    """Yield the tokens in steps of random size; the last event carries the reason."""
    start = 0
    while start < len(tokens):
        chunk = list(tokens[start : start + rng.randint(1, 6)])
        kind = later if start else event
        start += len(chunk)
        yield kind(
            chunk,
            reason if start == len(tokens) else None,
            num_verified=7,
            num_accepted=rng.randint(0, len(chunk)),
            logprobs=scores_of(chunk) if params.logprobs is not None else (),
        )


def answer_of(tokenizer: Tokenizer, params: SamplingParams) -> AnswerBuilder:
    return AnswerBuilder(tokenizer, params, request_id="r", index=3)


def play(
    answer: AnswerBuilder, reported: Iterator[TokenEvent]
) -> list[tuple[TokenEvent, StreamDelta]]:
    """Push events until the answer ends; return each with its delta."""
    pairs = []
    for event in reported:
        pairs.append((event, answer.push(event)))
        if answer.output.finish_reason is not None:
            break
    return pairs


def slow(
    tokenizer: Tokenizer, tokens: Sequence[int], params: SamplingParams
) -> tuple[str, int, str | None]:
    """Return (text, num_tokens, stop string), decoding every prefix from scratch."""
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        matches = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if matches and count > params.min_tokens:
            start, stop = min(matches)
            return text[: start + len(stop) * params.include_stop_str_in_output], count, stop
    return tokenizer.decode(tokens), len(tokens), None


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("reason", ["length", "stop", "abort"])
def test_collected_answer_equals_streamed_one(
    tokenizer: Tokenizer, reason: str, skip: bool, include: bool
):
    """Text decoded at the end and token by token, with an end token and without one."""
    rng = random.Random(repr((reason, skip, include)))
    params = SamplingParams(
        skip_special_tokens=skip, include_stop_str_in_output=include, logprobs=1
    )
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if reason == "stop":
            tokens.append(next(iter(event(()).start.stop_ids), tokens[-1]))
        reported = list(events(tokens, rng, params, reason))
        streamed, collected = answer_of(tokenizer, params), answer_of(tokenizer, params)
        for one in reported:
            streamed.push(one)
            collected.collect(one)
        assert collected.output == streamed.output
        assert collected.report == streamed.report


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_stop_string_cuts_everything_for_any_grouping(
    tokenizer: Tokenizer, text: str, include: bool
):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    rng, stops = random.Random(text), 0
    for _ in range(60):
        begin = rng.randrange(len(text))
        stop_strings = [text[begin : begin + rng.randint(1, 9)], "never found"]
        params = SamplingParams(stop=stop_strings, include_stop_str_in_output=include, logprobs=1)
        expected, count, stop = slow(tokenizer, tokens, params)
        answer = answer_of(tokenizer, params)
        deltas = play(answer, events(tokens, rng, params))
        output, stops = answer.output, stops + (stop is not None)
        assert (output.text, output.token_ids) == (expected, tokens[:count])
        assert "".join(delta.text for _, delta in deltas) == expected
        assert [t for _, delta in deltas for t in delta.token_ids] == tokens[:count]
        reason = ("stop", stop) if stop is not None else ("length", None)
        assert (output.finish_reason, output.stop_reason) == reason
        logprobs = [entry for _, delta in deltas for entry in delta.logprobs]
        assert logprobs == scores_of(tokens[:count])
        assert output.logprobs == [logprobs_by_token(entry, tokenizer) for entry in logprobs]
        total = sum(entry.logprob for entry in logprobs)
        assert math.isclose(output.cumulative_logprob or 0.0, total, abs_tol=1e-9)
        assert [delta.finished for _, delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert stops > 50


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_of_each_token(tokenizer: Tokenizer, text: str):
    """One piece per token, also within the stop string, for any grouping of tokens."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    rng, stops = random.Random(text), 0
    for trial in range(60):
        begin = rng.randrange(len(text))
        stop = text[begin : begin + rng.randint(1, 9)]
        params = SamplingParams(stop=[stop] if trial % 3 else [])
        answer = answer_of(tokenizer, params)
        deltas = play(answer, events(tokens, rng, params))
        assert all(len(delta.pieces) == len(delta.token_ids) for _, delta in deltas)
        joined = "".join(piece for _, delta in deltas for piece in delta.pieces)
        assert joined.startswith(answer.output.text)
        beyond = joined[len(answer.output.text) :]
        assert beyond.startswith(stop) if answer.output.stop_reason else not beyond
        stops += bool(beyond)
    assert stops > 20


def test_accepted_never_exceeds_output_tokens(tokenizer: Tokenizer):
    tokens = tokenizer.encode("one two three four five", add_special_tokens=False)
    sizes = set[int]()
    for stop in ("one", "three", "five", "x"):
        params = SamplingParams(stop=stop)
        num_output = slow(tokenizer, tokens, params)[1]
        sizes.add(num_output)
        for accepted in range(len(tokens) + 1):
            answer = answer_of(tokenizer, params)
            delta = answer.push(event(tokens, num_verified=20, num_accepted=accepted))
            assert (delta.num_verified, delta.num_accepted) == (20, min(accepted, num_output))
    assert len(sizes) == 3


def test_stop_string_before_min_tokens_is_text(tokenizer: Tokenizer):
    tokens = tokenizer.encode("one two one two", add_special_tokens=False)
    first = slow(tokenizer, tokens, SamplingParams(stop="two"))[1]
    for min_tokens in range(len(tokens)):
        params = SamplingParams(stop="two", min_tokens=min_tokens)
        answer = answer_of(tokenizer, params)
        play(answer, events(tokens, random.Random(min_tokens), params))
        assert (answer.output.text == "one ") == (min_tokens < first)
        assert len(answer.output.token_ids) > min_tokens


def test_end_token_is_kept_with_empty_piece(tokenizer: Tokenizer):
    tokens = [*tokenizer.encode("all done", add_special_tokens=False), END]
    answer = answer_of(tokenizer, SamplingParams(logprobs=0, skip_special_tokens=False))
    delta = answer.push(event(tokens, "stop", stop_reason=17, logprobs=scores_of(tokens, 0)))
    assert (delta.text, delta.token_ids, delta.pieces[-1]) == ("all done", tokens, "")
    assert "".join(delta.pieces) == "all done"
    output = answer.output
    assert (output.finish_reason, output.stop_reason) == ("stop", 17)
    assert [list(entry) for entry in output.logprobs or []] == [[t] for t in tokens]
    shown = answer_of(tokenizer, SamplingParams(include_stop_str_in_output=True))
    assert shown.push(event(tokens, "stop")).text == "all done"
    spelt = SamplingParams(include_stop_str_in_output=True, skip_special_tokens=False)
    assert answer_of(tokenizer, spelt).push(event(tokens, "stop")).text == "all done<|im_end|>"


def test_incomplete_bytes_come_with_last_token(tokenizer: Tokenizer):
    tokens = tokenizer.encode("a😀", add_special_tokens=False)[:-1]
    answer = answer_of(tokenizer, SamplingParams())
    first = answer.push(event(tokens))
    assert (first.text, "".join(first.pieces)) == ("a", "a")
    last = answer.push(later([tokens[0]], "length"))
    assert answer.output.text == tokenizer.decode([*tokens, tokens[0]])
    assert "".join([*first.pieces, *last.pieces]) == answer.output.text == first.text + last.text


@pytest.mark.parametrize(("reason", "error"), [("error", "Something is wrong."), ("abort", None)])
def test_final_event_without_tokens_sets_the_reason(
    tokenizer: Tokenizer, reason: str, error: str | None
):
    tokens = tokenizer.encode("so far", add_special_tokens=False)
    answer = answer_of(tokenizer, SamplingParams(stop="far away", logprobs=0))
    first = answer.push(event(tokens, logprobs=scores_of(tokens, 0)))
    assert (first.text, first.finished) == ("so ", False)
    delta = answer.push(later([], reason, error=error))
    assert (delta.text, delta.token_ids, delta.pieces, delta.logprobs) == ("far", [], [], [])
    assert delta.finished
    output = answer.output
    assert (output.text, output.finish_reason, output.error) == ("so far", reason, error)
    assert len(output.logprobs or []) == len(tokens)


def test_error_is_set_only_when_answer_failed(tokenizer: Tokenizer):
    tokens = tokenizer.encode("so far", add_special_tokens=False)
    answer = answer_of(tokenizer, SamplingParams(stop="far"))
    answer.push(event(tokens, "error", error="Something is wrong."))
    assert (answer.output.finish_reason, answer.output.error) == ("stop", None)


def test_answer_without_tokens_is_empty(tokenizer: Tokenizer):
    answer = answer_of(tokenizer, SamplingParams(max_tokens=0, logprobs=2))
    delta = answer.push(event([], "length"))
    output = answer.output
    assert (delta.text, delta.pieces, output.text, output.token_ids) == ("", [], "", [])
    assert (output.finish_reason, output.index) == ("length", 3)
    assert (output.logprobs, output.cumulative_logprob) == ([], 0.0)


def test_logprobs_are_absent_by_default(tokenizer: Tokenizer):
    answer = answer_of(tokenizer, SamplingParams())
    delta = answer.push(event([300, 301], "length"))
    assert (delta.logprobs, answer.output.logprobs) == ([], None)
    assert answer.output.cumulative_logprob is None


def test_chosen_token_comes_first_with_own_rank(
    tokenizer: Tokenizer,
):
    top = ((300, -0.1), (301, -2.5), (302, -3.0))
    far = logprobs_by_token(TokenLogprob(400, -9.0, 77, top), tokenizer)
    assert list(far) == [400, 300, 301, 302]
    assert far[400] == (-9.0, 77, tokenizer.decode([400]))
    assert [far[t].rank for t in (300, 301, 302)] == [1, 2, 3]
    assert far[301].logprob == -2.5
    near = logprobs_by_token(TokenLogprob(301, -2.5, 2, top), tokenizer)
    assert list(near) == [301, 300, 302]
    assert near[301] == (-2.5, 2, tokenizer.decode([301]))
    assert (
        logprobs_by_token(TokenLogprob(END, -1.0, 1), tokenizer)[END].decoded_token == "<|im_end|>"
    )


@pytest.mark.parametrize("size", [1, 2, 5, 99])
def test_pieces_do_not_depend_on_step_sizes(tokenizer: Tokenizer, size: int):
    ids = tokenizer.encode("The words are sorted.", add_special_tokens=False)
    answer = answer_of(tokenizer, SamplingParams(stop="rds are s"))
    pieces: list[str] = []
    for start in range(0, len(ids), size):
        if answer.output.finish_reason is None:
            pieces += answer.push((later if start else event)(ids[start : start + size])).pieces
    assert answer.output.text == "The wo"
    assert pieces == [tokenizer.token_text(token) for token in answer.output.token_ids]


def test_drafts_are_counted_up_to_stop_string(tokenizer: Tokenizer):
    tokens = tokenizer.encode("one two three four five", add_special_tokens=False)
    num_output = slow(tokenizer, tokens, SamplingParams(stop="three"))[1]
    assert 2 < num_output < len(tokens)
    answer = answer_of(tokenizer, SamplingParams(stop="three"))
    answer.push(event(tokens[:1]))
    assert answer.report.used is False
    answer.push(later(tokens[1:2], num_verified=3, num_accepted=0))
    delta = answer.push(later(tokens[2:], num_verified=7, num_accepted=len(tokens) - 2))
    assert (delta.num_verified, delta.num_accepted) == (7, num_output - 2)
    report = answer.output.speculation
    assert report is not None
    assert (report.method, report.off_reason, report.used) == ("dflash", None, True)
    counts = report.counts
    assert (counts.steps, counts.num_verified, counts.num_accepted) == (2, 10, num_output - 2)
    assert counts.acceptance_length == 1 + (num_output - 2) / 2
    assert counts.accepted_per_position == [1] * (num_output - 2) + [0] * (7 - num_output + 2)


def test_off_reason_comes_with_first_event(tokenizer: Tokenizer):
    answer = answer_of(tokenizer, SamplingParams())
    start = START._replace(method="none", off_reason="no drafter is loaded")
    answer.push(event([300], start=start))
    assert answer.output.speculation is None
    answer.push(later([301], "length"))
    report = answer.output.speculation
    assert report is not None
    assert (report.method, report.off_reason) == ("none", "no drafter is loaded")
    assert (report.used, report.counts.acceptance_length) == (False, None)


def test_answer_without_start_is_rejected(tokenizer: Tokenizer):
    with pytest.raises(AssertionError, match="first event"):
        answer_of(tokenizer, SamplingParams()).push(later([300]))


def test_report_counts_skipped_steps_with_reason(tokenizer: Tokenizer):
    answer = AnswerBuilder(tokenizer, SamplingParams(), request_id="r")
    answer.push(event([7], num_proposed=None))
    for proposed, drafted, accepted in ((15, 4, 2), (0, 0, 0), (7, 0, 0), (0, 0, 0)):
        tokens = [7] * (1 + accepted)
        fields = {"num_proposed": proposed, "num_verified": drafted, "num_accepted": accepted}
        answer.push(later(tokens, **fields))
    report = answer.report
    counts = report.counts
    assert (counts.steps, counts.num_verified, counts.num_accepted) == (1, 4, 2)
    assert counts.num_proposed == 22
    assert counts.rows == 4 + 4
    assert counts.skipped_steps == 2
    assert report.rest_reason == "drafting promised less than it costs at this load"
    assert report.off_reason is None


def test_report_has_the_names_of_json(tokenizer: Tokenizer):
    counts = DraftCounts()
    counts.add(4, 2, 15)
    report = SpeculationReport(method="dflash", counts=counts)
    assert {name: getattr(report, name) for name in report.as_dict()} == report.as_dict()
    assert (report.accepted, report.drafted, report.drafts_made) == (2, 4, 15)
    assert "acceptance_length=3.0" in repr(report)
    assert pickle.loads(pickle.dumps(report)) == report
    with pytest.raises(AttributeError, match="acepted"):
        _ = report.acepted
