"""Replicas on a Ray cluster of this machine."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strobe.cli.main import main
from strobe.integrations.forwarding import ForwardedRequest, RoutingState
from strobe.integrations.replica_watchdog import Heartbeat, watch
from tests.server.support.polling import PATIENCE, until
from tests.server.support.server_process import Served, child_of

needs_ray = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed: pip install 'strobe[ray]'"
)
KEY = "sk-of-a-test"
LOST = "The replica that answered this request was lost; send the request again."


def application(**args: Any) -> Any:
    """Return Serve's application for the arguments of `serve run`."""
    return importlib.import_module("strobe.integrations.ray").app({"device": "cpu", **args})


def replica_of(app: Any) -> Any:
    """Return the deployment of the replicas; `app` is the ingress's."""
    (replica, _) = app._bound_deployment.init_args
    return replica._bound_deployment


def test_missing_ray_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("strobe.integrations.find_spec", lambda name: None)
    assert main(["serve", "--ray"]) == 2
    assert "pip install 'strobe[ray]'" in capsys.readouterr().err


@needs_ray
def test_command_lines_texts_become_options():
    app = application(num_replicas="3", max_num_seqs="8", access_log="false", api_key="7", dp="3")
    config, settings, template = replica_of(app).init_args
    assert (config.max_num_seqs, config.device, template) == (8, "cpu", None)
    assert settings.access_log is False
    assert settings.api_key == ("7",)
    assert settings.data_parallel_size == 1
    assert replica_of(app).num_replicas == app._bound_deployment.num_replicas == 3


@needs_ray
def test_replicas_follow_the_load():
    scaling = '{"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 20}'
    config = replica_of(application(autoscaling_config=scaling))._deployment_config
    assert config.autoscaling_config.max_replicas == 4
    assert config.autoscaling_config.target_ongoing_requests == 20


@needs_ray
def test_gpus_of_a_replica_are_one_bundle():
    app = application(device="cuda", tensor_parallel_size=2, grace=7)
    replica = replica_of(app)
    assert replica.ray_actor_options["num_gpus"] == 2
    assert replica._replica_config.placement_group_bundles == [{"CPU": 1, "GPU": 2}]
    assert replica._deployment_config.graceful_shutdown_timeout_s > 7


@needs_ray
@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({"port": "9000"}, "port is set, but Ray's proxies listen"),
        ({"ssl_certfile": "a.pem"}, "ssl_certfile is set, but Ray's proxies"),
        ({"batch_dir": "batches"}, "batch_dir is set, but with Ray every replica"),
        ({"kv_events_config": "{}"}, "kv_events_config is set, but with Ray"),
        ({"replicas": "2"}, "replicas is neither an option of strobe serve nor"),
        ({"max_num_seqs": "many"}, "max_num_seqs is 'many', but must be a whole number"),
        ({"num_replicas": "0"}, "data_parallel_size is 0, but must be at least 1"),
        ({"num_replicas": 2, "autoscaling_config": {}}, "num_replicas is 2, but autoscaling_"),
        ({"autoscaling_config": "{4"}, "autoscaling_config is '{4', but must be an object"),
        ({"device": "cuda:1"}, "device is 'cuda:1', but Ray chooses the GPU"),
    ],
)
def test_options_without_a_meaning_on_ray_are_rejected(args: dict[str, Any], expected: str):
    with pytest.raises(ValueError, match=re.escape(expected)):
        application(**args)


@needs_ray
def test_replica_whose_engine_is_dead_is_unhealthy():
    replica = importlib.import_module("strobe.integrations.ray").Replica

    client = SimpleNamespace(dead=True, state="The engine has ended.")
    dead = SimpleNamespace(serving=SimpleNamespace(client=client))
    with pytest.raises(RuntimeError, match="The engine has ended"):
        replica.check_health(dead)


