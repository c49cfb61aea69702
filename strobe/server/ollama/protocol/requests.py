"""The requests of Ollama's /api/chat, /api/generate and /api/show, converted to a chat's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from strobe.grammars.closed_schema import closed
from strobe.sampling_params import OPTIONS as SAMPLING_OPTIONS
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.converted import ConvertedRequest
from strobe.server.schema.base import FieldWarnings, RequestModel, object_schema
from strobe.server.schema.field_errors import FieldError, Names, invalid_value
from strobe.server.schema.sampling import LogprobCount
from strobe.server.schema.tools import ChatTools
from strobe.server.schema.values import TEXT_SCHEMA, check_int, is_int
from strobe.validation import MAX_INT

OPTIONS: Mapping[str, str] = {
    **{option.ollama_name: option.name for option in SAMPLING_OPTIONS if option.ollama_name},
    "include_speculation": "include_speculation",
}
"""Fields of `options`, and their names in a chat request."""

EFFORTS = ("low", "medium", "high", "max")
MESSAGE_FIELDS = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id")
CALL_FIELDS = ("id", "function")
FUNCTION_FIELDS = ("name", "arguments", "index")

_TEXT: dict[str, Any] = {"type": "string"}
ARGUMENTS_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "object"}, _TEXT, {"type": "null"}]}
_CHAT_SCHEMAS = ChatCompletionRequest.model_json_schema()["properties"]
OPTIONS_SCHEMA = object_schema(
    {
        **{name: _CHAT_SCHEMAS[known_as] for name, known_as in OPTIONS.items()},
        "num_predict": {"type": "integer", "minimum": -2, "maximum": MAX_INT},
        "num_ctx": {"type": "integer", "minimum": 1},
    },
    "options",
)
FORMAT_SCHEMA: dict[str, Any] = {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}
THINK_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "boolean"}, {"enum": list(EFFORTS)}]}
_FUNCTION: dict[str, Any] = {"name": TEXT_SCHEMA, "arguments": ARGUMENTS_SCHEMA, "index": {}}
_CALL: dict[str, Any] = {"id": _TEXT, "function": object_schema(_FUNCTION, "", ("name",))}
MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "anyOf": [
            object_schema(
                {"role": {"enum": ["system", "user"]}, "content": _TEXT},
                "ollama.message",
                ("role", "content"),
            ),
            object_schema(
                {
                    "role": {"const": "assistant"},
                    "content": _TEXT,
                    "thinking": _TEXT,
                    "tool_calls": {
                        "type": "array",
                        "items": object_schema(_CALL, "tool_call", ("function",)),
                    },
                },
                "ollama.message",
                ("role", "content"),
            ),
            object_schema(
                {"role": {"const": "tool"}, "content": _TEXT, "tool_name": _TEXT},
                "ollama.message",
                ("role", "content"),
            ),
        ]
    },
}

_NAMES = {
    re.compile(rf"^{known_as}\b"): f"options.{name}" for name, known_as in OPTIONS.items()
} | {
    re.compile(r"\bmax_tokens\b"): "options.num_predict",
    re.compile(r"\bresponse_format(?:\.json_schema)?(?:\.schema)?\b"): "format",
    re.compile(r"\bchat_template_kwargs\.enable_thinking\b"): "think",
    re.compile(r"\breasoning_effort\b"): "think",
    re.compile(r"\.reasoning_content\b"): ".thinking",
}


class OllamaRequest(ConvertedRequest):
    """The fields of /api/chat and /api/generate. Ollama ignores fields that it does not know, and
    its clients send such fields."""

    ignores_unknown_fields: ClassVar[bool] = True
    names: ClassVar[Names] = _NAMES
    format_field: ClassVar[str] = "format"

    model: str | None = Field(
        None, description="The served model's name, with or without `:latest`. Optional."
    )
    stream: bool = Field(True, description="Stream the answer, one JSON object per line.")
    format: Annotated[Any, WithJsonSchema(FORMAT_SCHEMA)] = Field(
        None,
        description="`json`, or a JSON schema, which is always enforced strictly. As in Ollama, an "
        "object that declares properties has no others, unless `additionalProperties` says so.",
    )
    options: Annotated[Any, WithJsonSchema(OPTIONS_SCHEMA)] = Field(
        None, description="Sampling options, listed below."
    )
    think: Annotated[Any, WithJsonSchema(THINK_SCHEMA)] = Field(
        None,
        description="true or false: passed to the chat template as enable_thinking. `low`, "
        "`medium`, `high` or `max`: passed as reasoning_effort. Default: the template's.",
    )
    logprobs: bool = Field(False, description="Return log probabilities of the answer's tokens.")
    top_logprobs: LogprobCount | None = Field(
        None, description="With logprobs: number of top tokens per position, 0 to 20."
    )

    _num_ctx: int | None = None

    def check(self) -> None:
        super().check()
        body = {
            "model": self.model,
            **self._read_options(),
            **self._read_think(),
            "response_format": self._read_format(),
            "logprobs": self.logprobs,
            "top_logprobs": self.top_logprobs,
            **self.prompt_fields(),
        }
        self.read_chat(body)

    @property
    def is_load(self) -> bool:
        """Whether the request has no prompt and only asks to load the model."""
        raise NotImplementedError

    def prompt_fields(self) -> dict[str, Any]:
        """The chat request's messages and tools, with an empty message if there is none. Raises
        FieldError."""
        raise NotImplementedError

    @property
    def raw_prompt(self) -> str | None:
        """The prompt that the chat template is not applied to."""
        return None

    @property
    def num_ctx(self) -> int | None:
        """The context length that the client asks for."""
        return self._num_ctx

    def _read_options(self) -> dict[str, Any]:
        if self.options is None:
            return {}
        known_fields = (*OPTIONS, "num_ctx")
        fields = self._warnings.split(self.options, known_fields, "options", "options")
        fields = {name: check_int(value) for name, value in fields.items()}
        num_ctx = fields.pop("num_ctx", None)
        if num_ctx is not None and not (is_int(num_ctx) and num_ctx > 0):
            raise invalid_value("options.num_ctx", num_ctx, "a whole number above 0")
        self._num_ctx = num_ctx
        limit = fields.get("num_predict")
        if isinstance(limit, int) and not isinstance(limit, bool) and limit <= 0:
            del fields["num_predict"]  # Ollama's values for an answer without a limit
        if fields.get("seed") == -1:
            del fields["seed"]  # Ollama's value for a random seed
        return {OPTIONS[name]: value for name, value in fields.items()}

    def _read_think(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        if isinstance(self.think, bool):
            return {"chat_template_kwargs": {"enable_thinking": self.think}}
        if self.think not in EFFORTS:
            raise invalid_value("think", self.think, f"true, false or one of {', '.join(EFFORTS)}")
        return {"reasoning_effort": self.think}

    def _read_format(self) -> dict[str, Any] | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return {"type": "json_object"}
        if not isinstance(self.format, Mapping):
            raise invalid_value("format", self.format, '"json" or a JSON schema, as an object')
        return {"type": "json_schema", "json_schema": {"schema": closed(self.format)}}


class OllamaChatRequest(OllamaRequest):
    """The body of POST /api/chat."""

    schema_key: ClassVar[str] = "ollama.chat"

    messages: Annotated[list[Any], WithJsonSchema(MESSAGES_SCHEMA)] = Field(
        [],
        description="The conversation: objects with `role`, `content`, `thinking`, `tool_calls` "
        "and `tool_name`. If the last message is the assistant's, the answer continues it. Without "
        "messages, the answer is empty.",
    )
    tools: ChatTools | None = Field(
        None,
        description="Functions that the model may call: `name`, `description` and `parameters` (a "
        "JSON schema).",
    )

    @property
    def is_load(self) -> bool:
        return not self.messages

    def prompt_fields(self) -> dict[str, Any]:
        messages = [
            read_message(message, f"messages[{index}]", self._warnings)
            for index, message in enumerate(self.messages or [{"role": "user", "content": ""}])
        ]
        continues = messages[-1].get("role") == "assistant"
        return {"messages": messages, "tools": self.tools, "continue_final_message": continues}


class OllamaGenerateRequest(OllamaRequest):
    """The body of POST /api/generate."""

    schema_key: ClassVar[str] = "ollama.generate"

    prompt: str = Field(
        "", description="The user's message. Without a prompt, the answer is empty."
    )
    system: str | None = Field(None, description="The system message.")
    raw: bool = Field(False, description="Send the prompt as it is, without the chat template.")

    @property
    def is_load(self) -> bool:
        return not self.prompt

    @property
    def raw_prompt(self) -> str | None:
        return self.prompt if self.raw else None

    def prompt_fields(self) -> dict[str, Any]:
        if self.raw and self.system:
            raise FieldError(
                "system is set together with raw, whose prompt is the whole text; leave one of "
                "them out.",
                "system",
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {"messages": messages, "add_special_tokens": self.raw}


class ShowRequest(RequestModel):
    """The body of POST /api/show."""

    ignores_unknown_fields: ClassVar[bool] = True
    schema_key: ClassVar[str] = "ollama.show"

    model: str | None = Field(
        None, description="The served model's name, with or without `:latest`. Optional."
    )
    name: str | None = Field(None, description="Older name of model.")


def read_message(message: object, path: str, warnings: FieldWarnings) -> dict[str, Any]:
    """Return a message in a chat's format, which checks its values. Raises FieldError."""
    fields = warnings.split(message, MESSAGE_FIELDS, "ollama.message", path)
    read = {
        {"thinking": "reasoning_content", "tool_name": "name"}.get(name, name): value
        for name, value in fields.items()
    }
    calls = fields.get("tool_calls")
    if isinstance(calls, list):
        path = f"{path}.tool_calls"
        read["tool_calls"] = [_call(call, f"{path}[{i}]", warnings) for i, call in enumerate(calls)]
    return read


def _call(call: object, path: str, warnings: FieldWarnings) -> dict[str, Any]:
    """Return an earlier call. Its `index`, its position in the answer, is ignored."""
    fields = warnings.split(call, CALL_FIELDS, "tool_call", path)
    path = f"{path}.function"
    function = warnings.split(fields.get("function"), FUNCTION_FIELDS, "", path)
    function.pop("index", None)
    return {**fields, "function": function}
