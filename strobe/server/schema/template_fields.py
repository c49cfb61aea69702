"""Fields of requests that the chat template reads: the reasoning's effort, and variables."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ValidatorFunctionWrapHandler

from strobe.server.schema.field_errors import HERE, FieldError
from strobe.server.schema.values import Rule

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

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
