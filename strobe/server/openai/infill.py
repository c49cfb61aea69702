"""The endpoint /infill, in llama.cpp's form."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from strobe.request import CUT_SHORT
from strobe.server.openai import replies
from strobe.server.openai.completions import Started, start
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.server.serving import Serving


async def infill(serving: Serving, http: Request) -> Response:
    """Answer POST /infill."""
    try:
        request = InfillRequest.read(await http.body(), lenient=serving.settings.lenient)
        started = await start(serving, request, http)
    except Exception as error:
        return replies.error_response(serving, http, error)
    reply = InfillReply(request, started, replies.wants_report(http, request))
    if request.stream:
        ending = replies.StreamEnd(replies.error_event)
        return await replies.stream_response(
            serving,
            http,
            runs=started.runs,
            events=reply.events,
            deadline=started.deadline,
            ending=ending,
        )
    return await replies.json_response(
        serving, http, runs=started.runs, body=reply.body, deadline=started.deadline
    )


class InfillReply:
    """Builds the response of /infill, whole or streamed."""

    def __init__(self, request: InfillRequest, started: Started, report: bool):
        self.request = request
        self.name = started.name
        self.report = report
        (self.run,) = started.runs

    async def body(self) -> dict[str, Any]:
        """Return the whole answer after its end."""
        await replies.wait_for_all([self.run])
        replies.check_answers([self.run])
        text = self.run.choices[0].output.text
        return self._last(text if self.request.n_predict else "")

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the parts of the text, and then the last event."""
        async for steps in self.run.steps():
            text = "".join([progress.delta.text for progress in steps])
            if text and self.request.n_predict:
                yield replies.event({"content": text, "stop": False})
        replies.check_answers([self.run])
        if not self.run.abandoned:
            yield replies.event(self._last(""))

    def _last(self, text: str) -> dict[str, Any]:
        """Return the text with the reason of its end, counts and durations."""
        choice = self.run.choices[0]
        count = len(self.run.choices[0].output.token_ids)
        word = choice.output.stop_reason if isinstance(choice.output.stop_reason, str) else ""
        warnings = [*self.request.warnings(), *replies.ending_warnings(self.run)]
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
        } | replies.extras([self.run], self.report, warnings)

    def _timings(self, count: int) -> dict[str, Any]:
        choice = self.run.choices[0]
        job = self.run.job
        total = time.monotonic() - job.started_at
        first = total if choice.first_token_seconds is None else choice.first_token_seconds
        started, ended = self.run.decoded
        num_computed = len(job.prompt_ids) - self.run.num_cached
        timings: dict[str, Any] = {"cache_n": self.run.num_cached}
        prompt = "prompt", num_computed, first - (choice.queue_time or 0.0)
        for name, number, seconds in (prompt, ("predicted", count, ended - started)):
            timings |= {
                f"{name}_n": number,
                f"{name}_ms": round(1e3 * seconds, 3),
                f"{name}_per_second": round(number / seconds, 3) if seconds > 0 else 0.0,
            }
        return timings
