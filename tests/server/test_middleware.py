"""The middleware: request ids, the access log, keys, stopping, limits, CORS."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from strobe.server.http.access_log import AccessLog, RequestId
from strobe.server.http.guards import (
    AllowedHosts,
    ApiKeyEntry,
    ApiKeyGuard,
    BodyLimit,
    Shutdown,
    ShutdownGuard,
    read_keys,
)
from strobe.server.http.middleware import OPEN_PATHS, MiddlewareSettings, wrap
from strobe.server.openai.error_body import TYPES
from tests.server.support.asgi_client import Answer, call, echo, untouched

make_settings = partial(MiddlewareSettings, max_body_bytes=1 << 10)
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The access log so far, parsed."""
    caplog.set_level(logging.INFO, logger="strobe.access")
    return lambda: [json.loads(r.getMessage()) for r in caplog.records if r.name == "strobe.access"]


class Refusals(list[tuple[int, str]]):
    def __call__(self, status: int, reason: str) -> None:
        self.append((status, reason))


def is_envelope(answer: Answer) -> bool:
    return (
        answer.header("content-type") == "application/json"
        and answer.header("content-length") == str(len(answer.body))
        and list(answer.error) == ["message", "type", "param", "code"]
        and answer.error["type"] == TYPES[answer.status]
    )


# Request ids


@pytest.mark.parametrize("request_id", ["a", "trace/4f-2:{x}~", "x" * 128])
def test_well_formed_request_id_is_kept(request_id: str):
    answer = call(RequestId(echo), headers=[("X-Request-Id", request_id)])
    assert answer.scope["state"]["request_id"] == request_id == answer.header("x-request-id")


@pytest.mark.parametrize("request_id", ["", "x" * 129, "two words", "tab\t", "line\n", "caf\u00e9"])
def test_malformed_request_id_is_replaced(request_id: str):
    answer = call(RequestId(echo), headers=[("X-Request-Id", request_id)])
    two = call(RequestId(echo), headers=[("X-Request-Id", request_id)])
    new_id = answer.scope["state"]["request_id"]
    assert new_id.startswith("req-")
    assert len(new_id) == 36
    assert new_id == answer.header("x-request-id")
    assert new_id != two.header("x-request-id")


def test_repeated_request_ids_are_replaced():
    async def own(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"X-Request-Id", b"handler"), (b"x-other", b"1")]
        await send({"type": "http.response.start", "status": 204, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    answer = call(RequestId(own), headers=[("X-Request-Id", "a"), ("X-Request-Id", "b")])
    assert answer.header("x-request-id") == answer.scope["state"]["request_id"]
    assert answer.header("x-request-id") not in ("a", "b", "handler")
    assert answer.header("x-other") == "1"


# The access log


def test_access_log_omits_query_key_and_text(lines: Lines):
    async def handler(scope: Any, receive: Any, send: Any) -> None:
        scope["state"]["log"] |= {"model": "m", "prompt_tokens": 3, "status": "forged"}
        await echo(scope, receive, send)

    ticks = iter([100.0, 100.25])
    answer = call(
        RequestId(AccessLog(handler, clock=lambda: next(ticks))),
        "/v1/chat/completions",
        query=b"api_key=s3cret",
        headers=[("Authorization", "Bearer s3cret")],
        body=[b"my private ", b"prompt"],
    )
    (line,) = lines()
    assert line.pop("time").endswith("+00:00")
    assert line == {
        "request_id": answer.header("x-request-id"),
        "client": "192.0.2.7:40000",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "duration_ms": 250.0,
        "bytes": len(b"my private prompt"),
        "model": "m",
        "prompt_tokens": 3,
    }


def test_fields_set_by_handler_are_logged(lines: Lines):
    async def handler(scope: Any, receive: Any, send: Any) -> None:
        Request(scope).state.log = {"stream": True, "acceptance_length": 4.5}
        await echo(scope, receive, send)

    call(AccessLog(handler))
    assert (lines()[0]["stream"], lines()[0]["acceptance_length"]) == (True, 4.5)


def test_stream_is_passed_on_unbuffered_and_logged_at_its_end(lines: Lines):
    at_first: list[tuple[int, int]] = []
    answer = Answer({})

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"data: 1\n\n", b"data: 2\n\n"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            at_first.append((len(answer.messages), len(lines())))
        await send({"type": "http.response.body", "body": b""})

    call(wrap(stream, make_settings(cors_origins=("*",))), answer=answer)
    assert at_first == [(2, 0), (3, 0)], "a part was held back, or the line came early"
    assert (lines()[0]["status"], lines()[0]["bytes"]) == (200, 18)


def test_disconnected_client_is_499(lines: Lines):
    heard: list[str] = []

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"abc", "more_body": True})
        heard.extend([(await receive())["type"], (await receive())["type"]])
        await send({"type": "http.response.body", "body": b"to nobody"})

    app = wrap(stream, make_settings(), shutdown=Shutdown())
    for length in (True, False):  # the body limit counts only one of them
        call(app, gone=True, length=length)
    assert heard == ["http.request", "http.disconnect"] * 2
    assert [(line["status"], line["bytes"]) for line in lines()] == [(499, 3), (499, 3)]


