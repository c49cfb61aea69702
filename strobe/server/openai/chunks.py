"""The stream of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strobe.server.generation.errors import ApiError
from strobe.server.openai.errors import error_body
from strobe.server.openai.replies import Codec, Event
from strobe.server.openai.runs import PromptRun, speculation, usage

DONE = b"data: [DONE]\n\n"


class ChunkCodec(Codec):
    """An answer whose stream consists of chunks and ends with [DONE]."""

    done = DONE

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error)]


def last_chunk(head: dict[str, Any], runs: Sequence[PromptRun]) -> Event:
    """Return the chunk without choices, which has the usage. head: the chunks' first fields."""
    return {**head, "choices": [], "usage": usage(runs), "speculation": speculation(runs)}
