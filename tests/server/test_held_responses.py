"""Stored responses: continued, retrieved, listed, deleted, evicted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from strobe.server.engine_process.client import EngineDead
from strobe.server.openai.protocol import response_bodies as answers
from strobe.server.openai.response_store import ResponseStore, StoredResponse
from tests.server.support.answer_checks import check_body
from tests.server.support.asgi_client import Answer, call
from tests.server.support.scripted_server import Script, app, tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}


class Session:
    """One server with a scripted engine that records prompts."""

    def __init__(self, text: str = "Yes.", **settings: Any):
        self.prompts: list[str] = []
        self.script = Script(text)
        submit = self.script.submit

        def submitted(ids: list[int], *more: Any) -> Any:
            self.prompts.append(tokenizer().decode(ids, skip_special_tokens=False))
            return submit(ids, *more)

        self.script.submit = submitted  # type: ignore[method-assign]
        self.app = app(self.script, **settings)

    def send(
        self, method: str, path: str, body: Any = None, key: str = "", query: str = ""
    ) -> Answer:
        headers = [("Authorization", f"Bearer {key}")] if key else []
        sent = b"" if body is None else json.dumps(body).encode()
        return call(
            self.app, f"/v1/responses{path}", method=method, headers=headers, body=[sent],
            query=query.encode(),
        )  # fmt: skip

    def ask(self, value: Any = "hello", key: str = "", **body: Any) -> Any:
        answer = self.send("POST", "", {"input": value, **body}, key)
        assert answer.status == 200, answer.body
        if body.get("stream"):
            *_, last, _ = answer.body.decode().split("\n\n")
            return json.loads(last.partition("data: ")[2])["response"]
        return json.loads(answer.body)

    def get(self, path: str, key: str = "", query: str = "") -> Any:
        answer = self.send("GET", path, key=key, query=query)
        assert answer.status == 200, answer.body
        return json.loads(answer.body)

    def missing(self, name: str, key: str = "") -> Answer:
        return self.send("GET", f"/{name}", key=key)


def is_missing(answer: Answer) -> bool:
    error = answer.error
    explains = "held in memory" in error["message"] and "expired" in error["message"]
    return (answer.status, error["code"], explains) == (404, "response_not_found", True)


def chat(*messages: tuple[str, str]) -> str:
    messages_sent = [{"role": role, "content": content} for role, content in messages]
    return tokenizer().chat_text(messages_sent)


def test_skipped_items_are_stored_and_skipped_again():
    session = Session()
    shell = {"type": "local_shell_call", "call_id": "1", "status": "completed", "action": {}}
    user = {"role": "user", "content": "hello"}
    response = session.ask([user, shell], prompt={"id": "p"}, background=False)
    assert {line.split()[0] for line in response["warnings"]} == {"input[1]", "prompt"}
    assert (response["background"], response["service_tier"]) == (False, "default")
    check_body(answers.Response, response)
    items = session.get(f"/{response['id']}/input_items")["data"]
    assert [item["type"] for item in items] == ["local_shell_call", "message"]
    session.ask("more", previous_response_id=response["id"])
    assert session.prompts[1] == chat(("user", "hello"), ("assistant", "Yes."), ("user", "more"))


@pytest.mark.parametrize("streams", [False, True])
def test_stored_response_is_retrieved(streams: bool):
    session = Session()
    response = session.ask(stream=streams, metadata={"a": "b"})
    assert (response["store"], response["metadata"]) == (True, {"a": "b"})
    response.pop("speculation", None)
    assert session.get(f"/{response['id']}") == response
    check_body(answers.Response, response)


def test_conversation_continues_after_previous_response():
    session = Session()
    first = session.ask("one", instructions="be brief")
    second = session.ask("two", previous_response_id=first["id"])
    third = session.ask([{"role": "user", "content": "three"}], previous_response_id=second["id"],
                        instructions="be long")  # fmt: skip
    assert session.prompts == [
        chat(("system", "be brief"), ("user", "one")),
        chat(("user", "one"), ("assistant", "Yes."), ("user", "two")),
        chat(("system", "be long"), ("user", "one"), ("assistant", "Yes."), ("user", "two"),
             ("assistant", "Yes."), ("user", "three")),
    ]  # fmt: skip
    assert third["previous_response_id"] == second["id"]
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    again = session.ask("other", previous_response_id=first["id"])  # a branch
    assert again["id"] not in (second["id"], third["id"])
    assert session.prompts[-1] == chat(("user", "one"), ("assistant", "Yes."), ("user", "other"))


def test_call_result_continues_a_stored_call():
    session = Session(f"<think>\nHm.\n</think>\n\n{CALL}")
    first = session.ask("go", tools=[TOOL])
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
    session.ask([result], previous_response_id=first["id"], tools=[TOOL])
    call_at = session.prompts[-1].rindex('"name": "f"')
    assert session.prompts[-1].rindex("42") > call_at


def test_input_items_are_listed():
    session = Session()
    first = session.ask("one")
    sent = [
        {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
        {"role": "assistant", "content": "three", "id": "mine"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "4"},
    ]
    second = session.ask(sent, previous_response_id=first["id"])
    path = f"/{second['id']}/input_items"
    listed = session.get(path, query="order=asc")
    check_body(answers.ItemList, listed)
    items = listed["data"]
    assert [item["type"] for item in items] == [
        "message", "message", "message", "message", "function_call", "function_call_output"
    ]  # fmt: skip
    assert items[0]["content"] == [{"type": "input_text", "text": "one"}]
    assert items[1] == first["output"][0]
    assert (items[3]["id"], items[3]["content"][0]["type"]) == ("mine", "output_text")
    assert items[4] == {**sent[2], "id": items[4]["id"]}
    ids = [item["id"] for item in items]
    assert len(set(ids)) == 6
    ends = (listed["first_id"], listed["last_id"], listed["has_more"])
    assert ends == (ids[0], ids[-1], False)
    assert [item["id"] for item in session.get(path)["data"]] == ids[::-1]
    page = session.get(path, query=f"order=asc&limit=2&after={ids[0]}")
    assert [item["id"] for item in page["data"]] == ids[1:3]
    assert page["has_more"]
    last = session.get(path, query=f"order=asc&after={ids[-1]}")
    assert (last["data"], last["first_id"], last["has_more"]) == ([], None, False)


@pytest.mark.parametrize(
    ("path", "query", "param"),
    [
        ("", "stream=true", "stream"),
        ("/input_items", "limit=0", "limit"),
        ("/input_items", "limit=101", "limit"),
        ("/input_items", "limit=x", "limit"),
        ("/input_items", "order=up", "order"),
        ("/input_items", "after=x", "after"),
        ("/input_items", "before=x", "before"),
    ],
)
def test_invalid_parameter_is_named(path: str, query: str, param: str):
    session = Session()
    name = session.ask()["id"]
    answer = session.send("GET", f"/{name}{path}", query=query)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_delete_removes_one_response_only():
    session = Session()
    first = session.ask("one")
    second = session.ask("two", previous_response_id=first["id"])
    answer = session.send("DELETE", f"/{first['id']}")
    assert json.loads(answer.body) == {"id": first["id"], "object": "response", "deleted": True}
    assert is_missing(session.missing(first["id"]))
    assert is_missing(session.send("DELETE", f"/{first['id']}"))
    assert is_missing(session.send("GET", f"/{first['id']}/input_items"))
    session.ask("three", previous_response_id=second["id"])
    assert "one" in session.prompts[-1]


def test_unknown_response_id_is_404():
    session = Session()
    assert is_missing(session.missing("resp_x"))
    answer = session.send("POST", "", {"input": "x", "previous_response_id": "resp_x"})
    assert is_missing(answer)
    assert answer.error["param"] == "previous_response_id"
    assert session.prompts == []


def test_store_false_is_not_stored():
    session = Session()
    first = session.ask("one")
    response = session.ask("two", store=False, previous_response_id=first["id"])
    assert response["store"] is False
    assert is_missing(session.missing(response["id"]))
    without = Session(response_memory=0)
    response = without.ask("one")
    assert (response["store"], "warnings" in response) == (False, False)
    assert is_missing(without.missing(response["id"]))
    warnings = without.ask("one", store=True)["warnings"]
    assert warnings == ["store has no effect: this server was started with --response-memory 0."]


def test_failed_response_is_not_stored():
    session = Session()
    session.script.ends = EngineDead("It ended.")
    body = {"input": "x", "request_id": "r1"}
    assert session.send("POST", "", body).status == 500
    assert session.send("POST", "", {**body, "stream": True}).status == 200
    assert is_missing(session.missing("resp_r1"))


def test_each_key_sees_only_its_own_responses():
    session = Session(api_key=("k-one", "k-two"))
    mine = session.ask("mine", key="k-one", request_id="r1")
    theirs = session.ask("theirs", key="k-two", request_id="r1")
    assert mine["id"] == theirs["id"]
    for key, text in (("k-one", "mine"), ("k-two", "theirs")):
        (item,) = session.get(f"/{mine['id']}/input_items", key=key)["data"]
        assert item["content"][0]["text"] == text
    assert session.missing(mine["id"]).status == 401
    assert session.send("DELETE", f"/{mine['id']}", key="k-one").status == 200
    assert is_missing(session.missing(mine["id"], key="k-one"))
    assert session.missing(mine["id"], key="k-two").status == 200
    body = {"input": "x", "previous_response_id": mine["id"]}
    assert is_missing(session.send("POST", "", body, key="k-one"))


def held(size: int, owner: bytes | None = None) -> StoredResponse:
    return StoredResponse(owner, b"x" * size, (), ())


def test_oldest_responses_are_evicted(monkeypatch: pytest.MonkeyPatch):
    memory = ResponseStore(100)
    for name in "abc":
        memory.put(name, held(40))
    assert [memory.get(name, None) is not None for name in "abc"] == [False, True, True]
    assert memory.num_bytes == 80
    memory.put("b", held(10))  # replaces the older one and is now the newest
    assert (memory.num_bytes, len(memory)) == (50, 2)
    memory.put("d", held(60))
    assert memory.get("c", None) is None
    assert memory.get("b", None) is not None
    memory.put("e", held(101))
    assert (memory.num_bytes, len(memory)) == (0, 0)
    monkeypatch.setattr("strobe.server.openai.response_store.MAX_RESPONSES", 2)
    for name in "abc":
        memory.put(name, held(1))
    assert [memory.get(name, None) is not None for name in "abc"] == [False, True, True]
    assert memory.delete("c", None)
    assert not memory.delete("c", None)
    assert memory.num_bytes == 1


def test_conversation_items_count_towards_the_limit():
    assert StoredResponse(None, b"12", (b"345",), (b"6", b"7")).num_bytes == 7


def test_input_tokens_include_previous_conversation():
    session = Session()
    first = session.ask("one")
    follows = {"input": "two", "previous_response_id": first["id"]}
    counted = session.send("POST", "/input_tokens", follows)
    usage = session.ask("two", previous_response_id=first["id"])["usage"]
    assert json.loads(counted.body)["input_tokens"] == usage["input_tokens"]
    assert (
        session.send("POST", "/input_tokens", {**follows, "previous_response_id": "x"}).status
        == 404
    )
