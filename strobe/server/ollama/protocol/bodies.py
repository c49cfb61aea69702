"""The response bodies of Ollama's API."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from strobe.server.generation.bodies import SpeculationReport, TokenLogprob


class OllamaError(TypedDict):
    error: str


class Version(TypedDict):
    """version: of Ollama, whose API the endpoints follow."""

    version: str


class ModelDetails(TypedDict):
    """quantization_level: the weights' format in memory."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(TypedDict):
    """size: bytes of the weights on disk. digest: of the checkpoint's config.json."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(TypedDict):
    models: list[Model]


class RunningModel(Model):
    """size_vram: the same as size on a GPU, 0 on a CPU."""

    expires_at: str
    size_vram: int
    context_length: int


class RunningModelList(TypedDict):
    models: list[RunningModel]


class ShowResponse(TypedDict):
    """template: the chat template, in Jinja. parameters: the recommended sampling options."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    warnings: NotRequired[list[str]]


class CallFunction(TypedDict):
    """arguments: null if the answer was cut within them."""

    index: int
    name: str
    arguments: dict[str, Any] | None


class Call(TypedDict):
    id: str
    function: CallFunction


class AnswerMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class AnswerHead(TypedDict):
    """The first fields of every line."""

    model: str
    created_at: str


class Logprobs(TypedDict, total=False):
    logprobs: list[TokenLogprob]


class AnswerEnd(Logprobs):
    """The last fields of a line. done: if true, the line has the reason, counts and durations."""

    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    speculation: NotRequired[SpeculationReport]
    warnings: NotRequired[list[str]]


class ChatAnswer(AnswerHead, AnswerEnd):
    """Durations are in nanoseconds. prompt_eval_duration: from the start of the prompt's
    computation to the first token; eval_duration: from there to the last one."""

    message: AnswerMessage


class GenerateText(TypedDict):
    response: str
    thinking: NotRequired[str]


class GenerateAnswer(AnswerHead, AnswerEnd, GenerateText):
    """Durations are as in an answer of /api/chat."""
