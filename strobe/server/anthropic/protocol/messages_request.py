"""The requests of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

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
from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    Names,
    rename_fields,
    short_json,
)
from strobe.server.schema.sampling import STOP_SCHEMA, SamplingFields
from strobe.server.schema.values import (
    Bounds,
    Int,
    JsonSchema,
    Must,
    OneOf,
    Texts,
    check_int,
)
from strobe.validation import MAX_INT

THREAD_UNSUPPORTED = "thread_unsupported_request"
"""The error code that makes Anthropic's clients send whole conversations."""


class ThinkingOptions(RequestObject):
    """Whether the model thinks, for how long, and whether the response shows it."""

    schema_key: ClassVar[str] = "thinking"

    type: Annotated[
        Literal["enabled", "adaptive", "disabled"], Must("one of enabled, adaptive, disabled")
    ]
    display: (
        Annotated[Literal["summarized", "omitted"], Must("one of summarized, omitted")] | None
    ) = None
    budget_tokens: (
        Annotated[
            int,
            Field(ge=1, le=MAX_INT),
            BeforeValidator(check_int),
            Must("a whole number above 0"),
        ]
        | None
    ) = None


class OutputFormat(RequestObject):
    """JSON that follows a schema."""

    type: Annotated[Literal["json_schema"], Must('"json_schema"')]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(RequestObject):
    """Options of the answer."""

    schema_key: ClassVar[str] = "output_config"

    effort: Annotated[Effort, Must(f"one of {', '.join(get_args(Effort))}")] | None = None
    format: OutputFormat | None = None


class NewThread(BaseModel):
    """A conversation that the server should store; it stores none."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["create"]


def _thread(value: Any) -> type[NewThread]:
    """Reject a thread that continues, after which clients send whole conversations."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind != "create":
        raise FieldError(
            f"{HERE} is {short_json(value)}, but this server holds no conversations; send the "
            f"whole conversation without {HERE}.",
            HERE,
            THREAD_UNSUPPORTED,
        )
    return NewThread


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
    thinking: ThinkingOptions | None = Field(
        None,
        description="`type`: `enabled`, `adaptive` or `disabled`, passed to the chat template as "
        "enable_thinking; default: the template's. `budget_tokens` limits the tokens of the "
        "thinking. `display: omitted` leaves its text out of the response.",
    )
    output_config: OutputConfig | None = Field(
        None,
        description="`format`: the type `json_schema` with `schema`, which is always "
        "enforced strictly. `effort`: passed to the chat template.",
    )
    thread: Annotated[NewThread, OneOf(_thread)] | None = Field(
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

    def check(self) -> None:
        super().check()
        check_template_options(self.chat_template_kwargs)
        if self.thread is not None:
            self._warnings.append("thread has no effect: the server holds no conversations.")
        items = to_items(self.messages)
        system = joined(self.system)
        tools = [tool.in_chat() for tool in self.tools or ()]
        body: dict[str, Any] = {
            "messages": input_messages(items, system, self._warnings) if items else [],
            "tools": tools,
            **choice_in_chat(self.tool_choice, has_tools=bool(tools)),
            "chat_template": self.chat_template,
            "chat_template_kwargs": self._variables(),
            "reasoning_effort": self.output_config and self.output_config.effort,
            "continue_final_message": (
                bool(items) and isinstance(items[-1], MessageItem) and items[-1].role == "assistant"
            ),
        }
        self.read_chat(body | self.generation())

    def generation(self) -> dict[str, Any]:
        """The chat request's sampling and output fields."""
        return {}

    @property
    def budget(self) -> int | None:
        """The maximum number of tokens of the thinking."""
        return None if self.thinking is None else self.thinking.budget_tokens

    def format_in_chat(self) -> dict[str, Any] | None:
        """The answer's format as a chat's response_format."""
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = {"name": "format", "schema": self.output_config.format.schema_}
        return {"type": "json_schema", "json_schema": schema}

    def _variables(self) -> dict[str, Any]:
        """The variables for the chat template, including enable_thinking from `thinking`."""
        variables = dict(self.chat_template_kwargs or {})
        if self.thinking is None:
            return variables
        thinks = self.thinking.type != "disabled"
        if variables.get("enable_thinking", thinks) != thinks:
            raise FieldError(
                f"thinking.type is {self.thinking.type}, but "
                "chat_template_kwargs.enable_thinking says otherwise; leave one of them out.",
                "thinking.type",
            )
        return {**variables, "enable_thinking": thinks}

    @property
    def shows_thinking(self) -> bool:
        """Whether the response includes the text of its thinking."""
        return self.thinking is None or self.thinking.display != "omitted"

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
        if self.budget is not None:
            if self.thinking_token_budget is not None:
                raise FieldError(
                    "thinking_token_budget is set together with thinking.budget_tokens; give one "
                    "of them.",
                    "thinking_token_budget",
                )
            body["thinking_token_budget"] = self.budget
        return body | {"max_tokens": self.max_tokens, "response_format": self.format_in_chat()}

    def limit(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request's keyword arguments of SamplingParams."""
        return self.to_chat().sampling(defaults)

    def _own_names(self) -> Names:
        names: Names = _STOP if self.stop_sequences else {}
        return {**names, **_BUDGET} if self.budget is not None else names


class CountTokensRequest(MessagesPrompt):
    """The body of POST /v1/messages/count_tokens."""

    schema_key: ClassVar[str] = "count_tokens"

    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )
