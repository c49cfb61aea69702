"""The response bodies of /v1/messages."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from strobe.server.generation.bodies import SpeculationReport

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(TypedDict):
    type: Literal["text"]
    text: str
    citations: None


class ThinkingBlock(TypedDict):
    """signature: a checksum of the thinking, which the server ignores in requests."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class ToolUseBlock(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageOutputDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """input_tokens: prompt tokens not found in the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputDetails


class MessageHead(TypedDict):
    """The first fields of a message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    warnings: NotRequired[list[str]]


class MessageEnd(TypedDict):
    """The last fields of a message, unknown until it ends."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    speculation: NotRequired[SpeculationReport]


class Message(MessageHead, MessageEnd):
    """The response of /v1/messages. stop_sequence: the text that ended the answer."""


class MessageTokens(TypedDict):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    warnings: NotRequired[list[str]]


class MessageErrorDetail(TypedDict):
    """details: `error_code`, for errors that clients handle."""

    type: str
    message: str
    details: NotRequired[dict[str, str]]


class MessageErrorResponse(TypedDict):
    """request_id: the request's id, also in the header `request-id`."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None
