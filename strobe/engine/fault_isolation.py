"""After a failed step, requests run alone until the faulty one is identified. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from strobe.request import Request, Status

logger = logging.getLogger(__name__)
T = TypeVar("T")

SOLO_STEPS = 4
"""Steps that each request of a failed step runs alone."""
MAX_FAILURES = 3
"""Steps that fail with one request alone, none getting further, before it is ended."""


class FaultIsolation:
    """Requests of failed steps, in the order in which they run alone, and the steps left for
    each."""

    def __init__(self) -> None:
        self._steps: dict[Request, int] = {}

    @property
    def is_active(self) -> bool:
        """Whether requests run alone."""
        return bool(self._steps)

    def solo_request(self) -> Request | None:
        """Return the request that runs alone now, if any."""
        for request in list(self._steps):
            if request.status is not Status.FINISHED:
                return request
            del self._steps[request]
        return None

    def clear(self) -> None:
        self._steps.clear()

    def failed(self, requests: Sequence[Request]) -> Request | None:
        """Record that a step of these requests failed; return the faulty one once it is certain."""
        self._steps = dict.fromkeys(requests, SOLO_STEPS)
        if len(requests) != 1:
            return None
        requests[0].failures += 1
        return requests[0] if requests[0].failures >= MAX_FAILURES else None

    def succeeded(self, request: Request, length: int) -> None:
        """Record that a request completed a step, after which `length` positions have K/V.
        Repeating positions from before its failure does not count."""
        if request in self._steps and length > request.failed_at:
            self._steps[request] -= 1
            if not self._steps[request]:
                del self._steps[request]


class Advice(set[str]):
    """The advisers that have raised. A failing adviser never fails a step."""

    def of(self, part: str, ask: Callable[[], T], default: T) -> T:
        """Return an adviser's result, or the default if it raises; an adviser's first exception is
        logged."""
        try:
            return ask()
        except Exception:  # whatever it is, advice must cost no token
            if part not in self:
                self.add(part)
                logger.exception("%s failed; steps go on without its advice.", part)
            return default
