"""The events of a stream of /v1/responses. Each also gets a `sequence_number`."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from strobe.server.generation.bodies import TokenLogprob
from strobe.server.openai.protocol.response_bodies import (
    OutputItem,
    OutputText,
    ReasoningText,
    Response,
)


class ResponseEvent(TypedDict):
    """The response so far, or finished."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: Response


class ErrorEvent(TypedDict):
    type: Literal["error"]
    code: str
    message: str
    param: str | None


class ItemEvent(TypedDict):
    """An item that begins or has ended."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(TypedDict):
    item_id: str
    output_index: int


class PartEvent(_OfItem):
    """A part of an item's content that begins or has ended."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(_OfItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]


class TextDone(_OfItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(_OfItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(_OfItem):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(_OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(_OfItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


Event = (
    ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)
"""An event of one item."""
