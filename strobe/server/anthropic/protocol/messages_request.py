"""The requests of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, PrivateAttr, WithJsonSchema

from strobe.server.anthropic.protocol.blocks import Texts as TextBlocks
from strobe.server.anthropic.protocol.blocks import Turns, joined, to_items
from strobe.server.anthropic.protocol.tools import (
    MessagesToolChoice,
    MessagesTools,
    choice_in_chat,
)
from strobe.server.openai.protocol.chat_request import Effort
from strobe.server.openai.protocol.conversation import TemplateVariables, check_template_options
from strobe.server.openai.protocol.converted import ConvertedRequest
from strobe.server.openai.protocol.items import MessageItem, input_messages
from strobe.server.openai.protocol.request_errors import (
    FieldError,
    Names,
    invalid_value,
    rename_fields,
    short_json,
)
from strobe.server.schema.base import object_schema
from strobe.server.schema.sampling import STOP_SCHEMA, SamplingFields
from strobe.server.schema.values import Bounds, Int, Texts, check_int, is_int
from strobe.validation import MAX_INT

THINKING = ("enabled", "adaptive", "disabled")
DISPLAYS = ("summarized", "omitted")
THINKING_SCHEMA = object_schema(
    {
        "type": {"enum": list(THINKING)},
        "display": {"enum": list(DISPLAYS)},
        "budget_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_INT},
    },
    "thinking",
    ("type",),
)
THREAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "create"}},
    "required": ["type"],
}
FORMAT_SCHEMA = object_schema(
    {"type": {"const": "json_schema"}, "schema": {"type": "object"}}, "", ("type", "schema")
)
OUTPUT_SCHEMA = object_schema(
    {"effort": {"enum": list(get_args(Effort))}, "format": FORMAT_SCHEMA}, "output_config"
)

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The error code that makes Anthropic's clients send whole conversations."""

_NAMES = {
    re.compile(r"\.function\.parameters\b"): ".input_schema",
    re.compile(r"\.function\b"): "",
    re.compile(r"\bchat_template_kwargs\.enable_thinking\b"): "thinking.type",
    re.compile(r"\breasoning_effort\b"): "output_config.effort",
    re.compile(r"\bresponse_format(?:\.json_schema)?\b"): "output_config.format",
}
_STOP = {re.compile(r"^stop\b"): "stop_sequences"}
_BUDGET = {re.compile(r"\bthinking_token_budget\b"): "thinking.budget_tokens"}


