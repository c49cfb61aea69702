"""The smallest request of each endpoint, and ways to change it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from strobe.server.anthropic.protocol.messages_request import CountTokensRequest, MessagesRequest
from strobe.server.batches.protocol import BatchRequest, MessageBatchRequest
from strobe.server.ollama.protocol.requests import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.server.openai.protocol.responses_request import InputTokensRequest, ResponsesRequest
from strobe.server.openai.protocol.token_requests import DetokenizeRequest, TokenizeRequest
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError

USER = {"role": "user", "content": "hello"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "add"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

SMALLEST: Mapping[type[RequestModel], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": [USER]},
    CompletionRequest: {"prompt": "hello"},
    InfillRequest: {"input_prefix": "hello"},
    ResponsesRequest: {"input": "hello"},
    MessagesRequest: {"messages": [USER], "max_tokens": 4096},
    InputTokensRequest: {"input": "hello"},
    CountTokensRequest: {"messages": [USER]},
    BatchRequest: {"input_file_id": "file_1", "endpoint": "/v1/completions"},
    MessageBatchRequest: {"requests": [{"custom_id": "a", "params": {}}]},
    OllamaChatRequest: {"messages": [USER]},
    OllamaGenerateRequest: {"prompt": "hello"},
    ShowRequest: {},
    TokenizeRequest: {"prompt": "hello"},
    DetokenizeRequest: {"tokens": [1, 2]},
}
GENERATING = (
    ChatCompletionRequest, CompletionRequest, InfillRequest, ResponsesRequest, MessagesRequest
)  # fmt: skip


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.read(json.dumps({"messages": [USER], **fields}))


def complete(**fields: Any) -> CompletionRequest:
    return CompletionRequest.read(json.dumps({"prompt": "hello", **fields}))


def respond(value: Any = "hello", **fields: Any) -> ResponsesRequest:
    return ResponsesRequest.read(json.dumps({"input": value, **fields}))


def refusal(model: type[RequestModel], **fields: Any) -> FieldError:
    """Return the 400 of the smallest request with these fields."""
    with pytest.raises(FieldError) as caught:
        model.read(json.dumps({**SMALLEST[model], **fields}))
    return caught.value


def tool(name: str, **more: Any) -> dict[str, Any]:
    """A function in chat form."""
    return {"type": "function", "function": {"name": name, **more}}
