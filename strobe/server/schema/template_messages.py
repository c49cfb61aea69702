"""Chat messages from the parts of a conversation, for APIs that send them separately."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class TemplateMessages:
    """Builds messages as chat templates read them. Reasoning, text and calls of one answer become
    one message."""

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = []
        self._answer: dict[str, Any] | None = None
        """The answer that further parts belong to."""

    def add_text(self, role: str, text: str | None) -> None:
        """Add a message, or the text of an answer that has only reasoning so far."""
        message = {"role": role, "content": text}
        if role == "assistant" and self._answer is not None and _is_bare(self._answer):
            self._answer.update(message)
            return
        self._answer = message if role == "assistant" else None
        self._messages.append(message)

    def extend_text(self, role: str, text: str) -> None:
        """Add a text on a new line of the last message if that ends with a text of the same role,
        or else as a message."""
        last = self._messages[-1] if self._messages else None
        if last is not None and last["role"] == role and _ends_with_text(last):
            last["content"] += f"\n{text}"
        else:
            self.add_text(role, text)

    def add_result(self, call_id: str, text: str | None) -> None:
        """Add the result of a call."""
        self._answer = None
        self._messages.append({"role": "tool", "content": text, "tool_call_id": call_id})

    def add_reasoning(self, texts: Sequence[str]) -> None:
        """Add reasoning to an answer that has no text or call yet, or else begin one."""
        answer = self._answer
        if answer is None or not _is_bare(answer):
            answer = self._new_answer()
        earlier = [answer["reasoning_content"]] if "reasoning_content" in answer else []
        if joined := "\n".join([*earlier, *texts]):
            answer["reasoning_content"] = joined

    def add_call(self, call: Mapping[str, Any]) -> None:
        """Add a call to the answer."""
        answer = self._new_answer() if self._answer is None else self._answer
        answer.setdefault("tool_calls", []).append(call)

    @property
    def ends_with_answer(self) -> bool:
        """Whether the last part is the text of an answer."""
        if not self._messages:
            return False
        last = self._messages[-1]
        return last["role"] == "assistant" and _ends_with_text(last)

    def finished(self) -> list[dict[str, Any]]:
        """Return the messages. An answer that has only reasoning gets an empty text."""
        return [
            {**message, "content": ""} if _is_bare(message) else message
            for message in self._messages
        ]

    def _new_answer(self) -> dict[str, Any]:
        self._answer = {"role": "assistant", "content": None}
        self._messages.append(self._answer)
        return self._answer


def _is_bare(message: Mapping[str, Any]) -> bool:
    """Whether a message has neither text nor calls yet."""
    return message["content"] is None and "tool_calls" not in message


def _ends_with_text(message: Mapping[str, Any]) -> bool:
    """Whether a message's text is its last part."""
    return message["content"] is not None and "tool_calls" not in message
