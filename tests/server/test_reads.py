"""GET endpoints, known but unsupported paths, and scheduling fields."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from strobe.config import DEMO_MODELS
from strobe.request import SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.app import make_app
from strobe.server.engine_process.engine_messages import Release, Submit
from strobe.server.serving import Serving
from strobe.speculation.costs import StepCosts
from strobe.speculation.shadow.report import Group
from strobe.speculation.shadow.speed_up import DrafterCosts, ShadowCosts
from strobe.step import ScoredBlock
from strobe.text.tokenizer import Tokenizer
from tests.server.support.asgi_client import Answer, call
from tests.server.support.engineless_server import RecordingClient, serving

KEY = ("Authorization", "Bearer secret")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODELS / "target")


def read(serving: Serving, path: str, method: str = "GET") -> Any:
    answer = call(make_app(serving), path, method=method, headers=[KEY])
    assert answer.status == 200
    return json.loads(answer.body)


def test_tokenizer_info_reproduces_prompts(tokenizer: Tokenizer):
    """The response is complete enough for lm-eval's remote tokenizer, and has no local paths."""
    info = read(serving(tokenizer), "/tokenizer_info")
    assert info["chat_template"] == tokenizer.hf.chat_template
    assert info["tokenizer_class"] == type(tokenizer.hf).__name__
    assert info["eos_token"] == tokenizer.hf.eos_token
    assert str(DEMO_MODELS) not in json.dumps(info)


def test_active_template_is_reported(tokenizer: Tokenizer):
    served = serving(tokenizer)
    served.chat_template = "{{ messages }}"
    assert read(served, "/tokenizer_info")["chat_template"] == "{{ messages }}"


def test_settings_are_reported_without_keys(tokenizer: Tokenizer):
    info = read(serving(tokenizer, api_key=("secret", "other")), "/server_info")
    assert info["server"]["api_key"] == 2
    assert "secret" not in json.dumps(info)
    assert info["engine"]["max_model_len"] == 2048
    assert info["config"]["num_drafts"] is None
    assert info["server"]["max_waiting"] == 256


@pytest.mark.parametrize("path", ["/server_info", "/tokenizer_info", "/load", "/shadow"])
def test_missing_api_key_reveals_nothing(tokenizer: Tokenizer, path: str):
    app = make_app(serving(tokenizer, api_key=("secret",)))
    assert call(app, path, method="GET").status == 401
    assert call(app, path, method="GET", headers=[KEY]).status == 200


def test_load_counts_running_answers(tokenizer: Tokenizer):
    served = serving(tokenizer)
    assert read(served, "/load") == {"server_load": 0}
    served.submit([5], SamplingParams(n=3), "a")
    assert read(served, "/load") == {"server_load": 3}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping_is_health_and_needs_no_key(tokenizer: Tokenizer, method: str):
    served = serving(tokenizer, api_key=("secret",))
    app = make_app(served)
    assert call(app, "/ping", method=method).status == 200
    served.shutdown.stopping = True
    assert call(app, "/ping", method=method).status == 503


def test_prefix_cache_reset_reaches_the_engine(tokenizer: Tokenizer):
    served = serving(tokenizer)
    assert isinstance(served.client, RecordingClient)
    assert call(make_app(served), "/reset_prefix_cache").status == 200
    assert served.client.sent == [Release()]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/rerank", "/v2/rerank", "/v1/audio/speech"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_non_text_endpoint_is_501(tokenizer: Tokenizer, path: str, method: str):
    answer = call(make_app(serving(tokenizer)), path, method=method)
    assert answer.status == 501
    assert answer.error["type"] == "not_implemented_error"
    assert answer.error["message"] == (
        f"Strobe serves text generation; {path} is not among what it does."
    )


@pytest.mark.parametrize("origin", [None, "http://localhost", "null"])
@pytest.mark.parametrize("kind", ["", "application/x-www-form-urlencoded", "application/json"])
@pytest.mark.parametrize("path", ["/api/chat", "/v1/chat/completions"])
def test_body_without_a_type_is_read_from_programs_of_ollama(
    tokenizer: Tokenizer, path: str, kind: str, origin: str | None
):
    """litellm sends no Content-Type to Ollama, and curl a form's. Browsers always send Origin."""
    headers = [("Content-Type", kind), *([("Origin", origin)] if origin else [])]
    answer = call(make_app(serving(tokenizer)), path, headers=headers, body=[b"{"])
    is_read = kind == "application/json" or (path == "/api/chat" and origin is None)
    assert answer.status == (400 if is_read else 415)


@pytest.mark.parametrize("path", ["/api/pull", "/api/embed", "/api/blobs/sha256:1"])
@pytest.mark.parametrize("root_path", ["", "/strobe"])
def test_refused_ollama_path_is_501(tokenizer: Tokenizer, path: str, root_path: str):
    app = make_app(serving(tokenizer))
    answer = call(app, root_path + path, root_path=root_path)
    assert answer.status == 501
    assert answer.error.startswith(f"{path} is not supported: the server ")


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_priority_and_salt_reach_the_engine(tokenizer: Tokenizer, path: str, fields: Any):
    served = serving(tokenizer)
    assert isinstance(served.client, RecordingClient)
    body = json.dumps({**fields, "priority": -3, "cache_salt": "tenant"}).encode()
    call(make_app(served), path, body=[body], gone=True)
    (submit,) = [message for message in served.client.sent if isinstance(message, Submit)]
    assert submit.scheduling == SchedulingOptions(-3, "tenant")


