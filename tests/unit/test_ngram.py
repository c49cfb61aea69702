"""Prompt lookup against a slow and obvious search."""

from __future__ import annotations

import gc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.ngram import NgramProposer


def proposer(shortest: int = 2, longest: int = 4) -> NgramProposer:
    return NgramProposer(shortest, longest)


def request_with(tokens: list[int]) -> Request:
    return Request("r", tokens, SamplingParams(), seed=0, method="ngram", num_drafts=8)


def propose(
    by: NgramProposer, requests: list[Request], drafts: list[int] | int = 8
) -> list[list[int]]:
    """Return each request's drafts."""
    counts = [drafts] * len(requests) if isinstance(drafts, int) else drafts
    return [
        list(by.propose(request, n).tokens) for request, n in zip(requests, counts, strict=True)
    ]


def obvious(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    """Return the text after the last earlier occurrence of the longest matching tail."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                return tokens[end : end + count]
    return []


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=300)
@given(st.lists(TOKENS, min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 2), st.data())
def test_drafts_follow_the_last_longest_match(
    texts: list[list[int]], shortest: int, more: int, data: st.DataObject
):
    longest = shortest + more
    by = proposer(shortest, longest)
    requests = [request_with(text) for text in texts]
    for _ in range(3):
        counts = [data.draw(st.integers(1, 9)) for _ in requests]
        expected = [
            obvious(r.tokens, shortest, longest, n) for r, n in zip(requests, counts, strict=True)
        ]
        assert propose(by, requests, counts) == expected
        for request in requests:
            request.tokens += data.draw(st.lists(st.integers(0, 2), max_size=6))


def test_longer_match_beats_later_match():
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert propose(proposer(1, 3), [request_with(tokens)], 2) == [[7, 9]]
    assert propose(proposer(1, 1), [request_with(tokens)], 2) == [[8, 1]]


def test_tail_does_not_match_itself():
    assert propose(proposer(2, 4), [request_with([1, 2, 3, 4])]) == [[]]


def test_draft_may_overlap_its_match_and_ends_with_text():
    assert propose(proposer(2, 2), [request_with([5, 5, 5])]) == [[5]]
    assert propose(proposer(2, 2), [request_with([1, 2, 1, 2])]) == [[1, 2]]


@pytest.mark.parametrize("length", [1, 2])
def test_text_shorter_than_the_shortest_match_has_no_draft(length: int):
    assert propose(proposer(3, 4), [request_with([1] * length)]) == [[]]


def test_requests_with_and_without_a_match_run_together():
    requests = [request_with([1, 2, 3]), request_with([4, 4, 4, 4]), request_with([9])]
    assert propose(proposer(1, 2), requests, 3) == [[], [4], []]


def test_each_request_drafts_from_its_own_text_only():
    by = proposer(2, 2)
    first, second = request_with([1, 2, 9, 1, 2]), request_with([1, 2, 8, 1, 2])
    assert propose(by, [first, second], 1) == [[9], [8]]
    assert propose(by, [second, first], 1) == [[8], [9]]


def test_index_is_freed_with_its_request():
    by = proposer()
    request = request_with([1, 2, 3, 1, 2])
    propose(by, [request])
    assert len(by._indices) == 1
    del request
    gc.collect()
    assert len(by._indices) == 0