@needs_ray
def test_ray_address_that_nothing_answers_is_rejected(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{unused.getsockname()[1]}")
        command = importlib.import_module("strobe.integrations.ray_command")
        with pytest.raises(ValueError, match="but no Ray cluster answers there"):
            command._connect()


class Router:
    """ReplicaRouter without Ray: three idle replicas, and an actor that knows prompts' prefixes.

    prefixes: by replica; None: the actor is lost. order: the replicas for a request, the best
    first.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, prefixes: dict[str, str] | None = None):
        module = importlib.import_module("strobe.integrations.ray_router")
        self.routing = RoutingState()
        monkeypatch.setattr("strobe.integrations.forwarding.ROUTING", self.routing)
        self.prefixes = prefixes
        self.replicas = [
            SimpleNamespace(
                replica_id=SimpleNamespace(unique_id=name, to_full_id_str=lambda name=name: name)
            )
            for name in "abc"
        ]
        self.router = object.__new__(module.ReplicaRouter)
        self.router._replica_queue_len_cache = SimpleNamespace(get=lambda replica: None)
        self.router._tree_actor = SimpleNamespace(prefix_match=SimpleNamespace(remote=self._match))

    async def _match(self, prompt: str, names: list[str]) -> tuple[str, list[str] | None]:
        if self.prefixes is None:
            raise ConnectionError
        lengths: dict[str, int] = {}
        for name in names:
            pairs = zip(prompt, self.prefixes.get(name, ""), strict=False)
            lengths[name] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        longest = max(lengths.values())
        return prompt[:longest], [name for name, n in lengths.items() if n == longest]

    def order(self, request: ForwardedRequest) -> list[str]:
        pending = SimpleNamespace(args=(request,))
        groups = asyncio.run(self.router.choose_replicas(self.replicas, pending))
        return [replica.replica_id.unique_id for (replica,) in groups]

    def send(self, count: int, prompt: str = "{}") -> list[str]:
        """Return the replicas of requests that stay open."""
        requests = [ForwardedRequest({}, b"", prompt=prompt.format(i)) for i in range(count)]
        return [self.order(request)[0] for request in requests]


@needs_ray
@pytest.mark.parametrize(
    ("excluded", "owner", "expected"),
    [
        ((), "b", ["b"]),
        (("a", "b"), "b", ["b"]),  # another would not know the response
        (("a", "b"), "", ["c"]),
        (("a", "c"), "gone", ["b"]),
    ],
)
def test_router_prefers_owners_and_avoids_excluded_replicas(
    monkeypatch: pytest.MonkeyPatch, excluded: tuple[str, ...], owner: str, expected: list[str]
):
    router = Router(monkeypatch)
    request = ForwardedRequest({}, b"", prompt="Hello", owner=owner, excluded=excluded)
    assert router.order(request)[:1] == expected
    assert router.routing.replica_of(request) == expected[0]


@needs_ray
@pytest.mark.parametrize("prefixes", [None, {}, dict.fromkeys("abc", "A system prompt. " * 99)])
def test_burst_of_unlike_prompts_goes_to_all_replicas(
    monkeypatch: pytest.MonkeyPatch, prefixes: dict[str, str] | None
):
    """No request is answered meanwhile, so that Ray knows of none."""
    router = Router(monkeypatch, prefixes)
    replicas = router.send(12, "A system prompt. " * 99 + "{}")
    assert [replicas.count(name) for name in "abc"] == [4, 4, 4]


@needs_ray
def test_prefix_yields_to_a_busier_replica(monkeypatch: pytest.MonkeyPatch):
    router = Router(monkeypatch, {"b": "Tell me a story. " * 40})
    replicas = router.send(8, "Tell me a story. " * 40 + "{}")
    assert replicas[:2] == ["b", "b"]
    assert {*replicas} == {*"abc"}


@needs_ray
def test_router_avoids_silent_replicas(monkeypatch: pytest.MonkeyPatch):
    router = Router(monkeypatch)
    router.routing.record_silent("a")
    assert "a" not in router.send(8)
    assert router.order(ForwardedRequest({}, b""))[-1] == "a"


@needs_ray
def test_ingress_tries_another_replica_when_one_is_silent(monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module("strobe.integrations.ray")
    monkeypatch.setattr(module, "ACCEPT_SECONDS", 0.01)
    monkeypatch.setattr(module, "LAST_ACCEPT_SECONDS", 0.02)
    routing = RoutingState()
    routing.replicas = frozenset("ab")
    monkeypatch.setattr(module, "ROUTING", routing)
    silent = {"a"}
    tried: list[str] = []

    class Response:
        def __init__(self, request: ForwardedRequest):
            left = sorted(routing.replicas - {*request.excluded}) or ["a"]
            self.replica = left[0]
            tried.append(self.replica)
            routing.record_sent(request, self.replica)
            self.parts = iter(["", [{"type": "http.response.body", "body": b"Hi"}]])

        def __aiter__(self) -> Response:
            return self

        async def __anext__(self) -> Any:
            if self.replica in silent:
                await asyncio.Event().wait()
            try:
                return next(self.parts)
            except StopIteration:
                raise StopAsyncIteration from None

        def cancel(self) -> None:
            pass

    async def answer() -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            assert message.get("body") != b"Hi" or not routing.num_open()
            sent.append(message)

        ingress = SimpleNamespace(answers=SimpleNamespace(remote=Response))
        ingress._accepts = partial(module.Ingress._accepts, ingress)
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        request = ForwardedRequest(scope, b"")
        await module.Ingress._from_one(ingress, request, send)
        assert not routing.num_open()
        return sent

    assert [message["body"] for message in asyncio.run(answer())] == [b"Hi"]
    assert (tried, routing.is_silent("a"), routing.is_silent("b")) == (["a", "b"], True, False)
    silent.add("b")
    start, body = asyncio.run(answer())
    assert start["status"] == 503
    assert json.loads(body["body"])["error"]["code"] == "replica_silent"
    assert tried[2:] == ["a", "b", "a"]


def test_watchdog_kills_a_process_that_has_stopped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strobe.integrations.replica_watchdog.BEAT_SECONDS", 0.01)
    reads, writes = os.pipe()
    child = subprocess.Popen(["sleep", "600"])
    os.kill(child.pid, signal.SIGSTOP)
    os.write(writes, b".")
    assert watch(child.pid, 0.05, reads)
    assert child.wait(PATIENCE) == -signal.SIGKILL
    os.close(writes)
    assert not watch(os.getpid(), 600, reads)  # the process has ended
    os.close(reads)


def test_heartbeat_ends_with_its_process():
    heartbeat = Heartbeat()
    heartbeat.stop()
    assert heartbeat._process.returncode == 0


def processes(title: str, ancestor: int) -> list[int]:
    """Return ids of the processes with that title that descend from `ancestor`."""
    parents: dict[int, int] = {}
    named: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = (path / "stat").read_text().rpartition(")")[2].split()
            command = (path / "cmdline").read_text()
        except OSError:
            continue
        parents[int(path.name)] = int(status[1])
        if command.startswith(title):
            named.append(int(path.name))

    def descends(pid: int) -> bool:
        while pid > 1 and pid != ancestor:
            pid = parents.get(pid, 0)
        return pid == ancestor

    return [pid for pid in named if descends(pid)]


class Cluster(Served):
    """`strobe serve --ray` with two replicas."""

    def __init__(self) -> None:
        options = "--ray", "--num-replicas=2", f"--api-key={KEY}", f"--grace={PATIENCE}"
        super().__init__(*options, patience=3 * PATIENCE)  # Ray starts seven processes

    def get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path)
        request.add_header("Authorization", f"Bearer {KEY}")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.read().decode()

    @property
    def replica_pids(self) -> list[int]:
        return processes("ray::ServeReplica:strobe:Replica", self.process.pid)

    @property
    def replicas(self) -> set[str]:
        """The ids of the replicas, as all of them say; none while none answers in time."""
        try:
            page = self.get("/metrics")
        except urllib.error.HTTPError:
            return set()
        return set(re.findall(r'request_success_total{replica="(\w+)"', page))

    def post(self, path: str, body: Any, key: str = KEY) -> tuple[int, str]:
        """Send a request; returns the status and the whole body."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        content = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def rejection(self) -> urllib.error.HTTPError | None:
        """Send a request; return the error if there is one."""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        content = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
        request = urllib.request.Request(f"{self.url}/v1/completions", content, headers)
        try:
            urllib.request.urlopen(request, timeout=PATIENCE).read()
        except urllib.error.HTTPError as error:
            return error
        return None


class Stream(threading.Thread):
    """A streamed answer of /v1/responses. replica: the one that answers; text: all events."""

    def __init__(self, cluster: Cluster, prompt: str, max_tokens: int):
        super().__init__(daemon=True)
        body = {"input": prompt, "stream": True, "max_output_tokens": max_tokens}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        content = json.dumps(body | {"ignore_eos": True}).encode()
        request = urllib.request.Request(f"{cluster.url}/v1/responses", content, headers)
        self.answer = urllib.request.urlopen(request, timeout=PATIENCE)
        self.text = self.answer.readline().decode() + self.answer.readline().decode()
        (self.replica,) = re.findall(r'"id":"resp_([a-z0-9]+)_', self.text)
        self.start()

    def run(self) -> None:
        with self.answer:
            self.text += self.answer.read().decode()

    @property
    def ended_well(self) -> bool:
        """Whether the stream ended with a whole answer."""
        self.join(PATIENCE)
        last_event = re.findall(r"^event: (\S+)$", self.text, re.M)[-1]
        return last_event in ("response.completed", "response.incomplete")


def streams_of_both(cluster: Cluster, max_tokens: int) -> list[Stream]:
    """Return open streams, of which each replica answers one at least."""
    streams: list[Stream] = []

    def both() -> bool:
        prompt = f"{len(streams)} {'abcdefghijklmnopqrstuvwxyz'[len(streams)] * 40}"
        streams.append(Stream(cluster, prompt, max_tokens))
        return len({stream.replica for stream in streams}) == 2

    until(both, "both replicas answer")
    return streams


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    streams = streams_of_both(cluster, 200)
    cluster.process.send_signal(signal.SIGTERM)
    rejected = until(lambda: cluster.rejection(), "new requests are rejected")
    assert rejected.code == 503
    assert int(rejected.headers["retry-after"]) > 0
    assert json.loads(rejected.read())["error"]["code"] == "server_stopping"
    assert "version" in cluster.get("/version")  # the liveness probe
    assert all(stream.ended_well for stream in streams)  # SIGTERM lets open answers end
    assert cluster.process.wait(PATIENCE) == 0


@needs_ray
@pytest.mark.full
def test_every_endpoint_is_served(cluster: Cluster):
    assert "<html" in cluster.get("/")
    assert cluster.get("/health") == ""
    status, body = cluster.post("/v1/completions", {"prompt": "a", "max_tokens": 4})
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)
    status, body = cluster.post("/v1/completions", {"prompt": "a"}, key="wrong")
    assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
    status, body = cluster.post("/v1/messages", {"max_tokens": 4})
    assert (status, json.loads(body)["type"]) == (400, "error")
    assert cluster.post("/reset_prefix_cache", None)[0] == 200


