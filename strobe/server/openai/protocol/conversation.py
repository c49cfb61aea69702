"""Fields shared by /v1/chat/completions and /tokenize: tools and chat template options."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any

from pydantic import Field, PrivateAttr, WithJsonSchema

from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError
from strobe.server.schema.messages import Messages
from strobe.server.schema.tools import ChatToolChoice, ChatTools, Toolbox, ToolChoice, make_toolbox

OWN_FIELDS = (
    "messages", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip
"""Names that are rejected in chat_template_kwargs because the request has fields for them."""

NOT_FOR_TEMPLATES = (
    "conversation", "tokenize", "padding", "truncation", "max_length", "return_tensors",
    "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs",
)  # fmt: skip
"""Names that are rejected because `apply_chat_template` has parameters of those names."""

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
    """Messages and chat template options: the arguments of `Tokenizer.chat_text`."""

    tools: ChatTools | None = Field(
        None,
        description="Functions that the model may call: `name`, `description`, `parameters` (a "
        "JSON schema) and `strict`.",
    )
    chat_template: str | None = Field(
        None,
        description="A Jinja chat template to use instead of the model's own; requires a server "
        "started with --trust-request-chat-template.",
    )
    chat_template_kwargs: TemplateVariables | None = Field(
        None, description='Variables for the chat template, such as {"enable_thinking": false}.'
    )
    add_generation_prompt: bool = Field(
        True, description="End the prompt with the start of an assistant message."
    )
    continue_final_message: bool = Field(
        False, description="Continue the last message instead of starting a new one."
    )
    add_special_tokens: bool = Field(
        False, description="Add the tokenizer's special tokens to the rendered chat template."
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
                "add_generation_prompt is true together with continue_final_message, but a message "
                "is either new or continued; leave one of them out.",
                "add_generation_prompt",
            )

    def read_conversation(
        self, messages: Messages, tool_choice: ChatToolChoice | None = None
    ) -> None:
        """Store messages and tools as the template reads them. Raises FieldError."""
        self._messages = [message.for_template() for message in messages]
        self._toolbox = make_toolbox(self.tools, tool_choice, self._warnings)

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the chat template reads them."""
        return self._messages

    @property
    def toolbox(self) -> Toolbox:
        """The tools in the prompt, and the tool choice."""
        return self._toolbox

    def template_variables(self) -> dict[str, Any]:
        """The request's variables for the chat template."""
        return dict(self.chat_template_kwargs or {})

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of `Tokenizer.chat_text`, without the messages."""
        options: dict[str, Any] = {
            "tools": list(self.toolbox.tools) or None,
            "chat_template": self.chat_template,
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
        }
        if self.continue_final_message:
            options["continue_final_message"] = True
        return options | self.template_variables()

    def warnings(self, template_reads: Collection[str] | None = None) -> list[str]:
        """One sentence for each field without effect. template_reads: the variables that the chat
        template reads, None if unknown."""
        sentences = super().warnings()
        if template_reads is not None:
            sentences += [
                f"chat_template_kwargs.{name} has no effect: the chat template does not read it."
                for name in self.chat_template_kwargs or {}
                if name not in template_reads
            ]
        return sentences


def check_template_options(options: dict[str, Any] | None) -> None:
    """Reject variables that would not reach the chat template. Raises FieldError."""
    for name in options or {}:
        path = f"chat_template_kwargs.{name}"
        if name in OWN_FIELDS:
            raise FieldError(
                f"{path} is set by the request's own fields; give {name} outside "
                "chat_template_kwargs.",
                path,
            )
        if name in NOT_FOR_TEMPLATES:
            raise FieldError(f"{path} is not for the chat template; leave it out.", path)
