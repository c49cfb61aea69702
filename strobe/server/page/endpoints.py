"""What the page asks of the server beyond the API: /markdown."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import BaseModel, Field, WithJsonSchema
from starlette.responses import Response

from strobe.server.openai import replies
from strobe.server.openai.protocol.common import RequestModel
from strobe.server.openai.protocol.errors import FieldError
from strobe.server.page.markdown import blocks
from strobe.server.serving import Serving

MAX_CHARS = 200_000
"""Characters of the longest text that is rendered."""


class MarkdownRequest(RequestModel):
    """The body of POST /markdown."""

    schema_key: ClassVar[str] = "markdown"

    text: Annotated[str, WithJsonSchema({"type": "string", "maxLength": MAX_CHARS})] = Field(
        description="A text in Markdown, of at most 200,000 characters."
    )
    open: bool = Field(
        False, description="The text goes on: close its open emphasis, code and links."
    )

    def check(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise FieldError(
                f"text has {len(self.text)} characters, but at most {MAX_CHARS} are rendered; "
                "shorten it.",
                "text",
            )


class MarkdownBlock(BaseModel):
    """line: the block's first line, from 0. node: a string, or a list of a tag, its attributes and
    its children."""

    line: int
    node: Any


class MarkdownResponse(BaseModel):
    """The response of /markdown."""

    blocks: list[MarkdownBlock]
    warnings: list[str] | None = None


async def markdown(serving: Serving, http: Request) -> Response:
    """Answer POST /markdown."""
    try:
        request = MarkdownRequest.read(await http.body(), lenient=serving.settings.lenient)

        def render() -> bytes:
            parts = [block._asdict() for block in blocks(request.text, is_open=request.open)]
            body = {"blocks": parts} | replies.extras([], False, request.warnings())
            return replies.compact(body).encode("utf-8", "replace")

        return Response(await serving.in_thread(render), media_type="application/json")
    except Exception as error:
        return replies.error_response(serving, error)
