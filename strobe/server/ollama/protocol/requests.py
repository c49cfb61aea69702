"""The requests of Ollama's /api/chat, /api/generate and /api/show."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, create_model

from strobe.grammars.closed_schema import closed
from strobe.sampling_params import OPTIONS as SAMPLING_OPTIONS
from strobe.server.generation.request import (
    ConversationRequest,
    GenerationRequest,
    Sampling,
    TemplateOptions,
)
from strobe.server.ollama.protocol.messages import OllamaMessages
from strobe.server.schema.base import RequestModel, RequestObject
from strobe.server.schema.field_errors import HERE, FieldError, FieldNames
from strobe.server.schema.sampling_fields import (
    LogprobCount,
    SamplingFields,
    check_top_logprobs,
    sent_arguments,
)
from strobe.server.schema.structured_output import Constraint
from strobe.server.schema.tools import NO_TOOLS, ChatTools, Toolbox, make_toolbox
from strobe.server.schema.values import Bounds, Int, Must, Value, check_int
from strobe.validation import MAX_INT

OPTIONS: Mapping[str, str] = {
    option.name: option.ollama_name for option in SAMPLING_OPTIONS if option.ollama_name
}
"""The sampling options that `options` has, and their names there."""

EFFORTS = ("low", "medium", "high", "max")


class OllamaFormat(Value):
    """The form of an answer: any JSON object, or a JSON schema."""

    def parse(self, value: object) -> Constraint | None:
        if value == "":
            return None
        if value == "json":
            return Constraint("response_format", "json_object", True)
        if not isinstance(value, Mapping):
            raise FieldError.of_value(HERE, value, '"json" or a JSON schema, as an object')
        return Constraint("response_format", "json", closed(value))

    def shown(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": ["", "json"]}, {"type": "object"}]}


def _think(value: object) -> object:
    if isinstance(value, bool) or value in EFFORTS:
        return value
    raise FieldError.of_value(HERE, value, f"true, false or one of {', '.join(EFFORTS)}")


Think = Annotated[Literal[True, False, "low", "medium", "high", "max"], BeforeValidator(_think)]


class _OwnOptions(RequestObject):
    """Options that SamplingFields lack, or have with other bounds."""

    schema_key: ClassVar[str] = "options"

    max_tokens: (
        Annotated[Int, Bounds(low=-MAX_INT, high=MAX_INT, hint="-1 asks for all that fit")] | None
    ) = Field(None, alias="num_predict")
    num_ctx: (
        Annotated[int, Field(ge=1), BeforeValidator(check_int), Must("a whole number above 0")]
        | None
    ) = None


if TYPE_CHECKING:

    class OllamaOptions(_OwnOptions):
        """The options of a request; here, those that the server's code reads."""

        seed: int | None
        include_speculation: bool

else:

    def _shared_field(name: str) -> tuple[Any, Any]:
        """Return the type and the field of an option that SamplingFields have."""
        field = copy.copy(SamplingFields.model_fields[name])
        alias = OPTIONS.get(name, name)
        field.alias = field.validation_alias = field.serialization_alias = alias
        return field.annotation, field

    OllamaOptions = create_model(
        "OllamaOptions",
        __base__=_OwnOptions,
        **{
            name: _shared_field(name)
            for name in (*OPTIONS, "include_speculation")
            if name != "max_tokens"
        },
    )


