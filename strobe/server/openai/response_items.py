"""The output items of a response, and their events in a stream."""

from __future__ import annotations

import secrets
from typing import Generic, TypeVar

from strobe.server.generation.bodies import ItemStatus
from strobe.server.generation.output_items import Event, Logprobs, OutputItem
from strobe.server.openai.protocol import response_bodies as bodies
from strobe.server.parsers import Segment


class _Item:
    """Base class of items. index: the item's index in the output."""

    def __init__(self, index: int, prefix: str):
        self.index = index
        self.id = f"{prefix}_{secrets.token_hex(12)}"
        self.status: ItemStatus = "in_progress"
        self.text = ""

    def event(self, kind: str, **fields: object) -> Event:
        position = {"item_id": self.id, "output_index": self.index}
        return {"type": f"response.{kind}", **position, **fields}

    def complete_event(self, kind: str, item: bodies.OutputItem) -> Event:
        return {"type": f"response.output_item.{kind}", "output_index": self.index, "item": item}


Part = TypeVar("Part", bodies.ReasoningText, bodies.OutputText)


class _Text(_Item, Generic[Part]):
    """An item with one text part. part_type: the part's type, also in the names of events."""

    part_type = ""

    def item(self) -> bodies.OutputItem:
        return self._item([self._part()])

    def begin(self) -> list[Event]:
        added = self.event("content_part.added", content_index=0, part=self._part())
        return [self.complete_event("added", self._item([])), added]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        return [self.event(f"{self.part_type}.delta", content_index=0, delta=text)]

    def end(self, status: ItemStatus) -> list[Event]:
        self.status = status
        return [
            self.event(f"{self.part_type}.done", content_index=0, text=self.text),
            self.event("content_part.done", content_index=0, part=self._part()),
            self.complete_event("done", self.item()),
        ]

    def _part(self) -> Part:
        raise NotImplementedError

    def _item(self, content: list[Part]) -> bodies.OutputItem:
        raise NotImplementedError


class Reasoning(_Text[bodies.ReasoningText]):
    """Reasoning as plain text, without a summary."""

    part_type = "reasoning_text"

    def __init__(self, index: int):
        super().__init__(index, "rs")

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

    part_type = "output_text"

    def __init__(self, index: int):
        super().__init__(index, "msg")
        self.logprobs: Logprobs = []

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.logprobs += logprobs
        return [{**event, "logprobs": logprobs} for event in super().add(text, logprobs)]

    def end(self, status: ItemStatus) -> list[Event]:
        text_done, *rest = super().end(status)
        return [{**text_done, "logprobs": self.logprobs}, *rest]

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
        return [self.complete_event("added", self.item())]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        return [self.event("function_call_arguments.delta", delta=text)] if text else []

    def end(self, status: ItemStatus) -> list[Event]:
        self.status = status
        done = {"name": self.name, "arguments": self.text}
        return [
            self.event("function_call_arguments.done", **done),
            self.complete_event("done", self.item()),
        ]


def make_item(segment: Segment, index: int) -> OutputItem[bodies.OutputItem]:
    """Return the item for its first segment."""
    if segment.kind == "call":
        return Call(index, segment.name or "")
    return Message(index) if segment.kind == "content" else Reasoning(index)
