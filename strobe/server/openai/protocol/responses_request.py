"""The requests of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field, PrivateAttr, WithJsonSchema

from strobe.server.openai.protocol.chat_request import Effort
from strobe.server.openai.protocol.conversation import TemplateVariables, check_template_options
from strobe.server.openai.protocol.converted import ConvertedRequest
from strobe.server.openai.protocol.items import STORED_ITEMS, Input, MessageItem, input_messages
from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    FieldError,
    Names,
    short_json,
)
from strobe.server.schema.formats import TextFormat
from strobe.server.schema.sampling import LogprobCount, SamplingFields
from strobe.server.schema.tools import (
    ResponsesToolChoice,
    ResponsesTools,
    Toolbox,
    ToolChoice,
    make_toolbox,
)
from strobe.server.schema.values import Bounds, Int, Must
from strobe.validation import MAX_INT

_NAMES = {
    re.compile(r"\breasoning_effort\b"): "reasoning.effort",
    re.compile(r"\bmax_(?:completion_)?tokens\b"): "max_output_tokens",
}
"""Names of a chat request's fields, and here."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


INCLUDE_SCHEMA: dict[str, Any] = {"type": "array", "items": {"enum": [LOGPROBS, ENCRYPTED]}}


class TextOptions(RequestObject):
    """Options of the answer's text."""

    schema_key: ClassVar[str] = "text"

    format: TextFormat | None = None


class ReasoningOptions(RequestObject):
    """Options of the reasoning."""

    schema_key: ClassVar[str] = "reasoning"

    effort: Annotated[Effort, Must(f"one of {', '.join(get_args(Effort))}")] | None = None


class ResponsesStreamOptions(RequestObject):
    """Stream options, none with an effect; the last event always carries the usage."""

    schema_key: ClassVar[str] = "responses.stream_options"


