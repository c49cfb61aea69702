"""An answer item by item: reasoning, text and calls in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Literal, Protocol

from strobe.server.openai import replies
from strobe.server.openai.chat import chat_logprob, is_complete
from strobe.server.openai.runs import GenerationJob, PromptRun
from strobe.server.openai.segments import OrderedParser, Segment, TokenAttribution
from strobe.server.serving import Serving

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]
Status = Literal["in_progress", "completed", "incomplete"]


class OutputItem(Protocol):
    """One item of the output, in the form of an endpoint. Its events are sent as it grows."""

    def item(self) -> dict[str, Any]:
        """It as the endpoint's object, as far as it has come."""
        ...

    def begin(self) -> list[Event]: ...
    def add(self, text: str, logprobs: Logprobs) -> list[Event]: ...
    def end(self, status: Status) -> list[Event]: ...


class OutputItems:
    """The output as it grows, item by item: one begins where the one before has ended."""

    def __init__(self, make: Callable[[Segment, int], OutputItem], *, parallel: bool):
        """make: an item from its first segment and its place in the output. parallel: without it
        there is only the first call."""
        self._make, self._parallel = make, parallel
        self._items: list[OutputItem] = []
        self._open: tuple[str, int] | None = None
        self._arguments = ""  # the newest call's

    @property
    def calls_are_complete(self) -> bool:
        """Whether there are calls, the last one to its end: a stop string may have cut it."""
        return is_complete(self._arguments)

    @property
    def output(self) -> list[dict[str, Any]]:
        return [item.item() for item in self._items]

    def take(self, segment: Segment, logprobs: Logprobs) -> list[Event]:
        """Take in a segment; its events."""
        if segment.kind == "call" and segment.call and not self._parallel:
            return []
        events: list[Event] = []
        if self._open != (segment.kind, segment.call):
            events += self._begin(segment)
        if segment.kind == "call":
            self._arguments += segment.text
        return events + self._items[-1].add(segment.text, logprobs)

    def end(self, status: Status) -> list[Event]:
        """The answer has ended. An answer of nothing is a message of nothing."""
        events: list[Event] = []
        if status == "completed" and self._open in (None, ("reasoning", 0)):
            events += self._begin(Segment("content", "", 0, 0))
        return events + self.close(status)

    def close(self, status: Status) -> list[Event]:
        """End the item that is open, if there is one."""
        was, self._open = self._open, None
        return self._items[-1].end(status) if was is not None else []

    def _begin(self, segment: Segment) -> list[Event]:
        events = self.close("completed")
        self._items.append(self._make(segment, len(self._items)))
        self._open = segment.kind, segment.call
        self._arguments = "" if segment.kind == "call" else self._arguments
        return events + self._items[-1].begin()


class OrderedAnswer:
    """One answer on its way, as events of its items.

    reasoning_tokens: those so far with reasoning in their text, markers left out.
    """

    def __init__(self, serving: Serving, job: GenerationJob, items: OutputItems):
        """Hands the prompt to the engine. Raises Unserved, EngineDead."""
        self._segments, self._attribution = OrderedParser(job.parser()), TokenAttribution()
        self._tokenizer = serving.tokenizer
        self.items, self.reasoning_tokens = items, 0
        self.run = PromptRun(serving, replace(job, parser=lambda: self._segments))

    @property
    def status(self) -> Status:
        """How the answer has ended."""
        reason = self.run.choices[0].output.finish_reason
        return "incomplete" if reason == "length" else "completed"

    async def steps(self) -> AsyncIterator[list[Event]]:
        """The events of each step; the last step's end the output. Raises BadField, Unserved,
        EngineDead."""
        async for steps in self.run.steps():
            replies.check_answers([self.run])
            for progress in steps:
                self._attribution.add(progress.delta)
            events = [event for part in self._segments.take() for event in self._take(part)]
            if any(progress.finished for progress in steps):
                events += self.items.end(self.status)
            yield events

    def _take(self, segment: Segment) -> list[Event]:
        tokens = self._attribution.tokens_of(segment)
        logprobs: Logprobs = []
        if segment.kind == "reasoning":
            self.reasoning_tokens += len(tokens)
        elif segment.kind == "content":
            known = [logprob for logprob in tokens if logprob is not None]
            logprobs = [chat_logprob(logprob, self._tokenizer, False) for logprob in known]
        return self.items.take(segment, logprobs)
