"""The requests of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
)

from strobe.server.anthropic.protocol.blocks import Texts as TextBlocks
from strobe.server.anthropic.protocol.blocks import Turns, joined, to_messages
from strobe.server.anthropic.protocol.tools import (
    MessagesToolChoice,
    MessagesTools,
    parallel_tool_calls,
    to_tool_choice,
)
from strobe.server.generation.request import (
    ConversationRequest,
    GenerationRequest,
    Sampling,
    TemplateOptions,
)
from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    FieldNames,
    short_json,
)
from strobe.server.schema.sampling_fields import SamplingFields
from strobe.server.schema.structured_output import Constraint
from strobe.server.schema.template_fields import Effort, TemplateVariables
from strobe.server.schema.tools import Toolbox, make_toolbox
from strobe.server.schema.values import (
    Bounds,
    Int,
    JsonSchema,
    Must,
    Rule,
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

    def constraint(self, source: str) -> Constraint:
        return Constraint(source, "json", self.schema_)


class OutputConfig(RequestObject):
    """Options of the answer."""

    schema_key: ClassVar[str] = "output_config"

    effort: Annotated[Effort, Must(f"one of {', '.join(get_args(Effort))}")] | None = None
    format: OutputFormat | None = None


class NewThread(BaseModel):
    """A conversation that the server should store; it stores none."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: Literal["create"]


class OnlyNew(Rule):
    """Rejects a conversation that continues; clients then send whole conversations."""

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        try:
            return inner(value)
        except ValidationError:
            raise FieldError(
                f"{HERE} is {short_json(value)}, but this server holds no conversations; send the "
                f"whole conversation without {HERE}.",
                HERE,
                THREAD_UNSUPPORTED,
            ) from None


class MessagesPrompt(ConversationRequest):
    """The fields that make up the prompt."""

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
    thread: Annotated[NewThread, OnlyNew()] | None = Field(
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
        if self.thread is not None:
            self._warnings.append("thread has no effect: the server holds no conversations.")

    def read_prompt(self, sampling: Sampling, **fields: Any) -> GenerationRequest:
        """Return the conversation to answer. fields: further fields. Raises FieldError."""
        system = joined(self.system)
        messages = to_messages(self.messages)
        conversation = messages.finished()
        if system:
            conversation.insert(0, {"role": "system", "content": system})
        if not conversation:
            raise FieldError(
                "messages has only blocks that are not shown to the model; give a text as well.",
                "messages",
            )
        return GenerationRequest(
            messages=conversation,
            toolbox=self._toolbox(),
            parallel_tool_calls=parallel_tool_calls(self.tool_choice),
            template=TemplateOptions(
                source=self.chat_template,
                variables=self._variables(),
                effort=self.output_config and self.output_config.effort,
                continue_final_message=messages.ends_with_answer,
            ),
            sampling=sampling,
            clamp_max_tokens=True,
            **fields,
        )

    def _toolbox(self) -> Toolbox:
        choice = to_tool_choice(self.tool_choice, has_tools=bool(self.tools))
        return make_toolbox(self.tools, choice, self._warnings)

    @property
    def budget(self) -> int | None:
        """The maximum number of tokens of the thinking."""
        return None if self.thinking is None else self.thinking.budget_tokens

    @property
    def answer_format(self) -> OutputFormat | None:
        """The form of the answer's text."""
        return self.output_config and self.output_config.format

    def own_names(self) -> FieldNames:
        """Return this API's names of fields."""
        names = FieldNames(
            reasoning_effort="output_config.effort", response_format="output_config.format"
        )
        if self.thinking is not None:
            names["chat_template_kwargs.enable_thinking"] = "thinking.type"
        if self.budget is not None:
            names["thinking_token_budget"] = "thinking.budget_tokens"
        return names

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


class MessagesRequest(SamplingFields, MessagesPrompt):
    """The body of POST /v1/messages."""

    schema_key: ClassVar[str] = "messages"

    max_tokens: Annotated[Int, Bounds(low=1, high=MAX_INT, hint="ask for one token or more")] = (
        Field(description="Maximum number of tokens to generate, thinking included.")
    )
    stop_sequences: Texts = Field((), description="Same as `stop`.")

    def check(self) -> None:
        super().check()
        if self.stop and self.stop_sequences:
            raise FieldError("stop is set together with stop_sequences; give one of them.", "stop")
        if self.budget is not None and self.thinking_token_budget is not None:
            raise FieldError(
                "thinking_token_budget is set together with thinking.budget_tokens; give one of "
                "them.",
                "thinking_token_budget",
            )
        names = self.own_names()
        options: dict[str, Any] = {}
        if self.stop_sequences:
            names["stop"] = "stop_sequences"
            options["stop"] = self.stop_sequences
        self._sampling = self.read_sampling(
            self.max_tokens,
            names=names,
            options=options,
            answer_format=self.answer_format,
            thinking_budget=self.budget,
        )
        self._generation = self.read_prompt(
            self._sampling, model=self.model, request_id=self.request_id, timeout=self.timeout
        )


class CountTokensRequest(MessagesPrompt):
    """The body of POST /v1/messages/count_tokens."""

    schema_key: ClassVar[str] = "count_tokens"

    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )

    def check(self) -> None:
        super().check()
        self._generation = self.read_prompt(Sampling(names=self.own_names()))
