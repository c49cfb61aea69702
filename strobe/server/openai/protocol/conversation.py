"""What /v1/chat/completions and /tokenize share: messages and how the chat template writes them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, WithJsonSchema

from strobe.server.openai.protocol.chat_messages import MESSAGE_SCHEMA, read_messages
from strobe.server.openai.protocol.common import RequestModel
from strobe.server.openai.protocol.errors import FieldError
from strobe.server.openai.protocol.tools import TOOLS_SCHEMA, Toolbox, ToolChoice, read_toolbox

Messages = Annotated[
    list[dict[str, Any]], WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA})
]

OWN_FIELDS = (
    "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
"""Names in chat_template_kwargs that the request's own fields set."""

NOT_FOR_TEMPLATES = (
    "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
)  # fmt: skip
"""Names that the tokenizer's function takes for itself."""

TemplateVariables = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"not": {"enum": [*OWN_FIELDS, *NOT_FOR_TEMPLATES]}},
        }
    ),
]


class Conversation(RequestModel):
    """Messages and the options of the chat template. Exactly what `Tokenizer.chat_text` takes."""

    tools: Annotated[list[Any], WithJsonSchema(TOOLS_SCHEMA)] | None = Field(
        None,
        description="Functions that the model may call: `name`, `description`, `parameters` (a "
        "JSON schema) and `strict`.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja chat template in place of the model's own, where the server was "
        "started with --trust-request-chat-template.",
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables for the chat template, such as {"enable_thinking": false}.'
    )
    add_generation_prompt: bool = Field(
        True, description="End the prompt where the assistant's message begins."
    )
    continue_final_message: bool = Field(
        False, description="Go on with the last message instead of beginning a new one."
    )
    add_special_tokens: bool = Field(
        False, description="Add the tokenizer's special tokens to those of the chat template."
    )

    _messages: list[dict[str, Any]] = PrivateAttr(default_factory=list[dict[str, Any]])
    _toolbox: Toolbox = Toolbox((), ToolChoice("none"))

    def check(self) -> None:
        super().check()
        check_template_options(self.chat_template_kwargs)
        if (
            self.continue_final_message
            and self.is_set("add_generation_prompt")
            and self.add_generation_prompt
        ):
            raise FieldError(
                "add_generation_prompt is true beside continue_final_message, but a message is "
                "either new or continued; leave one of them out.",
                "add_generation_prompt",
            )

    def read_conversation(self, messages: list[dict[str, Any]], tool_choice: Any = None) -> None:
        """Check messages and tools and keep their template form. Raises BadField."""
        self._messages = read_messages(messages, self._notes)
        self._toolbox = read_toolbox(self.tools, tool_choice, self._notes)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the chat template reads them."""
        return self._messages

    @property
    def toolbox(self) -> Toolbox:
        """The tools in the prompt, and which of them to call."""
        return self._toolbox

    def template_variables(self) -> dict[str, Any]:
        """What the client gave for the chat template itself."""
        return dict(self.chat_template_kwargs or {})

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.chat_text` beside the messages."""
        options: dict[str, Any] = {
            "tools": list(self.toolbox.tools) or None,
            "chat_template": self.chat_template,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
        }
        if self.continue_final_message:
            options["continue_final_message"] = True
        return options | self.template_variables()

    def warnings(self, template_reads: Collection[str] | None = None) -> list[str]:
        """A sentence for each thing given that has no effect. template_reads: the variables that
        the chat template reads, where that is known."""
        sentences = super().warnings()
        if template_reads is not None:
            sentences += [
                f"chat_template_kwargs.{name} has no effect: the chat template does not read it."
                for name in self.chat_template_kwargs or {}
                if name not in template_reads
            ]
        return sentences


def check_template_options(options: dict[str, Any] | None) -> None:
    """Raises BadField for a variable that would not reach the chat template."""
    for name in options or {}:
        path = f"chat_template_kwargs.{name}"
        if name in OWN_FIELDS:
            raise FieldError(
                f"{path} is set by the request's own fields; give {name} beside "
                "chat_template_kwargs.",
                path,
            )
        if name in NOT_FOR_TEMPLATES:
            raise FieldError(f"{path} is not for the chat template; leave it out.", path)
