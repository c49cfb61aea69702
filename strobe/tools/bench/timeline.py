"""Times of drafting and verification in each step, from the engine's marks.

    start ---draft launched--- draft ---target and verification launched--- verify ... start

With CUDA a mark is an event in the stream, which gives the device's times without waiting. On a
CPU, where launching is running, a mark reads the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

import torch


@dataclass(frozen=True)
class Split:
    """Mean milliseconds per step of drafting, of target and verification, and of the rest up to the
    next step's start; `median` is the median of whole steps."""

    steps: int
    draft: float
    verify: float
    rest: float
    median: float

    @property
    def whole(self) -> float:
        return self.draft + self.verify + self.rest


Stamp = float | torch.cuda.Event


class Timeline:
    """Collects marks; assign `mark` to `Engine.on_phase`."""

    def __init__(self, device: torch.device):
        self.device = device
        self._steps: list[dict[str, Stamp]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def mark(self, name: str) -> None:
        """Record one of "start", "draft" and "verify"; each step marks all three in this order."""
        if name == "start":
            self._steps.append({})
        self._steps[-1][name] = self._now()

    def stop(self) -> None:
        """Record the end of the last step."""
        self._steps.append({"start": self._now()})

    def _now(self) -> Stamp:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def split(self, chosen: Sequence[int] | None = None) -> Split | None:
        """Return the split over the steps with these indices, or over all; None if there are none.
        Call stop() and synchronize the device first."""
        numbers = range(len(self._steps) - 1) if chosen is None else chosen
        drafts: list[float] = []
        verifies: list[float] = []
        wholes: list[float] = []
        for i in numbers:
            step = self._steps[i]
            following = self._steps[i + 1]
            drafts.append(_ms(step["start"], step["draft"]))
            verifies.append(_ms(step["draft"], step["verify"]))
            wholes.append(_ms(step["start"], following["start"]))
        if not wholes:
            return None
        draft = mean(drafts)
        verify = mean(verifies)
        return Split(
            steps=len(wholes),
            draft=draft,
            verify=verify,
            rest=mean(wholes) - draft - verify,
            median=median(wholes),
        )


def _ms(first: Stamp, last: Stamp) -> float:
    if isinstance(first, torch.cuda.Event):
        assert isinstance(last, torch.cuda.Event)
        return first.elapsed_time(last)
    assert isinstance(last, float)
    return 1e3 * (last - first)
