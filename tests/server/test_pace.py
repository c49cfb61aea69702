"""The Retry-After estimate, with a simulated clock."""

from __future__ import annotations

import pytest

from strobe.server.generation.retry_estimator import RetryEstimator


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def paced(every: float, count: int, *, then: float = 0.0) -> RetryEstimator:
    """An estimator after answers at a fixed interval, some time after the last one."""
    clock = Clock()
    pace = RetryEstimator(clock)
    for _ in range(count):
        pace.record_finished()
        clock.now += every
    clock.now += then
    return pace


def test_retry_after_is_one_second_without_answers():
    assert RetryEstimator().retry_after(500) == 1
    assert paced(0.1, 10, then=3600).retry_after(500) == 1, "an hour ago is nothing to go by"


@pytest.mark.parametrize(
    ("every", "answers", "seconds"),
    [(0.0625, 80, 5), (0.0625, 81, 6), (0.5, 20, 10), (0.5, 10_000, 60), (0.001, 10, 1)],
)
def test_retry_after_follows_answer_time_within_bounds(every: float, answers: int, seconds: int):
    assert paced(every, 40).retry_after(answers) == seconds


def test_retry_after_counts_only_the_last_minute():
    """Two answers per second, then a pause after which nearly all of them are too old."""
    clock = Clock()
    pace = RetryEstimator(clock)
    for _ in range(20):
        pace.record_finished()
    clock.now += 70
    for _ in range(10):
        pace.record_finished()
        clock.now += 0.25
    assert pace.retry_after(8) == 2


def test_slowdown_is_noticed_before_next_completion():
    assert paced(0.125, 16).retry_after(8) == 1
    assert paced(0.125, 16, then=14).retry_after(8) == 8