class ResponsesPrompt(ConvertedRequest):
    """The fields that make up the prompt."""

    names: ClassVar[Names] = _NAMES
    format_field: ClassVar[str] = "text.format"

    input: Input = Field(
        description="A string, or a list of items: `message`, `function_call`, "
        "`function_call_output` and `reasoning`; items of other tools are skipped with a warning."
    )
    instructions: str | None = Field(
        None, description="The system message, for this response only."
    )
    previous_response_id: str | None = Field(
        None, description="Id of a stored response whose conversation precedes input."
    )
    tools: ResponsesTools | None = Field(
        None,
        description="Functions that the model may call: `type: function`, `name`, `description`, "
        "`parameters` (a JSON schema) and `strict`. Other types are skipped with a warning.",
    )
    tool_choice: ResponsesToolChoice | None = Field(
        None,
        description="`none`, `auto`, `required`, a function by name, or `allowed_tools`; default: "
        "`auto` if there are tools. With `none` the prompt contains no tools.",
    )
    parallel_tool_calls: bool = Field(
        True,
        description="Allow several calls in one answer. With `required`, only if the request sets "
        "it to true; a function by name is called once.",
    )
    text: TextOptions | None = Field(
        None,
        description="`format`: `text`, `json_object`, or `json_schema` with `schema`, which is "
        "always enforced strictly.",
    )
    reasoning: ReasoningOptions | None = Field(
        None,
        description="`effort`: passed to the chat template; `none` also sets its enable_thinking "
        "to false. `summary` has no effect.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja chat template to use instead of the model's own; requires a server "
        "started with --trust-request-chat-template.",
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables for the chat template, such as {"enable_thinking": false}.'
    )

    _body: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    _toolbox: Toolbox = Toolbox((), ToolChoice("none"))
    _format: dict[str, Any] | None = None

    def check(self) -> None:
        super().check()
        check_template_options(self.chat_template_kwargs)

    def build(self) -> None:
        """Build the chat request. Raises FieldError."""
        self._toolbox = make_toolbox(self.tools, self.tool_choice, self._warnings)
        choice = self._toolbox.choice
        if self.text is not None and self.text.format is not None:
            self._format = self.text.format.in_chat()
        body: dict[str, Any] = {
            "messages": input_messages(self.input, self.instructions, self._warnings),
            "tools": list(self._toolbox.tools),
            "tool_choice": choice.mode,
            "parallel_tool_calls": (
                self.parallel_tool_calls if self.is_set("parallel_tool_calls") else None
            ),
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "response_format": self._format,
            "chat_template": self.chat_template,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        if choice.name is not None:
            body["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        body |= self.generation()
        self._body = body
        self.read_chat(body)

    def generation(self) -> dict[str, Any]:
        """The chat request's sampling and output fields. Raises FieldError."""
        return {}

    def follow(self, items: list[Any]) -> None:
        """Put the items of an earlier conversation before the input."""
        earlier = STORED_ITEMS.validate_python(items, context={"lenient": True})
        if isinstance(self.input, str):
            new_items = [MessageItem(role="user", content=self.input)]
        else:
            new_items = self.input
        messages = input_messages([*earlier, *new_items], self.instructions, FieldWarnings())
        self.read_chat(self._body | {"messages": messages})

    def with_own_names(self, error: FieldError) -> FieldError:
        renamed = super().with_own_names(error)
        if renamed.param == "messages":
            renamed.param = "input"
        return renamed

    def warnings(self, template_reads: Collection[str] | None = None) -> list[str]:
        sentences = super().warnings(template_reads)
        if self._toolbox.choice.mode == "auto":
            sentences += [
                f"{path} has no effect: a schema is held where tool_choice forces a call."
                for path in self._toolbox.strict
            ]
        return list(dict.fromkeys(sentences))


class ResponsesRequest(SamplingFields, ResponsesPrompt):
    """The body of POST /v1/responses."""

    schema_key: ClassVar[str] = "responses"

    store: bool = Field(True, description="Store the response, to retrieve or continue it later.")
    metadata: dict[str, str] | None = Field(None, description="Strings that the response repeats.")
    max_output_tokens: (
        Annotated[Int, Bounds(low=1, high=MAX_INT, hint="leave it out for all that fit")] | None
    ) = Field(
        None,
        description="Maximum number of tokens to generate, reasoning included; default: as many "
        "as fit.",
    )
    top_logprobs: LogprobCount | None = Field(
        None,
        description=f"With {LOGPROBS} in include: number of top tokens per position, 0 to 20.",
    )
    include: Annotated[list[str], WithJsonSchema(INCLUDE_SCHEMA)] | None = Field(
        None,
        description=f"`{LOGPROBS}` asks for log probabilities; `{ENCRYPTED}` has no effect.",
    )
    stream_options: ResponsesStreamOptions | None = Field(
        None, description="Accepted; none of its fields has an effect."
    )

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and not self.stream:
            raise FieldError(
                "stream_options is set without stream; set stream to true.",
                "stream_options",
            )
        self.build()

    def generation(self) -> dict[str, Any]:
        logprobs = self._reads_logprobs()
        if self.top_logprobs and not logprobs:
            raise FieldError(
                f'top_logprobs is {self.top_logprobs} without "{LOGPROBS}" in include; add it.',
                "top_logprobs",
            )
        constrains = self._format is not None and self._format["type"] != "text"
        if constrains and (self._constraint is not None or self.ignore_eos):
            source = self._constraint.source if self._constraint is not None else "ignore_eos"
            raise FieldError(
                f"{source} is set together with text.format, which already says how the answer "
                "ends and looks; leave one of them out.",
                source,
            )
        body: dict[str, Any] = {
            "logprobs": logprobs,
            "top_logprobs": self.top_logprobs,
            "max_completion_tokens": self.max_output_tokens,
        }
        return body | {
            name: getattr(self, name) for name in SamplingFields.model_fields if self.is_set(name)
        }

    def _reads_logprobs(self) -> bool:
        for index, name in enumerate(self.include or ()):
            path = f"include[{index}]"
            if name == ENCRYPTED:
                self._warnings.append(
                    f'{path} "{ENCRYPTED}" has no effect: reasoning is in the open.'
                )
            elif name != LOGPROBS:
                raise FieldError(
                    f'{path} is {short_json(name)}, which is not supported; "{LOGPROBS}" is.',
                    path,
                    "unsupported_parameter",
                )
        return LOGPROBS in (self.include or ())

    def limit(self) -> tuple[str, int | None]:
        return "max_output_tokens", self.max_output_tokens

    def sampling(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """The chat request's keyword arguments of SamplingParams."""
        return self.to_chat().sampling(defaults)

    @property
    def text_format(self) -> dict[str, Any]:
        """text.format as the response echoes it."""
        text_format = self.sent.get("text", {}).get("format")
        return text_format if text_format is not None else {"type": "text"}


class InputTokensRequest(ResponsesPrompt):
    """The body of POST /v1/responses/input_tokens."""

    schema_key: ClassVar[str] = "input_tokens"

    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )

    def check(self) -> None:
        super().check()
        self.build()