def test_disconnect_after_last_part_is_not_499(lines: Lines):
    async def thorough(scope: Any, receive: Any, send: Any) -> None:
        await echo(scope, receive, send)
        assert (await receive())["type"] == "http.disconnect"

    call(AccessLog(thorough))
    assert lines()[0]["status"] == 200


def test_failed_send_after_disconnect_is_499(lines: Lines):
    async def broken(message: Any) -> None:
        raise OSError("closed")

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        except OSError:
            raise ClientDisconnect from None

    async def closed(scope: Any, receive: Any, send: Any) -> None:
        await AccessLog(stream)(scope, receive, broken)

    call(closed)
    assert lines()[0]["status"] == 499
    assert "error" not in lines()[0]


@pytest.mark.parametrize("answered", [True, False])
def test_exception_is_logged_as_500_and_reraised(lines: Lines, answered: bool):
    async def fails(scope: Any, receive: Any, send: Any) -> None:
        if answered:
            await echo(scope, receive, send)
        raise LookupError("my private prompt")

    with pytest.raises(LookupError):
        call(AccessLog(fails))
    assert (lines()[0]["status"], lines()[0]["error"]) == (500, "LookupError")
    assert "private" not in json.dumps(lines())


@pytest.mark.parametrize("start", [True, False])
def test_unfinished_answer_is_500(lines: Lines, start: bool):
    async def forgets(scope: Any, receive: Any, send: Any) -> None:
        if start:
            await send({"type": "http.response.start", "status": 200, "headers": []})

    call(AccessLog(forgets))
    assert lines()[0]["status"] == 500


def test_long_path_is_cut_and_cannot_forge_log_lines(
    lines: Lines, caplog: pytest.LogCaptureFixture
):
    call(AccessLog(echo), '/v1\n{"status": 200}\u2028' + "x" * 1000)
    assert len(lines()[0]["path"]) == 256
    assert caplog.records[-1].getMessage().splitlines() == [caplog.records[-1].getMessage()]


def test_head_request_sends_no_bytes(lines: Lines):
    call(AccessLog(echo), method="HEAD", body=[b"abc"])
    assert lines()[0]["bytes"] == 0


@pytest.mark.parametrize(("path", "level"), [
    ("/health", logging.DEBUG), ("/proxied/metrics", logging.DEBUG), ("/v1/models", logging.INFO),
    ("/proxied/events", logging.DEBUG), ("/page.js", logging.DEBUG),
    ("/", logging.INFO),
])  # fmt: skip
def test_answered_polls_are_logged_at_debug(
    path: str, level: int, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, logger="strobe.access")
    call(AccessLog(echo), path)
    assert [r.levelno for r in caplog.records if r.name == "strobe.access"] == [level]


@pytest.mark.parametrize("path", ["/health", "/events"])
def test_failed_poll_is_logged(path: str, lines: Lines):
    async def refuses(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503})
        await send({"type": "http.response.body"})

    call(AccessLog(refuses), path)
    assert lines()[0]["status"] == 503


