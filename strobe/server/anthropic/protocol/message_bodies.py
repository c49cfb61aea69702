"""Models of the responses of /v1/messages, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from strobe.server.generation.bodies import SpeculationReport


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingBlock(BaseModel):
    """signature: a checksum of the thinking, which the server ignores in requests."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class ToolUseBlock(BaseModel):
    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(BaseModel):
    thinking_tokens: int


class MessageUsage(BaseModel):
    """input_tokens: prompt tokens not found in the prefix cache."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = None


class Message(BaseModel):
    """The response of /v1/messages. stop_sequence: the text that ended the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    speculation: SpeculationReport | None = None
    warnings: list[str] | None = None


class MessageTokens(BaseModel):
    """The response of /v1/messages/count_tokens."""

    input_tokens: int
    warnings: list[str] | None = None


class MessageErrorDetail(BaseModel):
    """details: `error_code`, for errors that clients handle."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessageErrorResponse(BaseModel):
    """request_id: the request's id, also in the header `request-id`."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None = None
