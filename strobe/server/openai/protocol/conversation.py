"""Fields shared by /v1/chat/completions and /tokenize: tools and chat template options."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidatorFunctionWrapHandler

from strobe.server.generation.request import ConversationRequest, TemplateOptions
from strobe.server.schema.field_errors import HERE, FieldError
from strobe.server.schema.tools import ChatTools
from strobe.server.schema.values import Rule

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


class VariableNames(Rule):
    """Rejects variables that would not reach the chat template."""

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        variables = inner(value)
        for name in variables:
            path = f"{HERE}.{name}"
            if name in OWN_FIELDS:
                raise FieldError(
                    f"{path} is set by the request's own fields; give {name} outside "
                    "chat_template_kwargs.",
                    path,
                )
            if name in NOT_FOR_TEMPLATES:
                raise FieldError(f"{path} is not for the chat template; leave it out.", path)
        return variables

    def shown(self) -> dict[str, Any]:
        return {"propertyNames": {"not": {"enum": [*OWN_FIELDS, *NOT_FOR_TEMPLATES]}}}


TemplateVariables = Annotated[dict[str, Any], VariableNames()]


class Conversation(ConversationRequest):
    """Tools and options of the chat template."""

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

    def check(self) -> None:
        super().check()
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

    def template_options(self, effort: str | None = None) -> TemplateOptions:
        """Return the options of the chat template. effort: of the reasoning."""
        return TemplateOptions(
            source=self.chat_template,
            variables=self.chat_template_kwargs or {},
            effort=effort,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
        )
