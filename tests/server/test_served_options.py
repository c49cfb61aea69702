"""A server with an options file: HTTPS, root path, named keys, template variables."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.support.polling import PATIENCE, until
from tests.server.support.server_process import Served

CERTIFICATE = Path(__file__).parent / "certificate"
"""A self-signed certificate for 127.0.0.1, valid until 2126."""
OPTIONS = """
ssl-certfile: {folder}/chain.pem
ssl_keyfile: {folder}/key.pem
root-path: /strobe
api-key-file: {keys}
default-chat-template-kwargs: {{enable_thinking: false}}
max-num-seqs: 2
served-model-name: [first, second]
cuda-graphs: false
log-json: true
port: 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("options")
    (folder / "keys").write_text("alice sk-a 1\nbob sk-b\n")
    text = OPTIONS.format(folder=CERTIFICATE, keys=folder / "keys")
    (folder / "options.yaml").write_text(text)
    served = Served(f"--config={folder / 'options.yaml'}", "--no-adaptive")  # the file sets a port
    yield served
    assert served.stop() == 0


def ask(server: Served, path: str, body: Any = None, key: str = "sk-b") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers)
    context = ssl.create_default_context(cafile=str(CERTIFICATE / "chain.pem"))
    with urllib.request.urlopen(request, timeout=PATIENCE, context=context) as answer:
        return json.loads(answer.read())


def test_https_root_path_and_names_from_options_file(server: Served):
    assert server.url.startswith("https://127.0.0.1:")
    names = [card["id"] for card in ask(server, "/v1/models")["data"]]
    assert names == ["first", "second"]


def test_key_file_rejects_unknown_keys_and_logs_names(server: Served):
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "/v1/models", key="sk-c")
    assert refused.value.code == 401
    ask(server, "/v1/models", key="sk-a")
    until(lambda: '"key": "alice"' in server.log, "alice's line")
    assert "sk-a" not in server.log


def test_template_variables_from_file_are_overridden_by_request(server: Served):
    def tokens(**more: Any) -> list[int]:
        body = {"messages": [{"role": "user", "content": "Hi"}], **more}
        return ask(server, "/tokenize", body)["tokens"]

    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    plain = {"chat_template_kwargs": {"enable_thinking": False}}
    assert tokens() == tokens(**plain) != tokens(**thinking)


def test_settings_from_options_file_apply(server: Served):
    info = ask(server, "/server_info")
    assert info["config"]["cuda_graphs"] is False
    assert info["engine"]["max_num_seqs"] == 2
    assert info["server"]["port"] == 0
