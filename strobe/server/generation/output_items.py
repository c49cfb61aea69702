"""An answer as output items: reasoning, text and calls in the order of the model's text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from strobe.request import CUT_SHORT
from strobe.server.generation import reply
from strobe.server.generation.bodies import ItemStatus, TokenLogprob
from strobe.server.generation.logprobs import chat_logprob
from strobe.server.generation.prepare import Prepared
from strobe.server.generation.reply import Codec, Event, encode_typed_event
from strobe.server.generation.request import ConversationRequest
from strobe.server.generation.run import Progress, PromptRun
from strobe.server.generation.token_attribution import TokenAttribution
from strobe.server.parsers.call_arguments import read_object
from strobe.server.parsers.segment import Segment
from strobe.server.serving import Serving

Logprobs = list[TokenLogprob]
Body = TypeVar("Body", covariant=True)
"""An item as JSON."""


class OutputItem(Protocol[Body]):
    """One item of the output, in an endpoint's format. Its methods return the events to send."""

    def item(self) -> Body:
        """The item as JSON, as far as it has been generated."""
        ...

    def begin(self) -> Sequence[Event]: ...
    def add(self, text: str, logprobs: Logprobs) -> Sequence[Event]: ...
    def end(self, status: ItemStatus) -> Sequence[Event]: ...


class OutputItems(Generic[Body]):
    """The list of output items. A new item begins when the kind of segment changes."""

    def __init__(self, make: Callable[[Segment, int], OutputItem[Body]], *, parallel: bool):
        """make: returns an item for its first segment and its index in the output. parallel: if
        False, all calls after the first are dropped."""
        self._make = make
        self._parallel = parallel
        self._items: list[OutputItem[Body]] = []
        self._open: tuple[str, int] | None = None
        self._arguments = ""  # of the last call

    @property
    def calls_are_complete(self) -> bool:
        """Whether there are calls and the last one is complete, not cut by a stop string."""
        return read_object(self._arguments) is not None

    @property
    def output(self) -> list[Body]:
        return [item.item() for item in self._items]

    def take(self, segment: Segment, logprobs: Logprobs) -> list[Event]:
        """Add a segment. Returns its events."""
        if segment.kind == "call" and segment.call and not self._parallel:
            return []
        events: list[Event] = []
        if self._open != (segment.kind, segment.call):
            events += self._begin(segment)
        if segment.kind == "call":
            self._arguments += segment.text
        return [*events, *self._items[-1].add(segment.text, logprobs)]

    def end(self, status: ItemStatus) -> list[Event]:
        """End the answer; an answer without content or calls gets an empty message. Returns the
        events."""
        events: list[Event] = []
        if status == "completed" and self._open in (None, ("reasoning", 0)):
            events += self._begin(Segment(kind="content", text="", start=0, end=0))
        return [*events, *self.close(status)]

    def close(self, status: ItemStatus) -> Sequence[Event]:
        """End the open item, if there is one; a call with all its arguments is complete whatever
        ended the answer. Returns its events."""
        open_item = self._open
        self._open = None
        if open_item is not None and open_item[0] == "call" and self.calls_are_complete:
            status = "completed"
        return self._items[-1].end(status) if open_item is not None else []

    def _begin(self, segment: Segment) -> list[Event]:
        ended = self.close("completed")
        self._items.append(self._make(segment, len(self._items)))
        self._open = segment.kind, segment.call
        self._arguments = "" if segment.kind == "call" else self._arguments
        return [*ended, *self._items[-1].begin()]


class ItemCodec(Codec, Generic[Body]):
    """An answer as items, in the order in which the model wrote them. Events are named after their
    type.

    reasoning_tokens: number of tokens so far with reasoning in their text, without markers.
    """

    def __init__(
        self,
        serving: Serving,
        request: ConversationRequest,
        prepared: Prepared,
        make: Callable[[Segment, int], OutputItem[Body]],
    ):
        """Submit the prompt to the engine. make: as in OutputItems. Raises ApiError, EngineDead."""
        self.run = PromptRun(serving, prepared.job)
        super().__init__([self.run], prepared.deadline)
        self.prepared = prepared
        self.items = OutputItems(make, parallel=request.generation.allows_several_calls)
        self.reasoning_tokens = 0
        self._attribution = TokenAttribution()
        self._tokenizer = serving.tokenizer

    @property
    def status(self) -> ItemStatus:
        """The status of the finished answer."""
        reason = self.run.choices[0].output.finish_reason
        return "incomplete" if reason in CUT_SHORT else "completed"

    def delta(self, place: int, steps: Sequence[Progress]) -> list[Event]:
        reply.check_answers(self.runs)
        events: list[Event] = []
        for progress in steps:
            self._attribution.add(progress.delta)
            for segment in progress.segments:
                events += self._take(segment)
        if any(progress.finished for progress in steps):
            events += self.items.end(self.status)
        return events

    def encode(self, event: Event) -> bytes:
        return encode_typed_event(event)

    def _take(self, segment: Segment) -> list[Event]:
        tokens = self._attribution.tokens_of(segment)
        logprobs: Logprobs = []
        if segment.kind == "reasoning":
            self.reasoning_tokens += len(tokens)
        elif segment.kind == "content":
            entries = [logprob for logprob in tokens if logprob is not None]
            logprobs = [chat_logprob(logprob, self._tokenizer, False) for logprob in entries]
        return self.items.take(segment, logprobs)