@pytest.mark.parametrize(("path", "level"), [
    ("/events", logging.DEBUG), ("/health", logging.INFO),
])  # fmt: skip
def test_closed_page_is_logged_at_debug(path: str, level: int, caplog: pytest.LogCaptureFixture):
    """/events ends only when its page is closed."""

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass

    caplog.set_level(logging.DEBUG, logger="strobe.access")
    call(AccessLog(endless), path, gone=True)
    assert [r.levelno for r in caplog.records if r.name == "strobe.access"] == [level]


# Keys


KEYS = ApiKeyEntry("k-one", "alice", 2), ApiKeyEntry("schl\u00fcssel two")


def keyed(app: Any = echo) -> Any:
    return ApiKeyGuard(app, KEYS, OPEN_PATHS, Refusals())


@pytest.mark.parametrize(
    "value", ["Bearer k-one", "bearer k-one", "BEARER  k-one ", "Bearer schl\u00fcssel two"]
)
def test_any_configured_key_is_accepted(value: str):
    assert call(keyed(), headers=[("Authorization", value)]).status == 200
    key = value.partition(" ")[2]
    assert call(keyed(), headers=[("X-Api-Key", key)]).status == 200
    both = [("Authorization", "Bearer another"), ("X-Api-Key", key)]
    assert call(keyed(), headers=both).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("Authorization", "Bearer")],
        [("Authorization", "Bearer ")],
        [("Authorization", "k-one")],
        [("Authorization", "Basic k-one")],
        [("Authorization", "Bearer k-on")],
        [("Authorization", "Bearer k-one2")],
        [("Authorization", "Bearer k-one, k-one")],
        [("Authorization", "Bearer schlussel two")],
        [("Authorization", "Bearer k-one"), ("Authorization", "Bearer k-one")],
        [("X-Api-Key", "k-on")],
        [("X-Api-Key", "")],
        [("X-Api-Key", "Bearer k-one")],
        [("X-Api-Key", "k-one"), ("X-Api-Key", "k-one")],
    ],
)
def test_missing_or_wrong_key_is_401(headers: list[tuple[str, str]]):
    refused = Refusals()
    answer = call(ApiKeyGuard(untouched, KEYS[:1], OPEN_PATHS, refused), headers=headers)
    assert answer.status == 401
    assert is_envelope(answer)
    assert answer.error["code"] == "invalid_api_key"
    assert answer.header("www-authenticate") == "Bearer"
    assert "k-one" not in answer.body.decode()
    assert refused == [(401, "api_key")]


def test_all_keys_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch):
    pairs: list[tuple[int, int]] = []

    def compare(first: bytes, second: bytes) -> bool:
        pairs.append((len(first), len(second)))
        return first == second

    monkeypatch.setattr("strobe.server.http.guards.hmac.compare_digest", compare)
    for key in ("k-one", "k", "a much longer key than any"):
        call(keyed(), headers=[("Authorization", f"Bearer {key}")])
    assert pairs == [(32, 32)] * 6


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_need_no_key_also_under_a_proxy_prefix(path: str):
    assert call(keyed(), path, method="GET").status == 200
    assert call(keyed(), "/proxy" + path, method="GET", root_path="/proxy").status == 200


@pytest.mark.parametrize(
    ("path", "root_path"),
    [
        ("/health/", ""),
        ("/health/../v1/models", ""),
        ("//health", ""),
        ("/HEALTH", ""),
        ("/v1/models", "/v1"),
        ("/v1x/health", "/v1"),
        ("/health/v1/models", "/health"),
        ("", ""),
    ],
)
def test_paths_resembling_open_paths_need_a_key(path: str, root_path: str):
    assert call(keyed(untouched), path, root_path=root_path).status == 401


def test_requests_above_a_keys_limit_are_429():
    refused, bearer = Refusals(), [("Authorization", "Bearer k-one")]
    app = ApiKeyGuard(echo, KEYS, OPEN_PATHS, refused)
    app.running[KEYS[0]] = 1
    assert call(app, headers=bearer).status == 200
    assert app.running[KEYS[0]] == 1
    app.running[KEYS[0]] = 2
    answer = call(app, headers=bearer)
    assert (answer.status, answer.header("retry-after")) == (429, "1")
    assert "This API key may run 2 requests at once" in answer.error["message"]
    alone = ApiKeyGuard(echo, [ApiKeyEntry("k-one", max_concurrency=1)], OPEN_PATHS, Refusals())
    alone.running[alone.keys[0]] = 1
    assert "may run 1 request at once" in call(alone, headers=bearer).error["message"]
    assert refused == [(429, "api_key_busy")]
    assert call(app, "/health", method="GET", headers=bearer).status == 200
    assert call(app, "/events", method="GET", headers=bearer).status == 200
    assert app.running[KEYS[0]] == 2
    other_key = [("Authorization", "Bearer schl\u00fcssel two")]
    assert call(app, headers=other_key).status == 200


