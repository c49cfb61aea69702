"""Write the tables of fields in docs/api.md from the request models.

    python scripts/api_page.py

A table is between `<!-- table NAME -->` and `<!-- end -->`; the rest of the page is written by
hand. A test fails if the page and the models differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from strobe.server.anthropic.protocol.messages_request import MessagesRequest
from strobe.server.app import POSTS
from strobe.server.batches.endpoints import CREATES
from strobe.server.ollama.protocol.requests import OPTIONS
from strobe.server.openai.protocol.chat_request import ChatCompletionRequest
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.server.openai.protocol.responses_request import ResponsesRequest, ResponsesStreamOptions
from strobe.server.schema.base import RequestModel, StreamOptions
from strobe.server.schema.sampling_fields import SamplingFields
from strobe.server.schema.unsupported_fields import NO_EFFECT, UNSUPPORTED, FieldRule

PAGE = Path(__file__).parents[1] / "docs" / "api.md"

GENERATING: tuple[type[RequestModel], ...] = (
    ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest
)  # fmt: skip
ENDPOINTS = [post.request_model for post in (*POSTS.values(), *CREATES.values())]
OTHER_ENDPOINTS = [model for model in ENDPOINTS if model not in (*GENERATING, InfillRequest)]

HEAD = "| field | effect, or reason | status |\n|---|---|---|"

Row = tuple[str, str, str]


def model_rows(model: type[RequestModel], without: Iterable[str] = ()) -> list[Row]:
    """Return a row for each field of a request, in the order of the code."""
    fields = {name: f for name, f in model.model_fields.items() if name not in without}
    rows: list[Row] = []
    for name, field in fields.items():
        status = "supported, required" if field.is_required() else "supported"
        rows.append((name, (field.description or "").rstrip("."), status))
    return rows


def option_rows() -> list[Row]:
    """Return a row for each of Ollama's options that a chat request has."""
    rows: list[Row] = []
    for chat_name in (*OPTIONS, "include_speculation"):
        name = OPTIONS.get(chat_name, chat_name)
        effect = (ChatCompletionRequest.model_fields[chat_name].description or "").rstrip(".")
        if name != chat_name:
            effect = f"Same as `{chat_name}`"
        rows.append((name, effect, "supported"))
    return rows


def rule_rows(table: Mapping[str, FieldRule], status: str) -> list[Row]:
    """Return a row for each ignored or rejected field, with the values accepted silently."""
    rows: list[Row] = []
    for name, rule in table.items():
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in rule.neutral_values)
        accepted = f" (except {neutral})" if neutral else ""
        rows.append((name, rule.reason, f"{status}{accepted if status == 'rejected' else ''}"))
    return rows


def shared(tables: Mapping[str, Mapping[str, FieldRule]]) -> dict[str, FieldRule]:
    """Return the rules that all generating endpoints share."""
    first, *other_tables = (tables[model.schema_key] for model in GENERATING)
    return {
        name: rule
        for name, rule in first.items()
        if all(table.get(name) == rule for table in other_tables)
    }


def place_rows(
    place: str, without: Mapping[str, Mapping[str, FieldRule]] | None = None
) -> list[Row]:
    """Return rows for the fields that an endpoint or object ignores or rejects."""
    rows: list[Row] = []
    for status, tables in (("ignored", NO_EFFECT), ("rejected", UNSUPPORTED)):
        excluded = without[status] if without else {}
        table = tables.get(place, {})
        rows += rule_rows({n: rule for n, rule in table.items() if n not in excluded}, status)
    return rows


def tables() -> dict[str, list[Row]]:
    """Return the rows of every table of the page."""
    common = {"ignored": shared(NO_EFFECT), "rejected": shared(UNSUPPORTED)}
    rows_by_table = {"shared": model_rows(SamplingFields)}
    for status, table in common.items():
        rows_by_table["shared"] += rule_rows(table, status)
    for model in GENERATING:
        rows_by_table[model.schema_key] = model_rows(model, SamplingFields.model_fields)
        rows_by_table[model.schema_key] += place_rows(model.schema_key, common)
    rows_by_table["infill"] = model_rows(InfillRequest, SamplingFields.model_fields)
    rows_by_table["infill"] += place_rows("infill", common)
    for model in OTHER_ENDPOINTS:
        rows_by_table[model.schema_key] = model_rows(model) + place_rows(model.schema_key)
    for options in (StreamOptions, ResponsesStreamOptions):
        rows_by_table[options.schema_key] = model_rows(options) + place_rows(options.schema_key)
    rows_by_table["options"] = option_rows() + place_rows("options")
    endpoints = {model.schema_key for model in ENDPOINTS}
    for place in {**NO_EFFECT, **UNSUPPORTED}:
        if place not in endpoints and place not in rows_by_table:
            rows_by_table[place] = place_rows(place)
    return rows_by_table


def with_tables(page: str) -> str:
    """Return the page with its tables regenerated from the models."""
    lines = {
        name: [f"| `{field}` | {description} | {status} |" for field, description, status in rows]
        for name, rows in tables().items()
    }

    def table(match: re.Match[str]) -> str:
        return "\n".join([match[1], HEAD, *lines[match[2]], match[3]])

    return re.sub(r"(<!-- table (\S+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
