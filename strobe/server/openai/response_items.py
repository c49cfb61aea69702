"""The output items of a response, and their events in a stream."""

from __future__ import annotations

import secrets
from typing import Generic, TypeVar

from strobe.server.generation.bodies import ItemStatus
from strobe.server.generation.output_items import Logprobs, OutputItem
from strobe.server.openai.protocol import response_bodies as bodies
from strobe.server.openai.protocol import response_events as events
from strobe.server.openai.protocol.response_events import Event
from strobe.server.parsers.segment import Segment


class _Item:
    """Base class of items. index: the item's index in the output."""

    def __init__(self, index: int, prefix: str):
        self.index = index
        self.id = f"{prefix}_{secrets.token_hex(12)}"
        self.status: ItemStatus = "in_progress"
        self.text = ""

    def _added(self, item: bodies.OutputItem) -> events.ItemEvent:
        return {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def _done(self, item: bodies.OutputItem) -> events.ItemEvent:
        return {"type": "response.output_item.done", "output_index": self.index, "item": item}


Part = TypeVar("Part", bodies.ReasoningText, bodies.OutputText)


class _Text(_Item, Generic[Part]):
    """An item with one text part."""

    def item(self) -> bodies.OutputItem:
        return self._item([self._part()])

    def begin(self) -> list[Event]:
        added: events.PartEvent = {
            "type": "response.content_part.added",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "part": self._part(),
        }
        return [self._added(self._item([])), added]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        return [self._delta(text, logprobs)]

    def end(self, status: ItemStatus) -> list[Event]:
        self.status = status
        part_done: events.PartEvent = {
            "type": "response.content_part.done",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "part": self._part(),
        }
        return [self._text_done(), part_done, self._done(self.item())]

    def _delta(self, text: str, logprobs: Logprobs) -> Event:
        raise NotImplementedError

    def _text_done(self) -> Event:
        raise NotImplementedError

    def _part(self) -> Part:
        raise NotImplementedError

    def _item(self, content: list[Part]) -> bodies.OutputItem:
        raise NotImplementedError


class Reasoning(_Text[bodies.ReasoningText]):
    """Reasoning as plain text, without a summary."""

    def __init__(self, index: int):
        super().__init__(index, "rs")

    def _delta(self, text: str, logprobs: Logprobs) -> events.ReasoningDelta:
        return {
            "type": "response.reasoning_text.delta",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "delta": text,
        }

    def _text_done(self) -> events.ReasoningDone:
        return {
            "type": "response.reasoning_text.done",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "text": self.text,
        }

    def _part(self) -> bodies.ReasoningText:
        return {"type": "reasoning_text", "text": self.text}

    def _item(self, content: list[bodies.ReasoningText]) -> bodies.OutputReasoning:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": self.status,
        }


class Message(_Text[bodies.OutputText]):
    """A message of the assistant."""

    def __init__(self, index: int):
        super().__init__(index, "msg")
        self.logprobs: Logprobs = []

    def _delta(self, text: str, logprobs: Logprobs) -> events.TextDelta:
        self.logprobs += logprobs
        return {
            "type": "response.output_text.delta",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }

    def _text_done(self) -> events.TextDone:
        return {
            "type": "response.output_text.done",
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "text": self.text,
            "logprobs": self.logprobs,
        }

    def _part(self) -> bodies.OutputText:
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    def _item(self, content: list[bodies.OutputText]) -> bodies.OutputMessage:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": content,
        }


class Call(_Item):
    """A function call. text: the arguments as JSON."""

    def __init__(self, index: int, name: str):
        super().__init__(index, "fc")
        self.name = name
        self.call_id = f"call_{secrets.token_hex(12)}"

    def item(self) -> bodies.OutputCall:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
            "status": self.status,
        }

    def begin(self) -> list[Event]:
        return [self._added(self.item())]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        if not text:
            return []
        delta: events.ArgumentsDelta = {
            "type": "response.function_call_arguments.delta",
            "item_id": self.id,
            "output_index": self.index,
            "delta": text,
        }
        return [delta]

    def end(self, status: ItemStatus) -> list[Event]:
        self.status = status
        done: events.ArgumentsDone = {
            "type": "response.function_call_arguments.done",
            "item_id": self.id,
            "output_index": self.index,
            "name": self.name,
            "arguments": self.text,
        }
        return [done, self._done(self.item())]


def make_item(segment: Segment, index: int) -> OutputItem[bodies.OutputItem]:
    """Return the item for its first segment."""
    if segment.kind == "call":
        return Call(index, segment.name or "")
    return Message(index) if segment.kind == "content" else Reasoning(index)
