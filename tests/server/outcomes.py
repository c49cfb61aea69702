"""What a client gets, in one form: whole, or put together from the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Said:
    """One answer. logprobs: (token, its value, the best ones' values by token); calls: (name,
    arguments); steps: of a stream, what each verify step reported."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list[int])
    prompt_ids: list[int] | None = None
    logprobs: list[tuple[str, float | None, dict[str, float]]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[Any] | None = None
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass
class Outcome:
    """A whole response. usage: (prompt, completion, total) tokens."""

    choices: list[Said]
    usage: tuple[int, int, int]
    report: dict[str, Any]


def whole(body: dict[str, Any]) -> Outcome:
    """A response that came as one object."""
    said: list[Said] = []
    for place, choice in enumerate(body["choices"]):
        assert choice["index"] == place
        one = Said(finish_reason=choice["finish_reason"], stop_reason=choice["stop_reason"])
        message = choice.get("message")
        if message is None:
            one.text = choice["text"]
        else:
            assert message["role"] == "assistant"
            one.text = message["content"] or ""
            one.reasoning = message.get("reasoning_content") or ""
            for call in message.get("tool_calls") or []:
                assert call["id"]
                one.calls.append((call["function"]["name"], call["function"]["arguments"]))
        one.prompt_logprobs = choice.get("prompt_logprobs", body.get("prompt_logprobs"))
        one.prompt_ids = body.get("prompt_token_ids")
        _common(one, choice)
        said.append(one)
    return Outcome(said, _usage(body["usage"]), body.get("speculation") or {})


def streamed(chunks: Iterable[dict[str, Any]]) -> Outcome:
    """A response that came in chunks, the usage behind the last choice."""
    said: dict[int, Said] = {}
    usage, report, prompt, ids = None, {}, None, set[str]()
    for chunk in chunks:
        assert usage is None, "nothing comes behind the usage"
        ids.add(chunk["id"])
        if chunk.get("usage") is not None:
            assert not chunk["choices"]
            usage, report = _usage(chunk["usage"]), chunk["speculation"]
        prompt = prompt or chunk.get("prompt_token_ids")
        for choice in chunk["choices"]:
            first = choice["index"] not in said
            one = said.setdefault(choice["index"], Said())
            assert one.finish_reason is None, "nothing comes behind an answer's end"
            one.finish_reason, one.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            if "text" in choice:
                one.text += choice["text"]
            else:
                _delta(one, choice["delta"], first)
            _common(one, choice)
            one.steps.append(choice["step"])
    assert usage is not None, "the stream did not end with its usage"
    assert len(ids) == 1
    for one in said.values():
        assert one.finish_reason
        one.prompt_ids = one.prompt_ids or prompt
    return Outcome([said[i] for i in range(len(said))], usage, report)


def _delta(one: Said, delta: dict[str, Any], first: bool) -> None:
    assert delta.get("role") == ("assistant" if first else None)
    content, reasoning = delta.get("content"), delta.get("reasoning_content")
    assert not (reasoning and (one.text or one.calls)), "reasoning behind the answer's beginning"
    one.text += content or ""
    one.reasoning += reasoning or ""
    for call in delta.get("tool_calls") or []:
        function = call["function"]
        if call["index"] == len(one.calls):
            assert call["id"]
            assert call["type"] == "function"
            one.calls.append((function["name"], function["arguments"]))
        else:
            assert call["index"] == len(one.calls) - 1, "calls come one after another"
            assert call.get("id") is None
            assert function.get("name") is None
            name, arguments = one.calls[-1]
            one.calls[-1] = name, arguments + function["arguments"]


def _common(one: Said, choice: dict[str, Any]) -> None:
    """What a choice says whole and streamed in the same way."""
    one.token_ids += choice.get("token_ids") or []
    one.prompt_ids = choice.get("prompt_token_ids") or one.prompt_ids
    found = choice.get("logprobs")
    if found is None:
        return
    if "content" in found:
        for entry in found["content"]:
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
            top = {best["token"]: best["logprob"] for best in entry["top_logprobs"]}
            one.logprobs.append((entry["token"], entry["logprob"], top))
        return
    columns = (found[n] for n in ("tokens", "token_logprobs", "top_logprobs"))
    one.logprobs += [(t, value, top or {}) for t, value, top in zip(*columns, strict=True)]
    one.offsets += found["text_offset"]


def _usage(given: dict[str, Any]) -> tuple[int, int, int]:
    return given["prompt_tokens"], given["completion_tokens"], given["total_tokens"]
