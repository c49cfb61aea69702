"""The soak's requests and checks of their answers.

A request is bytes and a check: `judge(status, body)` raises WrongAnswer for an invalid answer.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any, NamedTuple

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WORDS = ("pear", "apple", "fig", "kiwi", "plum", "lime", "date", "melon", "grape", "peach", "olive")
LONG_PROMPT = 6000
"""Words; three times the context of the demo models."""
KNOWN_BEGINNINGS = 24
"""Beginnings of `known` prompts: more than a small pool holds."""


class WrongAnswer(Exception):
    """An answer that does not fit its request."""


Judge = Callable[[int, bytes], None]


class Sent(NamedTuple):
    """kind: the request's name in the report; parts: its bytes, the last of which may not be sent;
    good: whether it must be answered in full."""

    kind: str
    parts: tuple[bytes, ...]
    judge: Judge
    good: bool = False


def http(
    path: str,
    body: bytes | None,
    *headers: str,
    method: str = "",
    kind: str = "application/json",
    length: int | None = None,
) -> bytes:
    """Return the bytes of an HTTP request. length: a false Content-Length."""
    lines = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", "Host: localhost"]
    lines += headers
    if body is not None:
        lines += [f"Content-Type: {kind}"] if kind else []
        lines += [f"Content-Length: {len(body) if length is None else length}"]
    return "\r\n".join((*lines, "", "")).encode() + (body or b"")


def status(*expected: int) -> Judge:
    """Return a check for any of these statuses, and for an error object if the body is JSON."""

    def judge(code: int, body: bytes) -> None:
        if code not in expected:
            raise WrongAnswer(
                f"status {code}, not {' or '.join(map(str, expected))}: {body[:200]!r}"
            )
        if code >= 400 and body.startswith(b"{"):
            error = json.loads(body)["error"]
            if not error["message"] or not error["type"]:
                raise WrongAnswer(f"an error without a sentence: {body[:200]!r}")

    return judge


# Well-formed requests


def good(rng: random.Random) -> Sent:
    """Return a request with some random features that must be answered in full."""
    path = rng.choices((CHAT, COMPLETIONS, RESPONSES), (5, 4, 2))[0]
    max_tokens = rng.choice((8, 12, 16, 24, 32))
    text = f"Sort these words: {' '.join(rng.sample(WORDS, rng.randint(2, 6)))}"
    streams = rng.random() < 0.6
    fields: dict[str, Any] = {"stream": streams, "temperature": rng.choice((0, 0, 0.7, 1.2))}
    checks: dict[str, Any] = {"max_tokens": max_tokens, "n": 1, "streams": streams}
    if path == RESPONSES:
        fields |= {"input": text, "max_output_tokens": max(16, max_tokens)}
        checks["max_tokens"] = max(16, max_tokens)
    else:
        fields |= {"max_tokens": max_tokens}
        fields |= (
            {"prompt": text}
            if path == COMPLETIONS
            else {"messages": [{"role": "user", "content": text}]}
        )
        for feature in rng.sample(FEATURES, rng.randint(0, 2)):
            feature(rng, path, fields, checks)
    judge = judge_response if path == RESPONSES else judge_choices
    kind = f"{path.removeprefix('/v1/')}, {'streamed' if streams else 'whole'}"
    body = json.dumps(fields).encode()
    return Sent(kind, (http(path, body),), lambda s, b: judge(s, b, checks), good=True)


def known(number: int) -> Sent:
    """Return request `number` of a fixed list, whose answer is the same every time: greedy or with
    a seed, and with one of a few long beginnings."""
    rng = random.Random(f"known {number}")
    beginning = random.Random(f"beginning {number % KNOWN_BEGINNINGS}")
    text = " ".join(beginning.choices(WORDS, k=beginning.randrange(40, 160)))
    fields = {
        "prompt": f"{text} Sort these words: {' '.join(rng.sample(WORDS, rng.randint(2, 6)))}",
        "max_tokens": rng.choice((16, 32, 64)),
        "temperature": rng.choice((0, 0.8)),
        "seed": rng.randrange(1000),
        "ignore_eos": True,
    }
    return Sent("known", (http(COMPLETIONS, json.dumps(fields).encode()),), status(200), good=True)


def with_grammar() -> Sent:
    """Return a request with a grammar, which starts what only grammars need."""
    fields = {"prompt": "pear", "max_tokens": 8, "structured_outputs": {"choice": WORDS[:4]}}
    return Sent("grammar", (http(COMPLETIONS, json.dumps(fields).encode()),), status(200))


def text_of(body: bytes) -> str:
    """Return the text of a completion."""
    return json.loads(body)["choices"][0]["text"]


def same_text(text: str) -> Judge:
    """Return a check that an answer is a completion with this text."""

    def judge(code: int, body: bytes) -> None:
        status(200)(code, body)
        if text_of(body) != text:
            raise WrongAnswer(f"{text_of(body)!r} is not the lone request's answer {text!r}")

    return judge


Feature = Callable[[random.Random, str, dict[str, Any], dict[str, Any]], None]


def _several(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    fields["n"] = checks["n"] = rng.randint(2, 3)


def _stop(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    if "choices" not in checks:  # a stop string may cut a choice short
        fields["stop"] = rng.sample((" ", "e", ",", "word", "\n"), 2)


def _logprobs(
    rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]
) -> None:
    checks["logprobs"] = True
    fields |= {"logprobs": 2} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}


def _json(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    if "structured_outputs" not in fields:
        fields["response_format"] = {"type": "json_object"}


def _choice(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    if path == COMPLETIONS and "response_format" not in fields and "stop" not in fields:
        checks["choices"] = WORDS[:4]
        fields["structured_outputs"] = {"choice": WORDS[:4]}


def _penalties(rng: random.Random, path: str, fields: dict[str, Any], checks: Any) -> None:
    fields |= {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


def _seed(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    fields |= {"seed": rng.randint(0, 9), "top_p": 0.9, "top_k": 40, "min_p": 0.01}


def _bias(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    fields["logit_bias"] = {str(rng.randint(300, 900)): rng.choice((-5, 2))}


def _plain(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    fields["speculation"] = rng.choice((False, {"method": "ngram", "num_drafts": 3}))


def _usage(rng: random.Random, path: str, fields: dict[str, Any], checks: dict[str, Any]) -> None:
    if fields["stream"]:
        fields |= {"stream_options": {"include_usage": True}, "include_speculation": True}
        checks["usage"] = True


FEATURES: tuple[Feature, ...] = (
    _several, _stop, _logprobs, _json, _choice, _penalties, _seed, _bias, _plain, _usage,
)  # fmt: skip


def judge_choices(code: int, body: bytes, checks: dict[str, Any]) -> None:
    """Check the answer of a chat or completion, whole or streamed."""
    status(200)(code, body)
    texts, reasons = dict.fromkeys(range(checks["n"]), ""), dict[int, str]()
    usage, logprobs = None, 0
    for part in events(body) if checks["streams"] else [json.loads(body)]:
        if "error" in part:
            raise WrongAnswer(f"an error: {part['error']}")
        usage = part.get("usage") or usage
        for choice in part["choices"]:
            index, piece = choice["index"], choice.get("delta") or choice.get("message") or choice
            texts[index] += piece.get("content") or piece.get("text") or ""
            logprobs += bool(choice.get("logprobs"))
            if choice["finish_reason"] is not None:
                if index in reasons:
                    raise WrongAnswer(f"answer {index} ends twice")
                reasons[index] = choice["finish_reason"]
    if reasons.keys() != set(range(checks["n"])):
        raise WrongAnswer(f"of {checks['n']} answers only {sorted(reasons)} have ended")
    if not set(reasons.values()) <= {"stop", "length"}:
        raise WrongAnswer(f"answers ended by {reasons}")
    if usage is None and (checks.get("usage") or not checks["streams"]):
        raise WrongAnswer("no usage")
    if (
        usage is not None
        and not 0 < usage["completion_tokens"] <= checks["max_tokens"] * checks["n"]
    ):
        raise WrongAnswer(f"{usage['completion_tokens']} tokens of at most {checks['most']}")
    if checks.get("logprobs") and not logprobs:
        raise WrongAnswer("no log probabilities")
    for index, text in texts.items():
        if "choices" in checks and reasons[index] == "stop" and text not in checks["choices"]:
            raise WrongAnswer(f"{text!r} is none of the choices")


def judge_response(code: int, body: bytes, checks: dict[str, Any]) -> None:
    """Check the answer of /v1/responses, whole or streamed."""
    status(200)(code, body)
    if not checks["streams"]:
        response = json.loads(body)
    else:
        events = [json.loads(data) for data in re.findall(rb"^data: (\{.*)$", body, re.M)]
        if [event["sequence_number"] for event in events] != list(range(len(events))):
            raise WrongAnswer("the events are not numbered in order")
        if events[-1]["type"] not in ("response.completed", "response.incomplete"):
            raise WrongAnswer(f"a stream that ends with {events[-1]['type']}")
        response = events[-1]["response"]
    if response["status"] not in ("completed", "incomplete"):
        raise WrongAnswer(f"a response that is {response['status']}")
    if not 0 < response["usage"]["output_tokens"] <= checks["max_tokens"]:
        raise WrongAnswer(
            f"{response['usage']['output_tokens']} tokens of at most {checks['most']}"
        )


def events(body: bytes) -> list[Any]:
    """Return the chunks of a stream, which must end with [DONE]."""
    lines = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        raise WrongAnswer(f"a stream that ends with {body[-100:]!r}")
    return [json.loads(line) for line in lines[:-1]]


# Malformed and oversized requests


def bad_body(rng: random.Random) -> Sent:
    """Return a request with an invalid body; the answer must be an error."""
    message = [{"role": "user", "content": "hi"}]
    bodies: tuple[Any, ...] = (
        b"", b"{", b"null", b"[]", b"nonsense", b"\xff\xfe\x00", b"[" * 100_000, b'{"a":NaN}',
        b'{"messages": [{"role": "user", "content": "\\ud800"', b'{"max_tokens": 1e999}',
        {}, {"messages": []}, {"messages": "hi"}, {"messages": [1]},
        {"messages": [{"role": "king", "content": "hi"}]},
        {"messages": message, "max_tokens": "many"}, {"messages": message, "temperature": -1},
        {"messages": message, "n": 10_000}, {"messages": message, "logprobs": 3},
        {"messages": message, "unknown": 1}, {"messages": message, "stop": [""]},
        {"messages": message, "logit_bias": {"x": 1}}, {"messages": message, "seed": 1.5},
        {"messages": message, "stream_options": {"include_usage": True}},
        {"messages": message, "tools": [{}]}, {"messages": message, "max_tokens": 10**9},
        {"messages": message, "structured_outputs": {"regex": "(((("}},
        {"messages": message, "structured_outputs": {"grammar": "start: nowhere"}},
        {"messages": message, "response_format": {"type": "json_schema"}},
    )  # fmt: skip
    body = rng.choice(bodies)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Sent("bad body", (http(CHAT, sent),), status(400))


def bad_http(rng: random.Random) -> Sent:
    """Return malformed HTTP; the answer must be an error or a closed connection."""
    body = b'{"prompt": "hi", "max_tokens": 4}'
    choices = (
        (b"NONSENSE\r\n\r\n", (400, 0)),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", (400, 0)),
        (b"POST / HTTP/9.9\r\n\r\n", (400, 404, 405, 0)),
        (http(COMPLETIONS, body, length=-1), (400, 0)),
        (http(COMPLETIONS, body).replace(b"Content-Length: ", b"Content-Length: x"), (400, 0)),
        (http(COMPLETIONS, body, "Content-Length: 3"), (400, 0)),
        (http(COMPLETIONS, body, kind="text/plain"), (200, 415, 429)),
        (http(COMPLETIONS, body, "X-Long: " + "x" * 70_000), (200, 400, 429, 431, 0)),
        (http(COMPLETIONS, body, method="BREW"), (400, 405, 0)),
        (http("/v1/nowhere", body), (404,)),
        (http(COMPLETIONS, None), (405,)),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
            b"\r\nzz\r\n",
            (400, 0),
        ),
    )
    sent, expected = rng.choice(choices)
    return Sent("bad HTTP", (sent,), status(*expected))


def oversized(rng: random.Random) -> Sent:
    """Return a request whose prompt exceeds the context or whose body exceeds the limit."""
    text = " ".join(rng.choices(WORDS, k=LONG_PROMPT))
    if rng.random() < 0.6:
        body = json.dumps({"messages": [{"role": "user", "content": text}], "stream": True})
        return Sent("oversized prompt", (http(CHAT, body.encode()),), status(400))
    if rng.random() < 0.5:
        head = http(COMPLETIONS, b"", length=1 << 30)
        return Sent("oversized body", (head,), status(413))
    head = http(COMPLETIONS, None, "Transfer-Encoding: chunked", "Content-Type: application/json",
                method="POST")  # fmt: skip
    chunk = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
    return Sent("oversized body", (head, *[chunk] * 3), status(413, 0))


def half(rng: random.Random) -> Sent:
    """Return a truncated request, whose client disconnects."""
    request_bytes = good(rng).parts[0]
    cut = rng.randrange(1, len(request_bytes))
    return Sent("half a request", (request_bytes[:cut], b""), status())


def read(rng: random.Random) -> Sent:
    """Return a request for the server's state, or for tokens of a text."""
    path = rng.choice(("/health", "/v1/models", "/version", "/", "/metrics"))
    if rng.random() < 0.4:
        body = b'{"prompt": "Sort these words: pear apple fig"}'
        return Sent("look", (http("/tokenize", body),), status(200))
    return Sent("look", (http(path, None),), status(200))