class OllamaRequest(ConversationRequest):
    """The fields of /api/chat and /api/generate. Ollama ignores fields that it does not know, and
    its clients send such fields."""

    ignores_unknown_fields: ClassVar[bool] = True

    model: str | None = Field(
        None, description="The served model's name, with or without `:latest`. Optional."
    )
    stream: bool = Field(True, description="Stream the answer, one JSON object per line.")
    format: Annotated[Constraint | None, OllamaFormat()] = Field(
        None,
        description="`json`, or a JSON schema, which is always enforced strictly. As in Ollama, an "
        "object that declares properties has no others, unless `additionalProperties` says so.",
    )
    options: OllamaOptions | None = Field(None, description="Sampling options, listed below.")
    think: Think | None = Field(
        None,
        description="true or false: passed to the chat template as enable_thinking. `low`, "
        "`medium`, `high` or `max`: passed as reasoning_effort. Default: the template's.",
    )
    logprobs: bool = Field(False, description="Return log probabilities of the answer's tokens.")
    top_logprobs: LogprobCount | None = Field(
        None, description="With logprobs: number of top tokens per position, 0 to 20."
    )

    def check(self) -> None:
        super().check()
        check_top_logprobs(self.top_logprobs, self.logprobs)
        self._generation = GenerationRequest(
            model=self.model,
            messages=self.read_messages(),
            toolbox=self.read_toolbox(),
            template=self._template_options(),
            sampling=self._read_sampling(),
            raw_prompt=self.raw_prompt,
            clamp_max_tokens=True,
        )

    @property
    def is_load(self) -> bool:
        """Whether the request has no prompt and only asks to load the model."""
        raise NotImplementedError

    def read_messages(self) -> list[dict[str, Any]]:
        """Return the messages as chat templates read them, an empty one if there is none. Raises
        FieldError."""
        raise NotImplementedError

    def read_toolbox(self) -> Toolbox:
        """Return the request's tools. Raises FieldError."""
        return NO_TOOLS

    @property
    def raw_prompt(self) -> str | None:
        """The prompt that the chat template is not applied to."""
        return None

    @property
    def continues_answer(self) -> bool:
        """Whether the answer continues the last message."""
        return False

    @property
    def num_ctx(self) -> int | None:
        """The context length that the client asks for."""
        return self.options and self.options.num_ctx

    @property
    def include_speculation(self) -> bool:
        """Whether the client asks for a speculation report."""
        return self.options is not None and self.options.include_speculation

    def _read_sampling(self) -> Sampling:
        names = FieldNames({name: f"options.{alias}" for name, alias in OPTIONS.items()})
        names |= {
            "response_format": "format",
            "reasoning_effort": "think",
            "chat_template_kwargs.enable_thinking": "think",
        }
        arguments: dict[str, Any] = {}
        if self.options is not None:
            arguments = sent_arguments(self.options, OPTIONS)
        max_tokens = arguments.pop("max_tokens", None)
        if arguments.get("seed") == -1:
            del arguments["seed"]  # Ollama's value for a random seed
        if self.logprobs:
            arguments["logprobs"] = self.top_logprobs or 0
        sampling = Sampling(
            options=arguments,
            max_tokens=max_tokens if max_tokens and max_tokens > 0 else None,
            constraint=self.format,
            names=names,
        )
        sampling.check(self._warnings)
        return sampling

    def _template_options(self) -> TemplateOptions:
        think = self.think
        return TemplateOptions(
            variables={"enable_thinking": think} if isinstance(think, bool) else {},
            effort=None if isinstance(think, bool) else think,
            continue_final_message=self.continues_answer,
            add_special_tokens=self.raw_prompt is not None,
        )


class OllamaChatRequest(OllamaRequest):
    """The body of POST /api/chat."""

    schema_key: ClassVar[str] = "ollama.chat"

    messages: OllamaMessages = Field(
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

    @property
    def continues_answer(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def read_messages(self) -> list[dict[str, Any]]:
        messages = [message.for_template() for message in self.messages]
        return messages or [{"role": "user", "content": ""}]

    def read_toolbox(self) -> Toolbox:
        return make_toolbox(self.tools, None, self._warnings)


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

    def read_messages(self) -> list[dict[str, Any]]:
        if self.raw and self.system:
            raise FieldError(
                "system is set together with raw, whose prompt is the whole text; leave one of "
                "them out.",
                "system",
            )
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, {"role": "user", "content": self.prompt}]


class ShowRequest(RequestModel):
    """The body of POST /api/show."""

    ignores_unknown_fields: ClassVar[bool] = True
    schema_key: ClassVar[str] = "ollama.show"

    model: str | None = Field(
        None, description="The served model's name, with or without `:latest`. Optional."
    )
    name: str | None = Field(None, description="Older name of model.")
