"""The response bodies of OpenAI's API and of the server's own endpoints."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from strobe.server.generation.bodies import Extras, ItemStatus, PromptLogprobs, TokenLogprob, Usage

FinishReason = Literal["stop", "length", "repetition", "tool_calls", "abort", "error"]


class Step(TypedDict):
    """A verify step. tokens: each token's text, and whether it was an accepted draft. With
    return_drafts: rejected, the texts of the drafts that were rejected; confidence, of each draft
    verified, the drafter's probability of it over the second best token; empty if unknown."""

    tokens: list[tuple[str, bool]]
    drafted: int
    accepted: int
    rejected: NotRequired[list[str]]
    confidence: NotRequired[list[float]]


class Origin(TypedDict):
    """Where an answer comes from. system_fingerprint: the same while the engine's settings, device
    and version are."""

    created: int
    model: str
    system_fingerprint: str


class Answer(Origin, Extras):
    """Fields of every chat and text completion, and of the chunks of their streams. usage: null in
    a chunk that does not report it."""

    id: str
    usage: NotRequired[Usage | None]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]


class FunctionCall(TypedDict):
    """arguments: JSON text."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(TypedDict):
    """arguments: the next part of the JSON text."""

    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """index: the call that it continues; id and name come with a call's first delta."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCallDelta


class Reasoning(TypedDict, total=False):
    """The model's reasoning, under both names that clients read: DeepSeek's, which is widely read,
    and vLLM's newer one."""

    reasoning_content: str
    reasoning: str


class ChatMessage(Reasoning):
    """reasoning_content, reasoning: the model's reasoning, under both names that clients read."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ToolCall]]


class ChatDelta(Reasoning, total=False):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDelta]


class ChatChoice(TypedDict):
    """stop_reason: the stop text or token id that ended the answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(Answer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    token_ids: NotRequired[list[int]]
    step: NotRequired[Step]


class FirstChunk(TypedDict, total=False):
    """Fields of the first chunk alone."""

    prompt_token_ids: list[int]
    warnings: list[str]


class ChunkHead(Origin):
    """The first fields of a chunk."""

    id: str
    object: Literal["chat.completion.chunk"]


class ChatCompletionChunk(ChunkHead, Answer):
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


class CompletionLogprobs(TypedDict):
    """One entry per token. text_offset: where each token's text begins, in characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """stop_reason: the stop text or token id that ended the answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: NotRequired[int | str | None]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    step: NotRequired[Step]


class CompletionHead(Origin):
    """The first fields of a text completion."""

    id: str
    object: Literal["text_completion"]


class Completion(CompletionHead, Answer):
    """A text completion, or a chunk of its stream."""

    choices: list[CompletionChoice]


class InfillTimings(TypedDict):
    """Numbers of tokens, milliseconds and tokens per second. cache_n: prompt tokens from the prefix
    cache; prompt_n: all others."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float


class InfillPart(TypedDict):
    """A part of the text of a streamed answer of /infill."""

    content: str
    stop: Literal[False]


class Infill(Extras):
    """An answer of /infill, or the last event of its stream."""

    content: str
    stop: Literal[True]
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    truncated: bool
    timings: InfillTimings


class TokenizeResponse(TypedDict):
    """The response of /tokenize. token_strs: with return_token_strs, each token as the vocabulary
    writes it, such as `Ġworld`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]
    warnings: NotRequired[list[str]]


class DetokenizeResponse(TypedDict):
    """The response of /detokenize."""

    prompt: str
    warnings: NotRequired[list[str]]


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class OutputCall(TypedDict):
    id: str
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class OutputReasoning(TypedDict):
    id: str
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


OutputItem = OutputMessage | OutputCall | OutputReasoning


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: str
    message: str


class Response(Extras):
    """The response of /v1/responses, which echoes the request's options, null for those without
    effect."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    output: list[OutputItem]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: object
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: None
    metadata: dict[str, str]


class InputTokens(TypedDict):
    """The response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int
    warnings: NotRequired[list[str]]


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class PageEnds(TypedDict):
    """The ends of a part of a list. has_more: whether more items follow."""

    first_id: str | None
    last_id: str | None
    has_more: bool


class ItemList(PageEnds):
    """data: input items with their ids. has_more: whether more items follow."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class ErrorDetail(TypedDict):
    """param: the path of the invalid field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    error: ErrorDetail


class ModelCard(TypedDict):
    """root: the directory or hub name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["strobe"]
    root: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Version(TypedDict):
    version: str


class Load(TypedDict):
    """server_load: answers in progress or waiting."""

    server_load: int


class TemplateInfo(TypedDict):
    """reasoning, tools: names of their formats, null for none. variables: those that the chat
    template reads, null if unknown."""

    reasoning: str | None
    tools: str | None
    variables: list[str] | None


class ServerInfo(TypedDict):
    """engine: the engine's facts; config, server: settings, with the number of API keys in place
    of the keys. template: what the chat template knows."""

    version: str
    engine: dict[str, Any]
    config: dict[str, Any]
    server: dict[str, Any]
    template: TemplateInfo
