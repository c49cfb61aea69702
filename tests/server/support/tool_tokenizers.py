"""Tokenizers for the tests of tool grammars: the demo models' with other added tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from strobe import demo_models
from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import TOOL_FORMATS
from tests.server.support.parser_runs import dumps

END, CALL_END = "<|im_end|>", "<|call|>"
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", CALL_END)
GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>')


@dataclass(frozen=True)
class Vocabulary:
    """The demo models' tokenizer, with some added tokens removed and others added."""

    fast: Tokenizer
    guide: LLTokenizer
    added: Mapping[str, int]

    def matcher(self, name: str, tools: Sequence[Tool], **options: Any) -> LLMatcher:
        options = {"parallel": False, "added_tokens": self.added} | options
        matcher = LLMatcher(self.guide, TOOL_FORMATS[name].grammar(tools, **options))
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def accepts(self, matcher: LLMatcher, text: str) -> bool:
        """Whether the masks allow a text, token by token, and its end."""
        matcher = matcher.deep_copy()
        for token in self.fast.encode(text, add_special_tokens=False).ids:
            if not allowed(matcher)[token] or not matcher.consume_token(token):
                return False
        return matcher.is_accepting()


def allowed(matcher: LLMatcher) -> np.ndarray:
    return np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8) > 0


def vocabulary(*more: str, less: Sequence[str] = (), ends: Sequence[str] = (END,)) -> Vocabulary:
    file = Path(demo_models.__file__).parent / "target" / "tokenizer.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    tokens = [token for token in config["added_tokens"] if token["content"] not in less]
    special = dict(tokens[0])
    first = 1 + max(token["id"] for token in tokens)
    tokens += [special | {"id": first + i, "content": text} for i, text in enumerate(more)]
    config["added_tokens"] = tokens
    added = {token["content"]: token["id"] for token in tokens}
    source = json.dumps(config)
    guide = LLTokenizer(source, eos_token=[added[end] for end in ends])
    return Vocabulary(Tokenizer.from_str(source), guide, added)


def render_calls(name: str, *calls: tuple[str, Any]) -> str:
    """Render calls in the chat template's format, or for gpt-oss in the models'."""
    if name == "hermes":
        inner = [
            f'{{"name": "{tool}", "arguments": {dumps(arguments)}}}' for tool, arguments in calls
        ]
        return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in inner)
    if name == "llama3":
        return "; ".join(
            f'{{"name": "{tool}", "parameters": {dumps(arguments)}}}' for tool, arguments in calls
        )
    if name == "gemma4":
        return "".join(
            f"<|tool_call>call:{tool}{gemma4(arguments)}<tool_call|>" for tool, arguments in calls
        )
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{tool} <|constrain|>json"
        f"<|message|>{dumps(arguments)}<|call|>"
        for tool, arguments in calls
    )


def gemma4(value: Any) -> str:
    """Render a value in the format of Gemma 4's chat template."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(gemma4, value))}]"
    if isinstance(value, dict):
        ordered = sorted(value, key=str.lower)
        return f"{{{','.join(f'{key}:{gemma4(value[key])}' for key in ordered)}}}"
    return dumps(value)
