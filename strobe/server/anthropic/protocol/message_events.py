"""The events of a stream of /v1/messages."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from strobe.server.anthropic.protocol.message_bodies import (
    ContentBlock,
    Message,
    MessageUsage,
    StopReason,
)
from strobe.server.generation.bodies import SpeculationReport


class MessageStart(TypedDict):
    """The first event of a stream."""

    type: Literal["message_start"]
    message: Message


class Ping(TypedDict):
    type: Literal["ping"]


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(TypedDict):
    type: Literal["signature_delta"]
    signature: str


class InputDelta(TypedDict):
    """partial_json: a part of a call's arguments."""

    type: Literal["input_json_delta"]
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(TypedDict):
    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(TypedDict):
    """The last fields of the message, in the last but one event."""

    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    speculation: NotRequired[SpeculationReport]
    warnings: NotRequired[list[str]]


class MessageStop(TypedDict):
    type: Literal["message_stop"]


BlockEvent = BlockStart | BlockDelta | BlockStop
