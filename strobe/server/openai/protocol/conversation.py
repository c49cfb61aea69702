"""Fields shared by /v1/chat/completions and /tokenize: tools and chat template options."""

from __future__ import annotations

from pydantic import Field

from strobe.server.generation.request import ConversationRequest, TemplateOptions
from strobe.server.schema.field_errors import FieldError
from strobe.server.schema.template_fields import TemplateVariables
from strobe.server.schema.tools import ChatTools


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
