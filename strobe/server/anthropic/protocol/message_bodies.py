"""The shape of what /v1/messages returns, for the OpenAPI page and for readers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from strobe.server.openai.protocol.response_bodies import SpeculationReport


class TextBlock(BaseModel):
    type: Literal["text"] = "text"
    text: str
    citations: None = None


class ThinkingBlock(BaseModel):
    """signature: a checksum of the thinking, which nobody asks for again."""

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
    """input_tokens: those of the prompt that the prefix cache did not have."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | None = None


class Message(BaseModel):
    """What /v1/messages answers. stop_sequence: the text that ended it."""

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
    """What /v1/messages/count_tokens answers."""

    input_tokens: int
    warnings: list[str] | None = None


class MessageErrorDetail(BaseModel):
    """details: `error_code`, where clients act on it."""

    type: str
    message: str
    details: dict[str, str] | None = None


class MessageErrorResponse(BaseModel):
    """request_id: as in the header."""

    type: Literal["error"] = "error"
    error: MessageErrorDetail
    request_id: str | None = None