def test_log_has_key_name_but_not_the_key(lines: Lines):
    app = AccessLog(keyed())
    for value in ("Bearer k-one", "Bearer schl\u00fcssel two"):
        call(app, headers=[("Authorization", value)])
    first, second = lines()
    assert first["key"] == "alice"
    assert "key" not in second
    assert "k-one" not in json.dumps(first)


def test_key_file_has_one_key_per_line(tmp_path: Path):
    path = tmp_path / "keys"
    path.write_text("# who may\nalice k-one 2\n\nbob k-two # the other\n")
    assert read_keys(path) == (ApiKeyEntry("k-one", "alice", 2), ApiKeyEntry("k-two", "bob"))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("alice k 2\nk-two\n", "Line 2 of .* is not a name, a key and"),
        ("alice k 0", "Line 1 of"),
        ("alice k many", "Line 1 of"),
        ("alice k 2 3", "Line 1 of"),
        ("# nobody\n", "holds no key; write a line such as"),
    ],
)
def test_malformed_key_file_is_rejected(tmp_path: Path, text: str, sentence: str):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ValueError, match=sentence):
        read_keys(tmp_path / "keys")


def test_preflight_passes_without_a_key():
    assert call(keyed(), method="OPTIONS").status == 200


def test_websocket_is_closed_without_a_key():
    async def run(scope: Any, receive: Any, send: Any) -> None:
        sent: list[dict[str, Any]] = []

        async def keep(message: Any) -> None:
            sent.append(message)

        await keyed(untouched)({**scope, "type": "websocket"}, receive, keep)
        assert sent == [{"type": "websocket.close", "code": 1008}]
        await echo(scope, receive, send)

    assert call(run).status == 200


# Stopping


def test_stopping_server_rejects_new_work_and_answers_reads():
    drain, refused = Shutdown(retry_after=7), Refusals()
    app = ShutdownGuard(echo, drain, refused)
    assert call(app).status == 200
    drain.stopping = True
    answer = call(app)
    assert answer.status == 503
    assert is_envelope(answer)
    assert answer.error["type"] == "service_unavailable"
    assert (answer.header("retry-after"), answer.header("connection")) == ("7", "close")
    assert [call(app, "/health", method=m).status for m in ("GET", "HEAD")] == [200, 200]
    assert refused == [(503, "stopping")]


def test_stopping_server_finishes_running_requests():
    drain = Shutdown()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        drain.stopping = True
        await echo(scope, receive, send)

    assert call(ShutdownGuard(slow, drain, Refusals()), body=[b"abc"]).body == b"abc"


# The body's limit


def test_announced_length_over_limit_is_rejected_unread():
    refused = Refusals()
    answer = call(BodyLimit(untouched, 10, refused), body=[b"x" * 11])
    assert answer.status == 413
    assert is_envelope(answer)
    assert "10 bytes" in answer.error["message"]
    assert (answer.header("connection"), answer.reads) == ("close", 0)
    assert refused == [(413, "body_too_large")]


@pytest.mark.parametrize("length", [True, False])
def test_body_of_exactly_the_limit_passes(length: bool):
    answer = call(BodyLimit(echo, 10, Refusals()), body=[b"12345", b"67890"], length=length)
    assert (answer.status, answer.body) == (200, b"1234567890")


