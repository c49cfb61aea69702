"""Responses in one common form, from whole bodies or from the chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class AnswerResult:
    """One answer. logprobs: (token, its value, the top tokens' values); calls: (name,
    arguments); steps: in a stream, each verify step's report."""

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

    choices: list[AnswerResult]
    usage: tuple[int, int, int]
    report: dict[str, Any]


def whole(body: dict[str, Any]) -> Outcome:
    """Convert a whole response."""
    answers: list[AnswerResult] = []
    for place, choice in enumerate(body["choices"]):
        assert choice["index"] == place
        answer = AnswerResult(
            finish_reason=choice["finish_reason"], stop_reason=choice["stop_reason"]
        )
        message = choice.get("message")
        if message is None:
            answer.text = choice["text"]
        else:
            assert message["role"] == "assistant"
            answer.text = message["content"] or ""
            answer.reasoning = message.get("reasoning_content") or ""
            for call in message.get("tool_calls") or []:
                assert call["id"]
                answer.calls.append((call["function"]["name"], call["function"]["arguments"]))
        answer.prompt_logprobs = choice.get("prompt_logprobs", body.get("prompt_logprobs"))
        answer.prompt_ids = body.get("prompt_token_ids")
        _common(answer, choice)
        answers.append(answer)
    return Outcome(answers, _usage(body["usage"]), body.get("speculation") or {})


def streamed(chunks: Iterable[dict[str, Any]]) -> Outcome:
    """Assemble a streamed response, whose usage must follow the last choice."""
    answers: dict[int, AnswerResult] = {}
    usage, report, prompt, ids = None, {}, None, set[str]()
    for chunk in chunks:
        assert usage is None, "nothing follows the usage"
        ids.add(chunk["id"])
        if chunk.get("usage") is not None:
            assert not chunk["choices"]
            usage, report = _usage(chunk["usage"]), chunk["speculation"]
        prompt = prompt or chunk.get("prompt_token_ids")
        for choice in chunk["choices"]:
            first = choice["index"] not in answers
            answer = answers.setdefault(choice["index"], AnswerResult())
            assert answer.finish_reason is None, "nothing follows an answer's end"
            answer.finish_reason, answer.stop_reason = (
                choice["finish_reason"],
                choice.get("stop_reason"),
            )
            if "text" in choice:
                answer.text += choice["text"]
            else:
                _delta(answer, choice["delta"], first)
            _common(answer, choice)
            answer.steps.append(choice["step"])
    assert usage is not None, "the stream did not end with its usage"
    assert len(ids) == 1
    for answer in answers.values():
        assert answer.finish_reason
        answer.prompt_ids = answer.prompt_ids or prompt
    return Outcome([answers[i] for i in range(len(answers))], usage, report)


def _delta(answer: AnswerResult, delta: dict[str, Any], first: bool) -> None:
    assert delta.get("role") == ("assistant" if first else None)
    content, reasoning = delta.get("content"), delta.get("reasoning_content")
    assert not (reasoning and (answer.text or answer.calls)), (
        "reasoning after the answer's beginning"
    )
    answer.text += content or ""
    answer.reasoning += reasoning or ""
    for call in delta.get("tool_calls") or []:
        function = call["function"]
        if call["index"] == len(answer.calls):
            assert call["id"]
            assert call["type"] == "function"
            answer.calls.append((function["name"], function["arguments"]))
        else:
            assert call["index"] == len(answer.calls) - 1, "calls come one after another"
            assert call.get("id") is None
            assert function.get("name") is None
            name, arguments = answer.calls[-1]
            answer.calls[-1] = name, arguments + function["arguments"]


def _common(answer: AnswerResult, choice: dict[str, Any]) -> None:
    """Add the fields that choices have in both whole and streamed responses."""
    answer.token_ids += choice.get("token_ids") or []
    answer.prompt_ids = choice.get("prompt_token_ids") or answer.prompt_ids
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            assert bytes(entry["bytes"]).decode("utf-8", "replace") == entry["token"]
            top = {best["token"]: best["logprob"] for best in entry["top_logprobs"]}
            answer.logprobs.append((entry["token"], entry["logprob"], top))
        return
    columns = (logprobs[n] for n in ("tokens", "token_logprobs", "top_logprobs"))
    answer.logprobs += [(t, value, top or {}) for t, value, top in zip(*columns, strict=True)]
    answer.offsets += logprobs["text_offset"]


def _usage(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]
