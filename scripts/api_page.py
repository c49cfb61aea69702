"""Write the tables of fields in docs/api.md from the request models.

    python scripts/api_page.py

A table stands between `<!-- table NAME -->` and `<!-- end -->`; everything else on the page is
written by hand. A test fails where the page and the models differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from strobe.server.anthropic.protocol.messages_request import CountTokensRequest, MessagesRequest
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.common import RequestModel, StreamOptions
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.responses_request import (
    InputTokensRequest,
    ResponsesRequest,
    ResponsesStreamOptions,
)
from strobe.server.openai.protocol.sampling_fields import SamplingFields
from strobe.server.openai.protocol.tables import NO_EFFECT, UNSUPPORTED, FieldRule
from strobe.server.openai.protocol.token_requests import DetokenizeRequest, TokenizeRequest

PAGE = Path(__file__).parents[1] / "docs" / "api.md"

GENERATING: tuple[type[RequestModel], ...] = (
    ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest
)  # fmt: skip
OTHERS: tuple[type[RequestModel], ...] = (
    InputTokensRequest, CountTokensRequest, TokenizeRequest, DetokenizeRequest
)  # fmt: skip
ENDPOINTS = (*GENERATING, *OTHERS)

HEAD = "| field | what it does, or why not | status |\n|---|---|---|"

Row = tuple[str, str, str]


def model_rows(model: type[RequestModel], without: Iterable[str] = ()) -> list[Row]:
    """A row for each field of a request, in the order of the code."""
    fields = {name: f for name, f in model.model_fields.items() if name not in without}
    rows: list[Row] = []
    for name, field in fields.items():
        status = "honoured, required" if field.is_required() else "honoured"
        rows.append((name, (field.description or "").rstrip("."), status))
    return rows


def note_rows(table: Mapping[str, FieldRule], status: str) -> list[Row]:
    """A row for each field that is not honoured; values that are accepted in silence are named."""
    rows: list[Row] = []
    for name, note in table.items():
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in note.neutral_values)
        accepted = f" (accepted: {neutral})" if neutral else ""
        rows.append((name, note.reason, f"{status}{accepted if status == 'refused' else ''}"))
    return rows


def shared(tables: Mapping[str, Mapping[str, FieldRule]]) -> dict[str, FieldRule]:
    """What all endpoints that generate have in a table."""
    first, *others = (tables[model.schema_key] for model in GENERATING)
    return {
        name: note
        for name, note in first.items()
        if all(other.get(name) == note for other in others)
    }


def place_rows(
    place: str, without: Mapping[str, Mapping[str, FieldRule]] | None = None
) -> list[Row]:
    """What a place accepts without effect and what it refuses."""
    rows: list[Row] = []
    for status, tables in (("no effect", NO_EFFECT), ("refused", UNSUPPORTED)):
        left = without[status] if without else {}
        table = tables.get(place, {})
        rows += note_rows({n: note for n, note in table.items() if n not in left}, status)
    return rows


def tables() -> dict[str, list[Row]]:
    """The rows of every table of the page."""
    common = {"no effect": shared(NO_EFFECT), "refused": shared(UNSUPPORTED)}
    made = {"shared": model_rows(SamplingFields)}
    for status, table in common.items():
        made["shared"] += note_rows(table, status)
    for model in GENERATING:
        made[model.schema_key] = model_rows(model, SamplingFields.model_fields)
        made[model.schema_key] += place_rows(model.schema_key, common)
    for model in OTHERS:
        made[model.schema_key] = model_rows(model) + place_rows(model.schema_key)
    for options in (StreamOptions, ResponsesStreamOptions):
        made[options.schema_key] = model_rows(options) + place_rows(options.schema_key)
    endpoints = {model.schema_key for model in ENDPOINTS}
    for place in {**NO_EFFECT, **UNSUPPORTED}:
        if place not in endpoints and place not in made:
            made[place] = place_rows(place)
    return made


def written(page: str) -> str:
    """The page with its tables as the models are now."""
    made = {name: [f"| `{n}` | {what} | {how} |" for n, what, how in rows]
            for name, rows in tables().items()}  # fmt: skip

    def table(match: re.Match[str]) -> str:
        return "\n".join([match[1], HEAD, *made[match[2]], match[3]])

    return re.sub(r"(<!-- table (\S+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
