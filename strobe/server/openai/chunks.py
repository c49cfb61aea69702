"""The stream of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import TypedDict

from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.bodies import SpeculationReport, Usage
from strobe.server.generation.reply import Codec, Event
from strobe.server.generation.run import PromptRun, speculation, usage
from strobe.server.openai.error_body import error_body
from strobe.server.schema.base import StreamOptions

DONE = b"data: [DONE]\n\n"


class ChunkCodec(Codec):
    """An answer whose stream consists of chunks and ends with [DONE]."""

    done = DONE

    def error(self, error: ApiError) -> list[Event]:
        return [error_body(error)]


class _LastChunk(TypedDict):
    """The chunk without choices."""

    choices: list[Any]
    usage: Usage
    speculation: SpeculationReport


def last_fields(runs: Sequence[PromptRun]) -> _LastChunk:
    """Return the fields of the chunk without choices, which has the usage."""
    return {"choices": [], "usage": usage(runs), "speculation": speculation(runs)}


def reports_usage(report: bool, options: StreamOptions | None) -> bool:
    """Whether a stream ends with a chunk that has the usage. report: whether the client asks for a
    speculation report."""
    return report or (options is not None and options.include_usage)