@pytest.mark.parametrize("headers", [[], [("Transfer-Encoding", "chunked")]])
def test_chunked_body_is_cut_at_the_limit(headers: list[tuple[str, str]]):
    refused = Refusals()

    async def forgiving(scope: Any, receive: Any, send: Any) -> None:
        try:
            await echo(scope, receive, send)
        except Exception:  # frameworks turn any error while reading the body into a 400
            await send({"type": "http.response.start", "status": 400, "headers": []})

    # With Transfer-Encoding, a smaller Content-Length is ignored.
    headers = headers and [*headers, ("Content-Length", "4")]
    parts = [b"12345", b"67890", b"1", b"never read"]
    answer = call(BodyLimit(forgiving, 10, refused), body=parts, length=False, headers=headers)
    assert answer.status == 413
    assert is_envelope(answer)
    assert (answer.header("connection"), answer.reads) == ("close", 3)
    assert refused == [(413, "body_too_large")]


def test_body_growing_after_response_began_aborts_it():
    async def eager(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await echo(scope, receive, send)

    with pytest.raises(RuntimeError, match="after the response began"):
        call(BodyLimit(eager, 3, Refusals()), body=[b"1234"], length=False)


@pytest.mark.parametrize("value", ["", "-1", "+5", "1e3", "0x10", "5 5", "\u0665", "9" * 5000])
def test_malformed_length_is_400(value: str):
    refused = Refusals()
    headers = [("Content-Length", value)]
    answer = call(BodyLimit(untouched, 10, refused), headers=headers, length=False)
    assert answer.status == 400
    assert is_envelope(answer)
    assert answer.header("connection") == "close"
    assert refused == [(400, "content_length")]


def test_conflicting_lengths_are_400_and_huge_ones_413():
    two = [("Content-Length", "3"), ("Content-Length", "4")]
    huge = [("Content-Length", "9" * 40)]
    app = BodyLimit(untouched, 10, Refusals())
    assert call(app, headers=two, length=False).status == 400
    assert call(app, headers=huge, length=False).status == 413


# Hosts


def host_status(*hosts: str, **settings: Any) -> int:
    app = wrap(echo, make_settings(**settings))
    return call(app, headers=[("Host", host) for host in hosts]).status


LOOPBACK = ["localhost", "LocalHost:80", "localhost.", "127.0.0.1:8000", "127.9.8.7", "[::1]:8000"]
OTHERS = ["evil.example", "localhost.evil.example", "evil.example:8000", "192.0.2.1", "[::2]", "0"]


@pytest.mark.parametrize("listens_on", ["127.0.0.1", "127.0.0.2", "::1"])
@pytest.mark.parametrize("host", [*LOOPBACK, "[0:0:0:0:0:0:0:1]"])
def test_loopback_server_accepts_loopback_hosts(host: str, listens_on: str):
    assert host_status(host, listens_on=listens_on) == 200


@pytest.mark.parametrize("host", OTHERS)
def test_loopback_server_rejects_other_hosts(host: str):
    refused = Refusals()
    app = wrap(untouched, make_settings(listens_on="127.0.0.1"), on_reject=refused)
    for path in ("/v1/completions", "/health"):
        answer = call(app, path, headers=[("Host", host)])
        assert answer.status == 421
        assert is_envelope(answer)
        assert "--allowed-hosts" in answer.error["message"]
        assert host.split(":")[0].strip("[") in answer.error["message"]
    assert refused == [(421, "host")] * 2


@pytest.mark.parametrize(
    "host", ["", ":80", "a b", "http://localhost", "localhost/", "[::1", "[x]"]
)
def test_malformed_host_is_400(host: str):
    app = wrap(untouched, make_settings(listens_on="127.0.0.1"))
    answer = call(app, headers=[("Host", host)])
    assert answer.status == 400
    assert repr(host) in answer.error["message"]


def test_repeated_or_missing_host_is_400():
    app = AllowedHosts(untouched, (), True, Refusals())
    two = call(app, headers=[("Host", "localhost"), ("Host", "evil.example")])
    assert (two.status, "sent 2 times" in two.error["message"]) == (400, True)
    absent = Answer({})

    async def without(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "headers": []}, receive, send)

    call(without, answer=absent)
    assert (absent.status, "sent 0 times" in absent.error["message"]) == (400, True)


@pytest.mark.parametrize("host", [*LOOPBACK, *OTHERS, ""])
def test_network_server_accepts_any_host(host: str):
    assert host_status(host, listens_on="0.0.0.0") == 200
    assert host_status(host, listens_on="192.0.2.1", allowed_hosts=("a.example", "*")) == 200
    assert host_status(host, listens_on="127.0.0.1", allowed_hosts=("*",)) == 200


