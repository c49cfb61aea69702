"""Requests and responses of /tokenize and /detokenize."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from strobe.server.generation.request import GenerationRequest
from strobe.server.openai.protocol.conversation import Conversation
from strobe.server.schema.base import RequestModel
from strobe.server.schema.field_errors import FieldError
from strobe.server.schema.messages import Messages
from strobe.server.schema.tools import make_toolbox
from strobe.server.schema.values import TokenIds


class TokenizeRequest(Conversation):
    """The body of POST /tokenize: a prompt, or a chat as /v1/chat/completions takes it."""

    schema_key: ClassVar[str] = "tokenize"

    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )
    prompt: str | None = Field(None, description="A string.")
    messages: Messages | None = Field(None, description="A conversation instead of prompt.")
    add_special_tokens: bool = Field(
        False,
        description="Add the tokenizer's special tokens; default: true for a prompt, false for "
        "messages.",
    )
    return_token_strs: bool = Field(
        False, description="Also return each token as the vocabulary writes it."
    )

    def check(self) -> None:
        super().check()
        if self.messages is not None:
            if self.prompt is not None:
                raise FieldError(
                    "messages is set together with prompt; give one of them.", "messages"
                )
            self._generation = GenerationRequest(
                messages=[message.for_template() for message in self.messages],
                toolbox=make_toolbox(self.tools, None, self._warnings),
                template=self.template_options(),
            )
            return
        if self.prompt is None:
            raise FieldError(
                "prompt is missing; give it, or messages.", "prompt", "missing_required_parameter"
            )
        for name in type(self).model_fields:
            if self.is_set(name) and name not in PROMPT_FIELDS:
                raise FieldError(f"{name} is set together with prompt; it needs messages.", name)

    @property
    def adds_special_tokens(self) -> bool:
        """Whether to add the tokenizer's special tokens; by default for a prompt, but not for a
        chat, whose template writes them."""
        if self.is_set("add_special_tokens"):
            return self.add_special_tokens
        return self.messages is None


PROMPT_FIELDS = ("model", "prompt", "add_special_tokens", "return_token_strs")
"""The fields of a request with a prompt."""


class DetokenizeRequest(RequestModel):
    """The body of POST /detokenize."""

    schema_key: ClassVar[str] = "detokenize"

    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )
    tokens: TokenIds = Field(description="Token ids.")
