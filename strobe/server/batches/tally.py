"""Counts of a run over a batch's lines: answers, failures by reason, tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from strobe.server.batches.lines import BatchLine

MAX_REASONS = 5
"""Number of reasons that `failures` names."""

_NUMBER = re.compile(r"\d+")
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
_MAX_SHARE = 0.95
"""Largest share of an unfinished answer."""


class BatchTally:
    """The answers of a run so far. running: the number of requests being answered."""

    def __init__(self, lines: Sequence[BatchLine]):
        self._limits = [_limit(line.body) for line in lines]
        self.running = 0
        self.answered = 0
        self._tokens = 0
        self._first_of: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    @property
    def failed(self) -> int:
        """Number of requests that failed."""
        return sum(self._counts.values())

    @property
    def ended(self) -> int:
        """Number of requests that were answered or failed."""
        return self.answered + self.failed

    def add(self, status: int, body: Mapping[str, Any]) -> None:
        """Count an answer, or a failure."""
        if status == HTTPStatus.OK:
            usage = body.get("usage") or {}
            self._tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))
            self.answered += 1
            return
        reason = (body.get("error") or {}).get("message", f"status {status}")
        kind = _NUMBER.sub("", reason)
        self._first_of.setdefault(kind, reason)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def unfinished(self, generated: int, context: int) -> float:
        """Estimate the running requests' tokens in numbers of answers. generated: tokens of the
        whole run. An answer is assumed to be as long as the mean so far; before the first,
        as the mean of the limits, where `context` stands for none."""
        if self._tokens:
            mean = self._tokens / self.answered
        else:
            limits = [min(limit or context, context) for limit in self._limits]
            mean = sum(limits) / max(len(limits), 1)
        unfinished = max(generated - self._tokens, 0) / max(mean, 1.0)
        return min(unfinished, _MAX_SHARE * self.running)

    def failures(self) -> list[str]:
        """Return a line for each reason of failures, the commonest first. Reasons that differ in
        numbers alone are one."""
        kinds = sorted(self._counts, key=self._counts.__getitem__, reverse=True)
        lines = [f"{self._counts[kind]} × {self._first_of[kind]}" for kind in kinds[:MAX_REASONS]]
        if rest := kinds[MAX_REASONS:]:
            lines.append(f"{sum(self._counts[kind] for kind in rest)} × other reasons")
        return lines


def _limit(body: Mapping[str, Any]) -> int | None:
    """The largest number of tokens of a request's answer, None without a limit."""
    limits = [body[name] for name in _LIMITS if isinstance(body.get(name), int)]
    return max(1, min(limits)) if limits else None