PROXIES = {"strips": "/strobe", "does not strip": "/strobe/strobe"}
"""How the paths begin that the application gets: the HTTP server puts the root path before each."""


@pytest.mark.parametrize("proxy", PROXIES)
def test_page_and_api_below_a_root_path(tokenizer: Tokenizer, proxy: str):
    app = make_app(serving(tokenizer, root_path="/strobe", api_key=("k",)))

    def get(path: str) -> Answer:
        return call(app, PROXIES[proxy] + path, method="GET", root_path="/strobe")

    for path in ("/", *(["", "/"] if proxy == "does not strip" else [])):
        html = get(path).body.decode()
        assert '<base href="/strobe/">' in html
        assert "base-uri 'self'" in html
        assert html.index("<base") < html.index("<link")
    for path in ("/page.js", "/theme.css", "/docs", "/icon.svg", "/health"):
        assert get(path).status == 200
    assert get("/v1/models").status == 401
    assert get("/strobex").status == 401


def test_root_path_may_begin_as_the_api_does(tokenizer: Tokenizer):
    app = make_app(serving(tokenizer, root_path="/v1"))
    assert call(app, "/v1/v1/models", method="GET", root_path="/v1").status == 200


def test_proxy_that_does_not_strip_is_logged_once(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
):
    app = make_app(serving(tokenizer, root_path="/strobe"))
    with caplog.at_level("INFO", "strobe.server.http.root_path"):
        for path in ("/health", "/strobe/health", "/strobe/health"):
            call(app, "/strobe" + path, method="GET", root_path="/strobe")
    (record,) = [record for record in caplog.records if "strip" in record.getMessage()]
    assert "A request came with /strobe in its path" in record.getMessage()


@pytest.mark.parametrize("path", ["/strobe/v1/models", "/strobe/", "/strobe/docs"])
def test_unknown_prefix_is_explained(tokenizer: Tokenizer, path: str):
    answer = call(make_app(serving(tokenizer)), path, method="GET")
    assert answer.status == 404
    assert "start the server with --root-path /strobe." in answer.error["message"]


def test_page_without_a_root_path_has_no_base(tokenizer: Tokenizer):
    html = call(make_app(serving(tokenizer)), "/", method="GET").body.decode()
    assert "<base" not in html
    assert "base-uri 'none'" in html


def test_api_page_has_contents_order_and_relative_links(tokenizer: Tokenizer):
    html = call(make_app(serving(tokenizer)), "/docs", method="GET").body.decode()
    links = re.findall(r'<li><a href="#([^"]+)">', html)
    anchors = re.findall(r'<h3 id="([^"]+)">', html)
    assert links == anchors
    assert len(set(links)) == len(links)
    assert links[:3] == ["post-v1-chat-completions", "post-v1-completions", "post-v1-responses"]
    assert re.findall(r"<h2>([^<]+)</h2>", html) == [
        "OpenAI", "Anthropic", "Ollama", "Texts and tokens", "The server",
    ]  # fmt: skip
    document = json.loads(call(make_app(serving(tokenizer)), "/openapi.json", method="GET").body)
    assert len(links) == sum(map(len, document["paths"].values()))
    assert not re.findall(r'(?:href|src)="?/', html)
    for name in ("theme.css", "docs.css", "icon.svg"):
        assert f'href="{name}"' in html


def test_shadow_reports_scores_as_json_and_as_table(tokenizer: Tokenizer):
    state = serving(tokenizer)
    group = Group(drafter="draft", kind="text", phase="answer", context="0-1k")
    block = ScoredBlock(drafter="draft", start=9, num_drafts=4, num_accepted=3)
    state.shadow.add([(group, block)])
    report = read(state, "/shadow")
    assert report["shadow"] is False
    assert report["drafters"]["draft"]["acceptance_length"] == 4.0
    accept = [KEY, ("Accept", "text/plain")]
    text = call(make_app(state), "/shadow", method="GET", headers=accept).body.decode()
    assert "no speed-ups" in text
    assert text.splitlines()[3].split() == ["draft", "all", "1", "1", "4.00"]


def test_shadow_reports_speed_ups_from_the_engines_costs(tokenizer: Tokenizer):
    state = serving(tokenizer)
    steps = StepCosts({1: 0.0, 2: 0.0}, {1: 10.0, 100: 10.0})
    costs = ShadowCosts(drafters={"draft": DrafterCosts(steps)}, max_num_seqs=4)
    assert state.client.facts is not None
    state.client.facts = state.client.facts._replace(shadow_costs=costs)
    group = Group(drafter="draft", kind="text", phase="answer", context="0-1k")
    for accepted in (3, 3, 3, 3, 4):
        block = ScoredBlock(drafter="draft", start=9, num_drafts=4, num_accepted=accepted)
        state.shadow.add([(group, block)])
    report = read(state, "/shadow")
    assert [entry["concurrency"] for entry in report["recommended"]] == [1, 2, 4]
    assert {entry["drafter"] for entry in report["recommended"]} == {"draft"}
    entry = report["drafters"]["draft"]["by"]["phase"]["answer"]["speedup"][0]
    assert (entry["num_drafts"], entry["speedup"]) == (4, 4.2)
    assert entry["interval"][0] < 4.2 < entry["interval"][1]
    assert "shadow_costs" not in read(state, "/server_info")["engine"]