@needs_ray
@pytest.mark.full
def test_stored_responses_stay_with_their_replica(cluster: Cluster):
    for _ in range(4):
        status, body = cluster.post("/v1/responses", {"input": "Hi", "max_output_tokens": 16})
        name = json.loads(body)["id"]
        follow_up = {"input": "And?", "previous_response_id": name, "max_output_tokens": 16}
        status, body = cluster.post("/v1/responses", follow_up)
        assert status == 200, body


@needs_ray
@pytest.mark.full
def test_equal_prompts_go_where_their_prefix_is_cached(cluster: Cluster):
    prompt = "The same beginning of many prompts, long enough for some pages of it. " * 2
    bodies = [{"prompt": f"{prompt}{i}", "max_tokens": 2} for i in range(4)]
    answers = [json.loads(cluster.post("/v1/completions", body)[1]) for body in bodies]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert all(cached[1:]), cached


@needs_ray
@pytest.mark.full
def test_burst_of_unlike_prompts_is_shared(cluster: Cluster):
    prompts = [f"{letter * 40}" for letter in "abcdefghijklmnop"]
    with ThreadPoolExecutor(len(prompts)) as pool:
        streams = list(pool.map(lambda prompt: Stream(cluster, prompt, 100), prompts))
    counts = Counter(stream.replica for stream in streams)
    assert all(stream.ended_well for stream in streams)
    assert min(counts.values()) >= 6, counts
    assert len(counts) == 2


