"""The structured output of a chat: the request's constraint, tool calls and limited reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strobe.server.generation.request import GenerationRequest
from strobe.server.parsers.format_protocols import Tool
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving


def structured_outputs(
    serving: Serving, request: GenerationRequest, tools: list[Tool], prompt: str
) -> Mapping[str, Any] | None:
    """Return the chat's structured output, None for a free answer. tools: the request's. Raises
    FieldError."""
    choice = request.toolbox.choice
    sampling = request.sampling
    max_thinking = sampling.thinking_budget
    parallel = request.allows_several_calls
    reasoning = serving.formats.reasoning
    if max_thinking is not None and tools and reasoning is not None and reasoning.whole_answer:
        budget = request.names["thinking_token_budget"]
        raise FieldError(
            f"{budget} is {max_thinking} together with tools, but this model calls them within its "
            "reasoning; leave one of them out.",
            budget,
        )
    if choice.forced:
        chosen = [tool for tool in tools if choice.name in (None, tool.name)]
        structured = serving.call_grammar(chosen, parallel=parallel)
        if serving.formats.tools is not None and serving.formats.tools.whole_answer:
            return structured
        return serving.constraint(structured, prompt, sampling)
    structured = serving.with_token_ids(sampling.structured_outputs)
    if structured is not None:
        structured = serving.allow_tool_calls(structured, tools, parallel=parallel)
    return serving.constraint(structured, prompt, sampling)


def schema_warnings(
    structured: Mapping[str, Any] | None, request: GenerationRequest, tools: list[Tool]
) -> list[str]:
    """Return a sentence for each keyword of the tools' schemas that their grammar does not
    enforce. structured: as `structured_outputs` returned it."""
    choice = request.toolbox.choice
    if structured is None or not (choice.forced or "alternative" in structured):
        return []
    return [
        f"The schema of the function {tool.name!r} has the keyword {name}, which is not enforced."
        for tool in tools
        if choice.name in (None, tool.name)
        for name in tool.unenforced()
    ]
