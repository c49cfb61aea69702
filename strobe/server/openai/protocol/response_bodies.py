"""Models of the endpoints' responses, for the OpenAPI document.

The server builds its responses as plain dicts of this shape, without these classes.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from strobe.server.generation.bodies import SpeculationReport, TokenLogprob

FinishReason = Literal["stop", "length", "repetition", "tool_calls", "abort", "error"]


class PromptTokensDetails(BaseModel):
    """cached_tokens: prompt tokens found in the prefix cache."""

    cached_tokens: int = 0


class Usage(BaseModel):
    """Tokens of the prompt and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class Step(BaseModel):
    """A verify step. tokens: each token's text, and whether it was an accepted draft. With
    return_drafts: rejected, the texts of the drafts that were rejected; confidence, of each draft
    verified, the drafter's probability of it over the second best token; empty if unknown."""

    tokens: list[tuple[str, bool]]
    drafted: int
    accepted: int
    rejected: list[str] | None = None
    confidence: list[float] | None = None


class Answer(BaseModel):
    """Fields of every chat and text completion. system_fingerprint: the same while the engine's
    settings, device and version are. warnings: one sentence for each field without effect."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage | None = None
    speculation: SpeculationReport | None = None
    warnings: list[str] | None = None


class PromptLogprob(BaseModel):
    """rank: 1 for the most probable token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token: token ids to their log probabilities; null for the first."""


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob] | None = None
    refusal: None = None


class FunctionCall(BaseModel):
    """arguments: JSON text."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(BaseModel):
    """index: the call that it continues; id and name come with a call's first delta."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(BaseModel):
    """reasoning_content, reasoning: the model's reasoning, under both names that clients read."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    tool_calls: list[ToolCall] | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(BaseModel):
    """stop_reason: the stop text or token id that ended the answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Answer):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    step: Step | None = None


class ChatCompletionChunk(Answer):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None


class CompletionLogprobs(BaseModel):
    """One entry per token. text_offset: where each token's text begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    step: Step | None = None


class Completion(Answer):
    """A text completion, or a chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class InputTokensDetails(BaseModel):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(BaseModel):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] | None = None


class OutputMessage(BaseModel):
    type: Literal["message"] = "message"
    id: str
    role: Literal["assistant"] = "assistant"
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText]


class OutputCall(BaseModel):
    type: Literal["function_call"] = "function_call"
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class ReasoningText(BaseModel):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(BaseModel):
    type: Literal["reasoning"] = "reasoning"
    id: str
    summary: list[Any] = []
    content: list[ReasoningText]
    status: Literal["in_progress", "completed", "incomplete"]


class IncompleteDetails(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseError(BaseModel):
    code: str
    message: str


class Response(BaseModel):
    """The response of /v1/responses, which echoes the request's options, null for those without
    effect."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    output: list[OutputMessage | OutputCall | OutputReasoning]
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    parallel_tool_calls: bool
    previous_response_id: str | None = None
    prompt: None = None
    reasoning: dict[str, Any] | None = None
    service_tier: Literal["default"] = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int | None = None
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: None = None
    metadata: dict[str, str] = {}
    speculation: SpeculationReport | None = None
    warnings: list[str] | None = None


class InputTokens(BaseModel):
    """The response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int
    warnings: list[str] | None = None


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ItemList(BaseModel):
    """data: input items with their ids. has_more: whether more items follow."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ErrorDetail(BaseModel):
    """param: the path of the invalid field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    error: ErrorDetail


class ModelCard(BaseModel):
    """root: the directory or hub name of the model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["strobe"] = "strobe"
    root: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Version(BaseModel):
    version: str


class Load(BaseModel):
    """server_load: answers in progress or waiting."""

    server_load: int


class TemplateInfo(BaseModel):
    """reasoning, tools: names of their formats, null for none. variables: those that the chat
    template reads, null if unknown."""

    reasoning: str | None
    tools: str | None
    variables: list[str] | None


class ServerInfo(BaseModel):
    """engine: the engine's facts; config, server: settings, with the number of API keys in place
    of the keys. template: what the chat template knows."""

    version: str
    engine: dict[str, Any]
    config: dict[str, Any]
    server: dict[str, Any]
    template: TemplateInfo