class MessagesPrompt(ConvertedRequest):
    """The fields that make up the prompt."""

    names: ClassVar[Names] = _NAMES
    format_field: ClassVar[str] = "output_config.format"

    messages: Turns = Field(
        description="The conversation: objects with `role` and `content`, a string or a list of "
        "blocks. If the last message is the assistant's, the answer continues it."
    )
    system: TextBlocks | None = Field(
        None, description="The system message: a string or a list of text blocks."
    )
    tools: MessagesTools | None = Field(
        None,
        description="Tools that the model may call: `name`, `description`, `input_schema` (a JSON "
        "schema) and `strict`.",
    )
    tool_choice: MessagesToolChoice | None = Field(
        None,
        description="`type`: `auto`, `any`, `tool` (with its `name`) or `none`; default: `auto` if "
        "there are tools. With `none` the prompt contains no tools. `disable_parallel_tool_use` "
        "allows only one call.",
    )
    thinking: Annotated[Any, WithJsonSchema(THINKING_SCHEMA)] = Field(
        None,
        description="`type`: `enabled`, `adaptive` or `disabled`, passed to the chat template as "
        "enable_thinking; default: the template's. `budget_tokens` limits the tokens of the "
        "thinking. `display: omitted` leaves its text out of the response.",
    )
    output_config: Annotated[Any, WithJsonSchema(OUTPUT_SCHEMA)] = Field(
        None,
        description="`format`: the type `json_schema` with `schema`, which is always "
        "enforced strictly. `effort`: passed to the chat template.",
    )
    thread: Annotated[Any, WithJsonSchema(THREAD_SCHEMA)] = Field(
        None,
        description="`type`: `create` has no effect, because the server stores no conversations; "
        "any other type is rejected with a request to send the whole conversation.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja chat template to use instead of the model's own; requires a server "
        "started with --trust-request-chat-template.",
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables for the chat template, such as {"enable_thinking": false}.'
    )

    _thinking: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    _output: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    _format: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        check_template_options(self.chat_template_kwargs)
        self._thinking = self._read("thinking", ("type", "display", "budget_tokens"))
        self._output = self._read("output_config", ("effort", "format"))
        self._check_objects()
        self._format = self._read_format()
        self._check_thread()
        items = to_items(self.messages)
        system = joined(self.system)
        tools = [tool.in_chat() for tool in self.tools or ()]
        body: dict[str, Any] = {
            "messages": input_messages(items, system, self._warnings) if items else [],
            "tools": tools,
            **choice_in_chat(self.tool_choice, has_tools=bool(tools)),
            "chat_template": self.chat_template,
            "chat_template_kwargs": self._variables(),
            "reasoning_effort": self._output.get("effort"),
            "continue_final_message": (
                bool(items) and isinstance(items[-1], MessageItem) and items[-1].role == "assistant"
            ),
        }
        self.read_chat(body | self.generation())

    def generation(self) -> dict[str, Any]:
        """The chat request's sampling and output fields."""
        return {}

    def _read(self, name: str, known_names: Collection[str]) -> dict[str, Any]:
        value = getattr(self, name)
        if value is None:
            return {}
        return self._warnings.split(value, known_names, name, name)

    def _check_objects(self) -> None:
        checks = (("type", THINKING), ("display", DISPLAYS))
        for name, values in checks if self.thinking is not None else ():
            value = self._thinking.get(name)
            if value not in values and (name == "type" or value is not None):
                raise invalid_value(f"thinking.{name}", value, f"one of {', '.join(values)}")
        budget = check_int(self._thinking.get("budget_tokens"))
        if budget is not None and not (is_int(budget) and 1 <= budget <= MAX_INT):
            raise invalid_value("thinking.budget_tokens", budget, "a whole number above 0")
        effort = self._output.get("effort")
        if effort is not None and effort not in get_args(Effort):
            raise invalid_value(
                "output_config.effort", effort, f"one of {', '.join(get_args(Effort))}"
            )

    def _read_format(self) -> dict[str, Any] | None:
        output_format = self._output.get("format")
        path = "output_config.format"
        if output_format is None:
            return None
        fields = self._warnings.split(output_format, ("type", "schema"), "", path)
        if fields.get("type") != "json_schema":
            raise invalid_value(f"{path}.type", fields.get("type"), '"json_schema"')
        schema = fields.get("schema")
        if not isinstance(schema, Mapping):
            raise invalid_value(f"{path}.schema", schema, "a JSON schema, as an object")
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": schema}}

    def _check_thread(self) -> None:
        """Accept a new thread without effect, and reject one that continues, after which clients
        send whole conversations."""
        if self.thread is None:
            return
        kind = self.thread.get("type") if isinstance(self.thread, Mapping) else None
        if kind != "create":
            raise FieldError(
                f"thread is {short_json(self.thread)}, but this server holds no conversations; "
                "send the whole conversation without thread.",
                "thread",
                THREAD_UNSUPPORTED,
            )
        self._warnings.append("thread has no effect: the server holds no conversations.")

    def _variables(self) -> dict[str, Any]:
        """The variables for the chat template, including enable_thinking from `thinking`."""
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is None:
            return variables
        thinks = self._thinking["type"] != "disabled"
        if variables.get("enable_thinking", thinks) != thinks:
            raise FieldError(
                f"thinking.type is {self._thinking['type']}, but "
                "chat_template_kwargs.enable_thinking says otherwise; leave one of them out.",
                "thinking.type",
            )
        return {**variables, "enable_thinking": thinks}

    @property
    def shows_thinking(self) -> bool:
        """Whether the response includes the text of its thinking."""
        return self._thinking.get("display") != "omitted"

    def with_own_names(self, error: FieldError) -> FieldError:
        return super().with_own_names(error).with_names(self._own_names())

    def own_names(self, sentences: Sequence[str]) -> list[str]:
        return [rename_fields(sentence, self._own_names()) for sentence in sentences]

    def _own_names(self) -> Names:
        """Names of fields that a client may also give under a chat's names."""
        return {}


class MessagesRequest(SamplingFields, MessagesPrompt):
    """The body of POST /v1/messages."""

    schema_key: ClassVar[str] = "messages"

    max_tokens: Annotated[Int, Bounds(low=1, high=MAX_INT, hint="ask for one token or more")] = (
        Field(description="Maximum number of tokens to generate, thinking included.")
    )
    stop_sequences: Annotated[Texts, WithJsonSchema(STOP_SCHEMA)] = Field(
        (), description="Same as `stop`."
    )

    def generation(self) -> dict[str, Any]:
        if self.stop and self.stop_sequences:
            raise FieldError("stop is set together with stop_sequences; give one of them.", "stop")
        body = {
            name: getattr(self, name) for name in SamplingFields.model_fields if self.is_set(name)
        }
        if self.stop_sequences:
            body["stop"] = self.stop_sequences
        if (budget := self._thinking.get("budget_tokens")) is not None:
            if self.thinking_token_budget is not None:
                raise FieldError(
                    "thinking_token_budget is set together with thinking.budget_tokens; give one "
                    "of them.",
                    "thinking_token_budget",
                )
            body["thinking_token_budget"] = budget
        return body | {"max_tokens": self.max_tokens, "response_format": self._format}

    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request's keyword arguments of SamplingParams."""
        return self.to_chat().sampling(defaults)

    def _own_names(self) -> Names:
        names: Names = _STOP if self.stop_sequences else {}
        return {**names, **_BUDGET} if "budget_tokens" in self._thinking else names


class CountTokensRequest(MessagesPrompt):
    """The body of POST /v1/messages/count_tokens."""

    schema_key: ClassVar[str] = "count_tokens"

    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )
