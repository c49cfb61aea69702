"""The content blocks of a message, and their events in a stream."""

from __future__ import annotations

import hashlib
import secrets

from strobe.server.anthropic.protocol.message_bodies import (
    ContentBlock,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from strobe.server.anthropic.protocol.message_events import BlockDelta, BlockEvent, Delta
from strobe.server.generation.bodies import ItemStatus
from strobe.server.generation.output_items import Logprobs, OutputItem
from strobe.server.parsers.call_arguments import read_object
from strobe.server.parsers.segment import Segment


class _Block:
    """Base class of blocks. index: the block's index in the content."""

    def __init__(self, index: int):
        self.index = index
        self.text = ""

    def item(self) -> ContentBlock:
        raise NotImplementedError

    def begin(self) -> list[BlockEvent]:
        return [{"type": "content_block_start", "index": self.index, "content_block": self.item()}]

    def add(self, text: str, logprobs: Logprobs) -> list[BlockEvent]:
        self.text += text
        return [self._sent(self._delta(text))] if text else []

    def end(self, status: ItemStatus) -> list[BlockEvent]:
        return [{"type": "content_block_stop", "index": self.index}]

    def _delta(self, text: str) -> Delta:
        raise NotImplementedError

    def _sent(self, delta: Delta) -> BlockDelta:
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


class Text(_Block):
    """A text block."""

    def item(self) -> TextBlock:
        return {"type": "text", "text": self.text, "citations": None}

    def _delta(self, text: str) -> Delta:
        return {"type": "text_delta", "text": text}


class Thinking(_Block):
    """A thinking block. Its signature is a checksum, because clients drop unsigned thinking."""

    def __init__(self, index: int, *, shown: bool):
        super().__init__(index)
        self._shown = shown
        self._ended = False

    def item(self) -> ThinkingBlock:
        text = self.text if self._shown else ""
        return {"type": "thinking", "thinking": text, "signature": self._signature()}

    def add(self, text: str, logprobs: Logprobs) -> list[BlockEvent]:
        events = super().add(text, logprobs)
        return events if self._shown else []

    def end(self, status: ItemStatus) -> list[BlockEvent]:
        self._ended = True
        signed = self._sent({"type": "signature_delta", "signature": self._signature()})
        return [signed, *super().end(status)]

    def _delta(self, text: str) -> Delta:
        return {"type": "thinking_delta", "thinking": text}

    def _signature(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest() if self._ended else ""


class ToolUse(_Block):
    """A tool call. text: the arguments as JSON."""

    def __init__(self, index: int, name: str):
        super().__init__(index)
        self.name = name
        self.id = f"toolu_{secrets.token_hex(12)}"

    def item(self) -> ToolUseBlock:
        arguments = read_object(self.text) or {}
        return {"type": "tool_use", "id": self.id, "name": self.name, "input": arguments}

    def _delta(self, text: str) -> Delta:
        return {"type": "input_json_delta", "partial_json": text}


def make_block(segment: Segment, index: int, *, shows_thinking: bool) -> OutputItem[ContentBlock]:
    """Return the block for its first segment."""
    if segment.kind == "call":
        return ToolUse(index, segment.name or "")
    return Text(index) if segment.kind == "content" else Thinking(index, shown=shows_thinking)
