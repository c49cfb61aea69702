"""The endpoint /infill, in llama.cpp's form."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fastapi import Request

from strobe.request import CUT_SHORT
from strobe.server.generation import reply
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.prepare import shadow_warnings
from strobe.server.generation.reply import Codec, Event
from strobe.server.generation.run import Progress
from strobe.server.openai.completions import Started, start
from strobe.server.openai.error_body import error_body
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.server.openai.protocol.response_bodies import Infill, InfillPart, InfillTimings
from strobe.server.serving import Serving


async def infill(serving: Serving, request: InfillRequest, http: Request) -> InfillCodec:
    """Answer POST /infill."""
    started = await start(serving, request, http)
    return InfillCodec(serving, request, started, reply.wants_report(http, request))


class InfillCodec(Codec):
    """An answer in llama.cpp's form, whole or streamed: parts of the text, and a last event."""

    def __init__(self, serving: Serving, request: InfillRequest, started: Started, report: bool):
        super().__init__(started.runs, started.deadline)
        self.warnings = [*request.warnings(), *shadow_warnings(serving, request.sampling)]
        self.request = request
        self.name = started.name
        self.report = report
        (self.run,) = started.runs

    def delta(self, place: int, steps: Sequence[Progress]) -> list[Event]:
        text = "".join([progress.delta.text for progress in steps])
        part: InfillPart = {"content": text, "stop": False}
        return [part] if text and self.request.n_predict else []

    def end(self) -> list[Event]:
        return [self._last("")]

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error)]

    def body(self) -> Infill:
        return self._last(self.run.choices[0].output.text if self.request.n_predict else "")

    def _last(self, text: str) -> Infill:
        """Return the text with the reason of its end, counts and durations."""
        choice = self.run.choices[0]
        count = len(self.run.choices[0].output.token_ids)
        word = choice.output.stop_reason if isinstance(choice.output.stop_reason, str) else ""
        warnings = [*self.warnings, *reply.ending_warnings(self.run)]
        was_cut = choice.output.finish_reason in CUT_SHORT
        kind = "limit" if was_cut else "word" if word else "eos"
        return {
            "content": text,
            "stop": True,
            "stop_type": kind,
            "stopping_word": word,
            "model": self.name,
            "tokens_predicted": count if self.request.n_predict else 0,
            "tokens_evaluated": len(self.run.job.prompt_ids),
            "tokens_cached": self.run.num_cached,
            "truncated": False,
            "timings": self._timings(count),
            **reply.extras([self.run], self.report, warnings),
        }

    def _timings(self, count: int) -> InfillTimings:
        choice = self.run.choices[0]
        job = self.run.job
        total = time.monotonic() - job.started_at
        first = total if choice.first_token_seconds is None else choice.first_token_seconds
        started, ended = self.run.decoded
        num_computed = len(job.prompt_ids) - self.run.num_cached
        prompt_seconds = first - (choice.queue_time or 0.0)
        seconds = ended - started
        return {
            "cache_n": self.run.num_cached,
            "prompt_n": num_computed,
            "prompt_ms": round(1e3 * prompt_seconds, 3),
            "prompt_per_second": _per_second(num_computed, prompt_seconds),
            "predicted_n": count,
            "predicted_ms": round(1e3 * seconds, 3),
            "predicted_per_second": _per_second(count, seconds),
        }


def _per_second(number: int, seconds: float) -> float:
    return round(number / seconds, 3) if seconds > 0 else 0.0
