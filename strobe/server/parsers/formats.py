"""The formats of tool calls and of reasoning by name, and their detection in a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from strobe.server.parsers.deepseek import DeepSeek
from strobe.server.parsers.format_protocols import (
    Tool,
    ToolFormat,
)
from strobe.server.parsers.gemma4 import Gemma4Calls
from strobe.server.parsers.gpt_oss import GptOss
from strobe.server.parsers.hermes import Hermes
from strobe.server.parsers.llama3 import Llama3
from strobe.server.parsers.mistral import Mistral
from strobe.server.parsers.qwen3_coder import Qwen3Coder
from strobe.server.parsers.segment import Parser, Plain
from strobe.server.parsers.thinking import ReasoningCalls, ThinkingTags

Format = TypeVar("Format")

_GPT_OSS = GptOss()
_LLAMA3 = Llama3()
_QWEN3_CODER = Qwen3Coder()
_QWEN3 = ThinkingTags(name="qwen3", start="<think>", end="</think>", gap="\n\n", keep_special=False)

TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": Hermes(),
        "llama3": _LLAMA3,
        "llama3_json": _LLAMA3,
        "gpt_oss": _GPT_OSS,
        "openai": _GPT_OSS,
        "qwen3_coder": _QWEN3_CODER,
        "qwen3_xml": _QWEN3_CODER,
        "gemma4": Gemma4Calls(),
        "mistral": Mistral(),
        "deepseek_v3": DeepSeek(name="deepseek_v3", fenced=True),
        "deepseek_v31": DeepSeek(name="deepseek_v31", fenced=False),
    }
)
"""Tool call formats by name. `llama3_json`, `openai` and `qwen3_xml` are vLLM's names of `llama3`,
`gpt_oss` and `qwen3_coder`."""

REASONING_FORMATS: Mapping[str, ThinkingTags | GptOss] = MappingProxyType(
    {
        "qwen3": _QWEN3,
        "deepseek_r1": _QWEN3,
        "gpt_oss": _GPT_OSS,
        "openai_gptoss": _GPT_OSS,
        "gemma4": ThinkingTags(
            name="gemma4", start="<|channel>", end="<channel|>", title="thought"
        ),
        "mistral": ThinkingTags(name="mistral", start="[THINK]", end="[/THINK]"),
    }
)
"""Reasoning formats by name; `openai_gptoss` and `deepseek_r1` are vLLM's names."""


def detect(chat_template: str | None) -> tuple[str | None, str | None]:
    """Return the names of a chat template's tool format and reasoning format, each None if
    unknown."""
    text = (chat_template or "").replace('\\"', '"')
    if "<|channel|>" in text and "<|start|>" in text:
        return "gpt_oss", "gpt_oss"
    if "<|tool_call>" in text and "<tool_call|>" in text and "call:" in text:
        return "gemma4", "gemma4" if "<|channel>" in text and "<channel|>" in text else None
    if "[TOOL_CALLS]" in text:
        return "mistral", "mistral" if "[THINK]" in text and "[/THINK]" in text else None
    tools = None
    # Other families put tags of their own into the same tags.
    if "<tool_call>" in text and "<function=" in text and "<parameter=" in text:
        tools = "qwen3_coder"
    elif "<tool_call>" in text and re.search("[\"']arguments[\"']:", text):
        tools = None if "<function=" in text or "<arg_key>" in text else "hermes"
    elif "<|start_header_id|>" in text and '"parameters":' in text:
        tools = None if "<function=" in text else "llama3"
    elif "<｜tool▁calls▁begin｜>" in text:
        tools = "deepseek_v3" if "```json" in text else "deepseek_v31"
    reasoning = "qwen3" if "<think>" in text and "</think>" in text else None
    return tools, reasoning


def make_parser(
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    tools: Sequence[Tool] | None = (),
    thinking_open: bool = False,
    forced: bool = False,
    whole_calls: bool = False,
) -> Parser:
    """Return a parser for one answer: of its reasoning, then of tool calls in the rest.

    A call's arguments are a JSON object; a call with any other is content. So a call is emitted at
    its end, unless its arguments are certain to be an object: they then come as they arrive.

    tools: the tools that may be called, empty for any; calls of other tools are content. None
    leaves all tool markup in the content. thinking_open: whether the prompt ends inside reasoning
    (`ReasoningFormat.opened_by`). forced: whether the answer follows the grammar of the calls.
    whole_calls: emit every call at its end. Raises ValueError for an unknown name and for
    incompatible formats.
    """
    tool = _named(tool_format, TOOL_FORMATS, "tool")
    reasoning = _named(reasoning_format, REASONING_FORMATS, "reasoning")
    names = {part.name for part in (tool, reasoning) if part is not None}
    if isinstance(tool, GptOss) or isinstance(reasoning, GptOss):
        if len(names) > 1:
            raise ValueError(
                f"The tool format {tool_format} and the reasoning format {reasoning_format} do "
                "not go together; gpt_oss goes with itself only."
            )
        return _GPT_OSS.parser(
            tools if tool is not None else None,
            forced=forced,
            whole_calls=whole_calls,
            thinking_open=thinking_open,
        )
    answer: Parser = Plain()
    calls = None
    if tool is not None and tools is not None:
        answer = tool.parser(tools, forced=forced, whole_calls=whole_calls)
        calls = ReasoningCalls(
            lambda: tool.parser(tools, whole_calls=True), tool.openers, tool.line_openers
        )
    if reasoning is None:
        return answer
    return reasoning.parser(answer, calls, thinking_open=thinking_open)


def _named(name: str | None, formats: Mapping[str, Format], kind: str) -> Format | None:
    if name is not None and name not in formats:
        raise ValueError(f"There is no {kind} format {name!r}; name one of {', '.join(formats)}.")
    return None if name is None else formats[name]
