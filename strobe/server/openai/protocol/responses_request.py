"""The requests of /v1/responses and /v1/responses/input_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from strobe.server.generation.request import (
    ConversationRequest,
    GenerationRequest,
    Sampling,
    TemplateOptions,
)
from strobe.server.openai.protocol.items import STORED_ITEMS, Input, MessageItem, input_messages
from strobe.server.schema.base import FieldWarnings, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    FieldNames,
    short_json,
)
from strobe.server.schema.sampling_fields import LogprobCount, MaxTokens, SamplingFields
from strobe.server.schema.structured_output import TextFormat, read_constraint
from strobe.server.schema.template_fields import Effort, TemplateVariables
from strobe.server.schema.tools import (
    ResponsesToolChoice,
    ResponsesTools,
    make_toolbox,
)
from strobe.server.schema.values import Must

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"


def _included(value: object) -> object:
    if value in (LOGPROBS, ENCRYPTED):
        return value
    raise FieldError(
        f'{HERE} is {short_json(value)}, which is not supported; "{LOGPROBS}" is.',
        HERE,
        "unsupported_parameter",
    )


Included = Annotated[
    Literal["message.output_text.logprobs", "reasoning.encrypted_content"],
    BeforeValidator(_included),
]
"""LOGPROBS or ENCRYPTED."""


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


class ResponsesPrompt(ConversationRequest):
    """The fields that make up the prompt."""

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

    def read_prompt(self, sampling: Sampling, **fields: Any) -> GenerationRequest:
        """Return the conversation to answer. fields: further fields. Raises FieldError."""
        toolbox = make_toolbox(self.tools, self.tool_choice, self._warnings)
        return GenerationRequest(
            messages=input_messages(self.input, self.instructions, self._warnings),
            toolbox=toolbox,
            parallel_tool_calls=(
                self.parallel_tool_calls if self.is_set("parallel_tool_calls") else None
            ),
            template=TemplateOptions(
                source=self.chat_template,
                variables=self.chat_template_kwargs or {},
                effort=self.reasoning and self.reasoning.effort,
            ),
            sampling=sampling,
            **fields,
        )

    @property
    def text_format(self) -> TextFormat | None:
        """The form of the answer's text."""
        return self.text and self.text.format

    def follow(self, items: list[Any]) -> None:
        """Put the items of an earlier conversation before the input."""
        earlier = STORED_ITEMS.validate_python(items, context={"lenient": True})
        if isinstance(self.input, str):
            new_items = [MessageItem(role="user", content=self.input)]
        else:
            new_items = self.input
        messages = input_messages([*earlier, *new_items], self.instructions, FieldWarnings())
        self._generation = self._generation.with_messages(messages)


def own_names() -> FieldNames:
    """Return this API's names of fields."""
    return FieldNames(
        messages="input",
        max_tokens="max_output_tokens",
        reasoning_effort="reasoning.effort",
        response_format="text.format",
    )


class ResponsesRequest(SamplingFields, ResponsesPrompt):
    """The body of POST /v1/responses."""

    schema_key: ClassVar[str] = "responses"

    store: bool = Field(True, description="Store the response, to retrieve or continue it later.")
    metadata: dict[str, str] | None = Field(None, description="Strings that the response repeats.")
    max_output_tokens: MaxTokens | None = Field(
        None,
        description="Maximum number of tokens to generate, reasoning included; default: as many "
        "as fit.",
    )
    top_logprobs: LogprobCount | None = Field(
        None,
        description=f"With {LOGPROBS} in include: number of top tokens per position, 0 to 20.",
    )
    include: list[Included] | None = Field(
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
        self._sampling = self.read_sampling(
            self.max_output_tokens,
            names=own_names(),
            options=self._logprob_options(),
            answer_format=self.text_format,
        )
        self._generation = self.read_prompt(
            self._sampling, model=self.model, request_id=self.request_id, timeout=self.timeout
        )

    def _logprob_options(self) -> dict[str, Any]:
        logprobs = self._reads_logprobs()
        if self.top_logprobs and not logprobs:
            raise FieldError(
                f'top_logprobs is {self.top_logprobs} without "{LOGPROBS}" in include; add it.',
                "top_logprobs",
            )
        return {"logprobs": self.top_logprobs or 0} if logprobs else {}

    def _reads_logprobs(self) -> bool:
        for index, name in enumerate(self.include or ()):
            path = f"include[{index}]"
            if name == ENCRYPTED:
                self._warnings.append(
                    f'{path} "{ENCRYPTED}" has no effect: reasoning is in the open.'
                )
        return LOGPROBS in (self.include or ())

    @property
    def shown_format(self) -> dict[str, Any]:
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
        names = own_names()
        sources = {} if self.text_format is None else {"response_format": self.text_format}
        sampling = Sampling(constraint=read_constraint(sources, names), names=names)
        sampling.check(self._warnings)
        self._generation = self.read_prompt(sampling)
