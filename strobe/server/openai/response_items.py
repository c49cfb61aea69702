"""The output items of a response, and the events that are sent as they grow."""

from __future__ import annotations

import secrets
from typing import Any, Literal, Protocol

from strobe.server.openai.segments import Segment

Event = dict[str, Any]
Logprobs = list[dict[str, Any]]
Status = Literal["in_progress", "completed", "incomplete"]


class Item(Protocol):
    """One output item."""

    def item(self) -> dict[str, Any]:
        """It as OpenAI's object, as far as it has come."""
        ...

    def begin(self) -> list[Event]: ...
    def add(self, text: str, logprobs: Logprobs) -> list[Event]: ...
    def end(self, status: Status) -> list[Event]: ...


class _Item:
    """What all items have. index: its place in the output."""

    def __init__(self, index: int, prefix: str):
        self.index, self.id = index, f"{prefix}_{secrets.token_hex(12)}"
        self.status: Status = "in_progress"
        self.text = ""

    def event(self, kind: str, **fields: Any) -> Event:
        where = {"item_id": self.id, "output_index": self.index}
        return {"type": f"response.{kind}", **where, **fields}

    def whole(self, kind: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{kind}", "output_index": self.index, "item": item}


class _Text(_Item):
    """An item with one part of text. said: what its events call that."""

    said = ""

    def item(self) -> dict[str, Any]:
        return self._item([self._part()])

    def begin(self) -> list[Event]:
        added = self.event("content_part.added", content_index=0, part=self._part())
        return [self.whole("added", self._item([])), added]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        return [self.event(f"{self.said}.delta", content_index=0, delta=text)]

    def end(self, status: Status) -> list[Event]:
        self.status = status
        return [
            self.event(f"{self.said}.done", content_index=0, text=self.text),
            self.event("content_part.done", content_index=0, part=self._part()),
            self.whole("done", self.item()),
        ]

    def _part(self) -> dict[str, Any]:
        return {"type": self.said, "text": self.text}

    def _item(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        raise NotImplementedError


class Reasoning(_Text):
    """Reasoning, in the open and without a summary."""

    said = "reasoning_text"

    def __init__(self, index: int):
        super().__init__(index, "rs")

    def _item(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "summary": [],
            "content": content,
            "status": self.status,
        }


class Message(_Text):
    """What the model says."""

    said = "output_text"

    def __init__(self, index: int):
        super().__init__(index, "msg")
        self.logprobs: Logprobs = []

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.logprobs += logprobs
        return [event | {"logprobs": logprobs} for event in super().add(text, logprobs)]

    def end(self, status: Status) -> list[Event]:
        said, *rest = super().end(status)
        return [said | {"logprobs": self.logprobs}, *rest]

    def _part(self) -> dict[str, Any]:
        return super()._part() | {"annotations": [], "logprobs": list(self.logprobs)}

    def _item(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": content,
        }


class Call(_Item):
    """A call of a function; its text is the arguments' JSON."""

    def __init__(self, index: int, name: str):
        super().__init__(index, "fc")
        self.name, self.call_id = name, f"call_{secrets.token_hex(12)}"

    def item(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.text,
            "status": self.status,
        }

    def begin(self) -> list[Event]:
        return [self.whole("added", self.item())]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        return [self.event("function_call_arguments.delta", delta=text)] if text else []

    def end(self, status: Status) -> list[Event]:
        self.status = status
        done = {"name": self.name, "arguments": self.text}
        return [
            self.event("function_call_arguments.done", **done),
            self.whole("done", self.item()),
        ]


class Items:
    """The output as it grows, item by item: one begins where the one before has ended."""

    def __init__(self, *, parallel: bool):
        """parallel: without it there is only the first call."""
        self._parallel = parallel
        self._items: list[Item] = []
        self._open: tuple[str, int] | None = None

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
            self._open = segment.kind, segment.call
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
        events, index = self.close("completed"), len(self._items)
        if segment.kind == "call":
            self._items.append(Call(index, segment.name or ""))
        else:
            self._items.append(Message(index) if segment.kind == "content" else Reasoning(index))
        self._open = segment.kind, segment.call
        return events + self._items[-1].begin()
