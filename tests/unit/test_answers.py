"""Answers put together from news: what a delta says stays true while its answer grows."""

from __future__ import annotations

from strobe.answers import Answer, News
from strobe.request import SamplingParams
from strobe.text.tokenizer import Tokenizer


def test_only_the_last_delta_is_finished_also_when_read_late(tokenizer: Tokenizer):
    ids = tokenizer.encode("The list is paper, pear.")
    answer = Answer(tokenizer, SamplingParams(), request_id="r")
    news = [*(News([token]) for token in ids[:-1]), News(ids[-1:], "length")]
    deltas = [answer.push(one) for one in news]
    assert [delta.finished for delta in deltas] == [False] * (len(ids) - 1) + [True]
    assert "".join(delta.text for delta in deltas) == answer.output.text


def test_a_stop_text_finishes_the_delta_that_meets_it(tokenizer: Tokenizer):
    answer = Answer(tokenizer, SamplingParams(stop=" is"), request_id="r")
    first, second = (answer.push(News(tokenizer.encode(text))) for text in ("The list", " is on"))
    assert (first.finished, second.finished) == (False, True)
    assert answer.output.stop_reason == " is"
