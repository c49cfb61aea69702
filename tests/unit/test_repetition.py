"""`RepetitionDetector` against a search of the whole answer, and the work that it does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from strobe.request import RepetitionDetector, Request
from strobe.sampling_params import RepetitionDetection, SamplingParams

SETTINGS = [(1, 1, 2), (1, 1, 5), (0, 4, 2), (1, 4, 3), (2, 6, 2), (3, 3, 4), (1, 64, 2)]


def detection(min_size: int, max_size: int, count: int) -> RepetitionDetection:
    return RepetitionDetection(
        max_pattern_size=max_size, min_pattern_size=min_size, min_count=count
    )


def end_of(tokens: Sequence[int], settings: RepetitionDetection, min_tokens: int = 0) -> int | None:
    detector = RepetitionDetector(settings, min_tokens=min_tokens)
    lengths = (length for length, token in enumerate(tokens, 1) if detector.push(token))
    return next(lengths, None)


def searched_end(
    tokens: list[int], settings: RepetitionDetection, min_tokens: int = 0
) -> int | None:
    """Return the answer's length at its first repetition, found by comparing everything."""
    count = settings.min_count
    for length in range(max(min_tokens, 1), len(tokens) + 1):
        for size in range(max(settings.min_pattern_size, 1), settings.max_pattern_size + 1):
            newest = tokens[max(0, length - size * count) : length]
            if newest == tokens[length - size : length] * count:
                return length
    return None


@pytest.mark.parametrize(
    ("tokens", "settings", "length"),
    [
        ([7, 7, 7, 7], (1, 1, 3), 3),
        ([1, 2, 1, 2, 1, 2, 3], (1, 2, 3), 6),
        ([9, 1, 2, 3, 1, 2, 3], (1, 8, 2), 7),
        ([1, 1, 2, 1, 1, 2], (2, 8, 2), 6),
        ([1, 2, 3, 4, 5, 6], (1, 8, 2), None),
    ],
)
def test_repetition_is_found_with_its_last_token(
    tokens: list[int], settings: tuple[int, int, int], length: int | None
):
    assert end_of(tokens, detection(*settings)) == length


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("min_tokens", [0, 30])
def test_first_repetition_is_the_one_that_a_search_finds(
    settings: tuple[int, int, int], min_tokens: int
):
    found = 0
    for seed in range(60):
        rng = random.Random(seed)
        pattern = [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        tokens: list[int] = []
        while len(tokens) < 80:
            tokens += pattern if rng.random() < 0.7 else [rng.randrange(3)]
        expected = searched_end(tokens, detection(*settings), min_tokens)
        assert end_of(tokens, detection(*settings), min_tokens) == expected, (seed, tokens)
        found += expected is not None
    assert found > 5


class CountedToken(int):
    """A token that counts its comparisons."""

    num_comparisons = 0

    def __ne__(self, other: object) -> bool:
        CountedToken.num_comparisons += 1
        return int(self) != other

    __hash__ = int.__hash__


@pytest.mark.parametrize(("vocabulary", "per_token"), [(50_000, 1), (2, 3)])
def test_tokens_are_compared_about_once(vocabulary: int, per_token: int):
    rng = random.Random(1)
    tokens = [CountedToken(rng.randrange(vocabulary)) for _ in range(5000)]
    CountedToken.num_comparisons = 0
    assert end_of(tokens, detection(1, 256, 16)) is None
    assert 0 < CountedToken.num_comparisons < per_token * len(tokens)


def test_request_reads_settings_as_an_object():
    params = SamplingParams(repetition_detection={"max_pattern_size": 4, "min_count": 3})
    assert params.repetition_detection == detection(0, 4, 3)
    assert SamplingParams().repetition_detection is None


def test_truncated_request_forgets_the_tokens_of_a_step_that_is_undone():
    detection = {"max_pattern_size": 1, "min_count": 3}
    request = Request("r", [1], SamplingParams(repetition_detection=detection), seed=0)
    for token in (7, 7):
        assert request.repetition_detector is not None
        assert not request.repetition_detector.push(token)
        request.tokens.append(token)
    request.truncate(2)
    assert request.tokens == [1, 7]
    assert [request.repetition_detector.push(7) for _ in range(2)] == [False, True]