@needs_ray
@pytest.mark.full
def test_stopped_replica_is_avoided_and_replaced(cluster: Cluster):
    streams = streams_of_both(cluster, 200)
    stopped, *_ = cluster.replica_pids
    os.kill(stopped, signal.SIGSTOP)
    page = cluster.get("/metrics")
    assert sorted(re.findall(r"^strobe:replica_up{.*} (\S+)$", page, re.M)) == ["0.0", "1.0"]
    assert len(json.loads(cluster.get("/load"))["silent_replicas"]) == 1
    status, body = cluster.post("/reset_prefix_cache", None)
    assert (status, json.loads(body)["error"]["code"]) == (503, "replica_silent")
    for i in range(10):
        status, body = cluster.post("/v1/completions", {"prompt": f"{i}", "max_tokens": 2})
        assert status == 200, body
    until(lambda: not Path(f"/proc/{stopped}").exists(), "the watchdog ends the process")
    failed = {s.replica for s in streams if not s.ended_well}
    assert len(failed) == 1
    for stream in streams:
        assert (stream.replica in failed) == (LOST in stream.text)
    until(lambda: len(cluster.replicas) == 2, "the replica is replaced")


@needs_ray
@pytest.mark.full
def test_replica_that_ends_engine_restarts_while_others_answer(cluster: Cluster):
    before = cluster.replicas
    streams = streams_of_both(cluster, 400)
    (engine,) = child_of(cluster.replica_pids[0])
    os.kill(engine, signal.SIGKILL)
    until(lambda: not all(stream.is_alive() for stream in streams), "its streams end")
    for i in range(10):
        status, body = cluster.post("/v1/completions", {"prompt": f"{i}", "max_tokens": 2})
        assert status == 200, body
    failed = {s.replica for s in streams if not s.ended_well}
    assert len(failed) == 1
    for stream in streams:
        assert (stream.replica in failed) == ("engine's process ended" in stream.text)
    until(lambda: len(child_of(cluster.replica_pids[0])) == 1, "the engine is started again")
    assert cluster.replicas == before


@needs_ray
@pytest.mark.full
def test_lost_replica_fails_only_its_own_requests_and_comes_back(cluster: Cluster):
    streams = streams_of_both(cluster, 400)
    lost, *_ = cluster.replica_pids
    os.kill(lost, signal.SIGKILL)
    for i in range(10):
        status, body = cluster.post("/v1/completions", {"prompt": f"{i}", "max_tokens": 2})
        assert status == 200, body
    failed = {s.replica for s in streams if not s.ended_well}
    assert len(failed) == 1
    for stream in streams:
        assert (stream.replica in failed) == (LOST in stream.text)
    until(lambda: len(cluster.replicas) == 2, "the replica is replaced")
    assert cluster.replicas.isdisjoint(failed)