@pytest.mark.parametrize("allowed", ["strobe.example", "Strobe.Example.", "2001:db8::1"])
def test_allowed_hosts_are_accepted(allowed: str):
    host = "[2001:db8:0::1]:80" if ":" in allowed else "strobe.example:80"
    for listens_on, loopback in (("0.0.0.0", 421), ("127.0.0.1", 200)):
        settings = {"listens_on": listens_on, "allowed_hosts": (allowed, "other")}
        assert host_status(host, **settings) == 200
        assert host_status("localhost", **settings) == loopback
        assert host_status("evil.example", **settings) == 421


# All middleware together


def test_rejection_has_id_log_line_and_cors_headers(lines: Lines):
    settings = make_settings(api_keys=(ApiKeyEntry("k"),), cors_origins=("https://a.example",))
    refused = Refusals()
    app = wrap(untouched, settings, on_reject=refused)
    answer = call(app, headers=[("Origin", "https://a.example")])
    assert answer.status == 401
    assert answer.header("access-control-allow-origin") == "https://a.example"
    assert "X-Request-Id" in (answer.header("access-control-expose-headers") or "")
    assert lines()[0]["request_id"] == answer.header("x-request-id")
    assert lines()[0]["status"] == 401
    assert refused == [(401, "api_key")]


def test_browser_preflight_needs_no_key():
    settings = make_settings(api_keys=(ApiKeyEntry("k"),), cors_origins=("https://a.example",))
    preflight = [
        ("Origin", "https://a.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization, content-type, x-stainless-os"),
    ]
    answer = call(wrap(untouched, settings), method="OPTIONS", headers=preflight)
    assert answer.status == 200
    assert answer.header("access-control-allow-headers") == preflight[2][1]
    other_origin = [("Origin", "https://b.example"), *preflight[1:]]
    assert call(wrap(untouched, settings), method="OPTIONS", headers=other_origin).status == 400


def test_defaults_have_no_key_cors_or_shutdown_checks():
    answer = call(wrap(echo, make_settings()), headers=[("Origin", "https://a.example")])
    assert answer.status == 200
    assert answer.header("access-control-allow-origin") is None


def test_key_is_checked_before_shutdown_and_body():
    settings = make_settings(api_keys=(ApiKeyEntry("k"),), max_body_bytes=3)
    app = wrap(untouched, settings, shutdown=Shutdown(stopping=True))
    key = [("Authorization", "Bearer k")]
    assert call(app, body=[b"1234"]).status == 401
    assert call(app, body=[b"1234"], headers=key).status == 503


def test_access_log_can_be_disabled(lines: Lines):
    assert call(wrap(echo, make_settings(access_log=False))).status == 200
    assert lines() == []


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"api_keys": (ApiKeyEntry("good"), ApiKeyEntry(""))}, "API key 2 is empty"),
        ({"api_keys": (ApiKeyEntry(" padded"),)}, "API key 1"),
        ({"api_keys": (ApiKeyEntry("two\nlines"),)}, "API key 1"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"allowed_hosts": ("a.example:80",)}, "a.example:80"),
        ({"allowed_hosts": ("http://a.example",)}, "http://a.example"),
        ({"allowed_hosts": ("a", "")}, "The allowed host ''"),
        ({"cors_origins": ("https://a.example/",)}, "https://a.example/"),
        ({"cors_origins": ("a.example",)}, "a.example"),
        ({"cors_origins": ("",)}, "CORS origin ''"),
    ],
)
def test_invalid_settings_are_rejected(values: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message) as refused:
        make_settings(**values)
    assert "padded" not in str(refused.value)
    assert "lines" not in str(refused.value)


def test_lifespan_passes_through_all_middleware():
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    settings = make_settings(api_keys=(ApiKeyEntry("k"),), cors_origins=("*",))

    async def run(scope: Any, receive: Any, send: Any) -> None:
        wrapped = wrap(app, settings, shutdown=Shutdown(stopping=True))
        await wrapped({"type": "lifespan", "asgi": {}, "state": {}}, receive, send)
        await echo(scope, receive, send)

    call(run)
    assert seen == ["lifespan"]
