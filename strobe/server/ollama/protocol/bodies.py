"""Models of the responses of Ollama's API, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from strobe.server.openai.protocol.response_bodies import SpeculationReport, TokenLogprob


class OllamaError(BaseModel):
    error: str


class Version(BaseModel):
    """version: of Ollama, whose API the endpoints follow."""

    version: str


class ModelDetails(BaseModel):
    """quantization_level: the weights' format in memory."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(BaseModel):
    """size: bytes of the weights on disk. digest: of the checkpoint's config.json."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class ModelList(BaseModel):
    models: list[Model]


class RunningModel(Model):
    """size_vram: the same as size on a GPU, 0 on a CPU."""

    expires_at: str
    size_vram: int
    context_length: int


class RunningModelList(BaseModel):
    models: list[RunningModel]


class ShowResponse(BaseModel):
    """template: the chat template, in Jinja. parameters: the recommended sampling options."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class CallFunction(BaseModel):
    index: int
    name: str
    arguments: dict[str, Any]


class Call(BaseModel):
    id: str
    function: CallFunction


class AnswerMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | None = None
    tool_calls: list[Call] | None = None


class Answer(BaseModel):
    """Durations are in nanoseconds. prompt_eval_duration: from the start of the prompt's
    computation to the first token; eval_duration: from there to the last one."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[TokenLogprob] | None = None
    speculation: SpeculationReport | None = None
    warnings: list[str] | None = None


class ChatAnswer(Answer):
    message: AnswerMessage


class GenerateAnswer(Answer):
    response: str
    thinking: str | None = None
