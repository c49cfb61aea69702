"""Several engines as one: routing, failures and sums, with engines that only record messages."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.counters import DraftCounts, EngineStats
from strobe.request import DEFAULT_SCHEDULING, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process import replicas as module
from strobe.server.engine_process.client import (
    EngineClient,
    EngineDead,
    EngineUnavailable,
    Generation,
)
from strobe.server.engine_process.engine_messages import Grammars, Ready, Release, StepEvents
from strobe.server.engine_process.process import run
from strobe.server.engine_process.replicas import OPEN_TOKENS, PrefixIndex, Replicas, prefix_keys
from strobe.server.engine_process.resources import Replica, make_replicas, share_memory
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.engine_process.worker import check_gpus
from strobe.server.generation.run import GenerationJob, PromptRun
from strobe.server.launch import make_serving
from strobe.server.log_format import JsonFormatter, PlainFormatter
from strobe.server.server_settings import ServerConfig
from strobe.server.telemetry.kv_events import KVEventsConfig
from strobe.text.tokenizer import Tokenizer
from tests.server.support.engineless_server import START, event, samples, serving

READY = Ready(2048, 4, 2048, 15, ("dflash", "none"), {}, "float32", "cpu", 100)
PAGE = 16
CPU = EngineConfig(device="cpu")


class FakeEngine(EngineClient):
    """A client that is ready and sends nothing."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.sent: list[Any] = []
        self._handle(READY._replace())

    def send(self, message: Any) -> None:
        self.sent.append(message)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Replicas:
    return make(monkeypatch)


def make(patch: pytest.MonkeyPatch, count: int = 2, **config: Any) -> Replicas:
    patch.setattr(module, "EngineClient", FakeEngine)
    return Replicas(CPU.with_(**config), ServerConfig(data_parallel_size=count))


def submit(client: Replicas, prompt: list[int], salt: str = "", **params: Any) -> Generation:
    options = SchedulingOptions(cache_salt=salt) if salt else DEFAULT_SCHEDULING
    return client.submit(prompt, SamplingParams(**params), "r", options)


def prompt(start: int, pages: int = 10) -> list[int]:
    """A prompt that fills so many pages and begins one more."""
    return list(range(start, start + pages * PAGE + 1))


def restart(engine: EngineClient) -> None:
    engine.facts, engine.restarting = None, True


# routing


def test_other_prompts_spread_evenly(pair: Replicas):
    assert [submit(pair, prompt(n)).engine for n in (0, 300, 600)] == [0, 1, 0]
    for generation in [submit(pair, prompt(n)) for n in (900, 1200)]:
        generation.close()
    assert [submit(pair, [n]).engine for n in (1, 2, 3)] == [1, 0, 1]


def test_idle_engines_take_turns(pair: Replicas):
    order: list[int] = []
    for number in range(4):
        generation = submit(pair, prompt(300 * number))
        order.append(generation.engine)
        generation.close()
    assert order == [0, 1, 0, 1]


def test_prompt_goes_to_its_longest_prefix(pair: Replicas):
    first, second = prompt(0), [*prompt(0)[: 4 * PAGE], *prompt(600, 6)]
    generations = [submit(pair, first) for _ in range(3)]
    assert [generation.engine for generation in generations] == [0, 0, 0]
    generations.append(submit(pair, second))
    assert generations[-1].engine == 1
    for generation in generations:
        generation.close()
    assert [submit(pair, [*text, 1]).engine for text in (second, second, first)] == [1, 1, 0]


def test_conversations_stay_on_their_engines(pair: Replicas):
    texts = [prompt(300 * number) for number in range(4)]
    for turn in range(3):
        generations = [submit(pair, text) for text in texts]
        assert [generation.engine for generation in generations] == [0, 1, 0, 1]
        for number, generation in enumerate(generations):
            generation.close()
            texts[number] = texts[number] + prompt(2000 + 50 * number + turn, 2)


def test_cached_prefix_yields_to_busier_engine(pair: Replicas):
    text = prompt(0, pages=(OPEN_TOKENS * 5 // 2) // PAGE)
    submit(pair, text)
    assert pair.engines[0].num_open == 1
    submit(pair, text)
    assert pair.engines[0].num_open == 2
    assert submit(pair, text, n=1).engine == 0
    assert submit(pair, text).engine == 1


@pytest.mark.parametrize("prefix_pages", [20, 60, 400])
def test_shared_prefix_does_not_starve_engines(monkeypatch: pytest.MonkeyPatch, prefix_pages: int):
    client = make(monkeypatch, 4)
    for engine in client.engines:
        engine.facts = READY._replace(max_num_seqs=64, pages=2000)
    shared = prompt(0, prefix_pages)
    engines = [submit(client, [*shared, *[number] * 50]).engine for number in range(32)]
    assert all(5 <= engines.count(number) <= 9 for number in range(4))


def test_long_shared_prefix_does_not_scatter_conversations(pair: Replicas):
    shared = prompt(0, 40)
    for engine in pair.engines:
        engine.facts = READY._replace(max_num_seqs=64, pages=2000)
    texts = [shared[: 40 * PAGE] + prompt(2000 * number, 40) for number in (1, 2)]
    generations = [submit(pair, shared, n=9) for _ in range(2)]
    assert [generation.engine for generation in generations] == [0, 1]
    for generation in generations:
        generation.close()
    first = submit(pair, texts[0]).engine
    assert submit(pair, texts[1]).engine == 1 - first
    assert [submit(pair, texts[0]).engine for _ in range(6)] == [first] * 6


def test_engine_without_free_place_is_avoided(pair: Replicas):
    text = prompt(0, pages=90)
    assert submit(pair, text, n=READY.max_num_seqs).engine == 0
    assert submit(pair, text).engine == 1
    assert submit(pair, prompt(3000), n=READY.max_num_seqs).engine == 1
    assert submit(pair, text).engine in (0, 1)


def test_salts_share_no_prefix(pair: Replicas):
    submit(pair, prompt(0), "a").close()
    assert submit(pair, prompt(0), "b").engine == 1
    assert submit(pair, prompt(0), "a").engine == 0


def test_without_prefix_cache_only_load_counts(monkeypatch: pytest.MonkeyPatch):
    client = make(monkeypatch, enable_prefix_caching=False)
    submit(client, prompt(0)).close()
    assert submit(client, prompt(0)).engine == 1


def test_restart_forgets_prefixes(pair: Replicas):
    submit(pair, prompt(0)).close()
    restart(pair.engines[0])
    pair.engines[0]._handle(READY._replace())
    assert submit(pair, prompt(0)).engine == 1


def test_restarted_engine_takes_turns_again(pair: Replicas):
    restart(pair.engines[0])
    for number in range(5):
        submit(pair, [number]).close()
    pair.engines[0]._handle(READY._replace())
    engines: list[int] = []
    for number in range(4):
        generation = submit(pair, [number])
        engines.append(generation.engine)
        generation.close()
    assert engines == [0, 1, 0, 1]


def test_release_forgets_prefixes(pair: Replicas):
    submit(pair, prompt(0)).close()
    pair.send(Release())
    for engine in pair.engines:
        assert isinstance(engine, FakeEngine)
        assert engine.sent[-1] == Release()
    assert submit(pair, prompt(0)).engine == 1


def test_index_evicts_ends_of_oldest_prompts():
    index, old, new = PrefixIndex(6), prefix_keys(prompt(0, 4), "", PAGE), range(3)
    index.add(old)
    index.add(new)
    assert (index.match(old), index.match(new)) == (3, 3)
    index.add(old[:1])
    index.add([7, 8, 9])
    assert index.match(old) == 1


def test_last_token_is_never_cached():
    assert len(prefix_keys(list(range(2 * PAGE)), "", PAGE)) == 1
    assert prefix_keys(list(range(PAGE)), "", PAGE) == []


# failures


def test_requests_avoid_engine_that_restarts(pair: Replicas):
    submit(pair, prompt(0)).close()
    restart(pair.engines[0])
    assert pair.can_answer
    assert [submit(pair, prompt(0)).engine for _ in range(2)] == [1, 1]
    restart(pair.engines[1])
    assert not pair.can_answer
    assert (pair.facts, pair.state) == (None, "The engine is restarting.")
    with pytest.raises(EngineUnavailable):
        submit(pair, prompt(0))


def test_engine_may_end_during_a_submission(pair: Replicas, monkeypatch: pytest.MonkeyPatch):
    first = pair.engines[0]
    monkeypatch.setattr(first, "send", lambda message: restart(first))
    assert submit(pair, prompt(0)).engine == 0
    assert submit(pair, prompt(0)).engine == 1


def test_last_death_ends_all(pair: Replicas):
    deaths: list[str] = []
    pair.on_death = lambda: deaths.append("all")
    for number, engine in enumerate(pair.engines):
        assert (pair.dead, deaths) == (False, [])
        if number:
            restart(pair.engines[1])
            with pytest.raises(EngineUnavailable):
                submit(pair, prompt(0))
        engine.dead = True
        engine.on_death()
    assert (pair.dead, deaths, pair.state) == (True, ["all"], "All engines have ended.")
    with pytest.raises(EngineDead):
        submit(pair, prompt(0))


def end(engine: EngineClient) -> None:
    """Let an engine's process end for good."""
    engine.restart = False
    engine.process = Mock()
    engine._died()


def test_started_requests_of_an_ended_engine_fail(pair: Replicas):
    ends: list[int] = []

    async def main() -> list[EngineDead]:
        failures: list[EngineDead] = []
        for number, engine in enumerate(pair.engines):
            engine.on_end = partial(ends.append, number)
            generation = submit(pair, prompt(0))
            assert generation.engine == number
            generation.add_events([event([9], start=START)])
            end(engine)
            await anext(generation)
            with pytest.raises(EngineDead) as failure:
                await anext(generation)
            failures.append(failure.value)
        return failures

    first, last = asyncio.run(main())
    assert isinstance(first, EngineUnavailable)
    assert "send the request again" in str(first)
    assert first.code == "engine_ended"
    assert not isinstance(last, EngineUnavailable)
    assert ends == [0, 1]


def test_requests_without_output_move_to_another_engine(pair: Replicas):
    first, second = pair.engines
    assert isinstance(second, FakeEngine)

    async def main() -> None:
        restart(second)
        other = submit(pair, prompt(900), n=2)
        waiting, started, closed = (submit(pair, prompt(0, 1), "salt", n=2) for _ in range(3))
        second._handle(READY._replace())
        assert [other.engine, waiting.engine, started.engine] == [0, 0, 0]
        started.add_events([event([9], start=START)])
        closed.close()
        before = len(second.sent)
        end(first)
        assert [sent.prompt_ids for sent in second.sent[before:]] == [prompt(900), prompt(0, 1)]
        assert second.sent[-1] == waiting.prompt
        assert (waiting.engine, waiting.prompt.params.n) == (1, 2)
        assert waiting.prompt.scheduling.cache_salt == "salt"
        assert second.num_open == 4
        for sibling in range(2):
            ending = event([8], start=START, finish_reason="stop", sibling=sibling)
            second._dispatch(StepEvents([ending._replace(key=waiting.key)], None))
        assert [part.tokens for part in await anext(waiting)] == [[8], [8]]
        assert second.num_open == 2
        waiting.close()

    asyncio.run(main())


def test_prompt_moves_only_once(monkeypatch: pytest.MonkeyPatch):
    """A prompt that ends its engine must not end all of them."""
    client = make(monkeypatch, 3)

    async def main() -> None:
        generation = submit(client, prompt(0))
        end(client.engines[generation.engine])
        moved_to = generation.engine
        assert moved_to != 0
        end(client.engines[moved_to])
        with pytest.raises(EngineUnavailable, match="send the request again"):
            await anext(generation)

    asyncio.run(main())


def test_moved_request_counts_for_the_engine_that_answers(pair: Replicas):
    served = make_serving(
        ServerConfig(served_model_name=("m",)), pair, Tokenizer(DEMO_MODELS / "target"), None
    )

    async def main() -> None:
        run = PromptRun(served, GenerationJob([5], SamplingParams(), "r"))
        end(pair.engines[0])
        assert run.engine == 1
        run._generation.add_events([event([9], start=START, finish_reason="stop")])
        async for _ in run.steps():
            pass

    asyncio.run(main())
    name, labels = "vllm:request_success", {"finished_reason": "stop"}
    own = [s for s in samples(served.metrics, name) if labels.items() <= s.labels.items()]
    assert {s.labels["engine"]: s.value for s in own if s.value} == {"1": 1}


def test_first_failure_ends_start(pair: Replicas):
    async def main() -> Ready:
        for engine in pair.engines:
            engine.facts = None
            engine._ready.clear()
        pair.engines[1].failed = None
        pair.engines[1]._ready.set()
        return await pair.ready()

    with pytest.raises(EngineDead, match="ended before it could answer"):
        asyncio.run(main())


def test_grammars_go_where_they_compile(pair: Replicas):
    pair.engines[0]._handle(Grammars("no compiler"))
    assert pair.grammar_fault is None
    grammar = {"structured_outputs": {"regex": "a"}}
    assert [submit(pair, [n], **grammar).engine for n in range(3)] == [1, 1, 1]
    assert submit(pair, [5]).engine == 0
    pair.engines[1]._handle(Grammars("no memory"))
    assert pair.grammar_fault == "no compiler"


# sums


def test_state_is_that_of_all_engines(pair: Replicas):
    assert pair.snapshot is None
    for number, engine in enumerate(pair.engines, start=1):
        counts = DraftCounts(steps=number)
        stats = EngineStats(generation_tokens=10 * number, draft_counts=counts)
        engine.snapshot = EngineSnapshot(number, 2 * number, 0.2 * number, stats)
    assert pair.facts == READY._replace(max_num_seqs=8, pages=200)
    snapshot = pair.snapshot
    assert snapshot is not None
    assert (snapshot.running, snapshot.waiting, snapshot.kv_used) == (3, 6, pytest.approx(0.3))
    assert (snapshot.stats.generation_tokens, snapshot.stats.draft_counts.steps) == (30, 3)
    restart(pair.engines[0])
    assert pair.facts == READY
    assert pair.snapshot == pair.engines[1].snapshot


def test_request_counts_for_the_engine_that_answers(pair: Replicas):
    served = make_serving(
        ServerConfig(served_model_name=("m",)), pair, Tokenizer(DEMO_MODELS / "target"), None
    )

    async def main() -> None:
        for number, tokens in enumerate(([5], [6], [7])):
            run = PromptRun(served, GenerationJob(tokens, SamplingParams(), "r"))
            assert run._generation.engine == number % 2
            run._generation.add_events([event([9], start=START, finish_reason="stop")])
            async for _ in run.steps():
                pass
        PromptRun(served, GenerationJob([8], SamplingParams(n=2), "r"))

    def by_engine(name: str, **labels: str) -> list[float]:
        own = [s for s in samples(served.metrics, name) if labels.items() <= s.labels.items()]
        return [s.value for s in sorted(own, key=lambda s: s.labels["engine"])]

    asyncio.run(main())
    assert by_engine("vllm:request_success", finished_reason="stop") == [2, 1]
    assert by_engine("strobe:open_answers") == [0, 2]
    assert by_engine("vllm:cache_config_info", num_gpu_blocks="100") == [1, 1]
    snapshot = EngineSnapshot(3, 0, 0.5, EngineStats(steps=7))
    pair.engines[1].on_snapshot(snapshot)
    assert by_engine("strobe:engine_steps") == [0, 7]
    pair.engines[1].on_end()
    assert by_engine("strobe:engine_steps") == [0, 7]
    assert by_engine("vllm:num_requests_running") == [0, 0]
    assert by_engine("vllm:cache_config_info") == [1]
    pair.engines[1].on_restart()
    pair.engines[1]._handle(READY._replace(pages=50))
    assert by_engine("strobe:engine_restarts") == [0, 1]
    assert by_engine("vllm:cache_config_info") == [1, 1]
    assert by_engine("vllm:cache_config_info", num_gpu_blocks="50") == [1]


def test_all_engines_fill_the_queue_together(pair: Replicas):
    served = serving(max_waiting=1)
    served.client = pair
    served.check_room(2 * READY.max_num_seqs + 1)
    with pytest.raises(ValueError, match="takes at most 9 at once"):
        served.check_room(2 * READY.max_num_seqs + 2)


# processes


def environments(count: int, visible: str | None, **config: Any) -> list[dict[str, str]]:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    replicas = make_replicas(EngineConfig(**config), count, environ)
    assert [replica.number for replica in replicas] == list(range(count))
    return [dict(replica.environment) for replica in replicas]


@pytest.mark.parametrize(
    ("visible", "ranks", "expected"),
    [
        (None, 1, ["0", "1"]),
        (None, 2, ["0,1", "2,3"]),
        ("6,GPU-a,2,1,0", 2, ["6,GPU-a", "2,1"]),
    ],
)
def test_each_engine_has_its_gpus(visible: str | None, ranks: int, expected: list[str]):
    variables = environments(2, visible, tensor_parallel_size=ranks)
    assert [entry["CUDA_VISIBLE_DEVICES"] for entry in variables] == expected


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strobe.server.engine_process.resources.usable_cores", lambda: 9)
    assert environments(2, None, device="cpu") == [{"OMP_NUM_THREADS": "4"}] * 2
    variables = environments(2, "", device="cpu", tensor_parallel_size=2)
    assert variables == [{"OMP_NUM_THREADS": "2"}] * 2
    assert environments(16, None, device="cpu") == [{"OMP_NUM_THREADS": "1"}] * 16
    fewer = make_replicas(CPU, 2, {"OMP_NUM_THREADS": "3"})
    assert fewer[0].environment == {"OMP_NUM_THREADS": "3"}


@pytest.mark.parametrize(
    ("free", "asked", "expected"),
    [(64 << 30, None, None), (6 << 30, None, 768 << 20), (6 << 30, "1G", "1G")],
)
def test_caches_share_the_memory_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch, free: int, asked: str | None, expected: Any
):
    monkeypatch.setattr("strobe.server.engine_process.resources.free_host_memory", lambda: free)
    config = CPU.with_(kv_cache_memory=asked, tensor_parallel_size=2)
    assert share_memory(config, 2).kv_cache_memory == expected


def test_caches_beyond_memory_are_one_sentence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("strobe.server.engine_process.resources.free_host_memory", lambda: 7 << 30)
    with pytest.raises(
        ValueError, match=r"^data_parallel_size is 2 and kv_cache_memory is 4G, which takes 8589934"
    ):
        make(monkeypatch, kv_cache_memory="4G")
    with pytest.raises(
        ValueError, match=r"^data_parallel_size is 2 and kv_offload_memory is 4G, which takes 85899"
    ):
        share_memory(CPU.with_(kv_offload_memory="4G"), 2)


def test_process_has_its_environment_before_torch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    seen: list[Any] = []

    class Worker:
        @staticmethod
        def run_engine(pipe: Any, config: EngineConfig, **options: Any) -> None:
            seen.append((pipe, config, options))

    def imported(name: str) -> type[Worker]:
        seen.append((name.rpartition(".")[2], os.environ["CUDA_VISIBLE_DEVICES"]))
        return Worker

    monkeypatch.setattr("importlib.import_module", imported)
    pipe: Any = object()
    replica = Replica(1, {"CUDA_VISIBLE_DEVICES": "6"})
    run(pipe, CPU, ServerConfig().logs, None, replica)
    options = {"logs": ServerConfig().logs, "kv_events": None, "replica": replica}
    assert seen == [("worker", "6"), (pipe, CPU, options)]


def test_missing_gpus_are_one_sentence(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ValueError,
        match=re.escape(
            "data_parallel_size is 2, which takes 4 GPUs, but CUDA_VISIBLE_DEVICES is '0,1,2'; ask "
            "for fewer, or for device cpu."
        ),
    ):
        environments(2, "0,1,2", tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"^device is 'cuda:1', but data_parallel_size is 2"):
        environments(2, None, device="cuda:1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    third = Replica(1, {"CUDA_VISIBLE_DEVICES": "2,3"})
    with pytest.raises(ValueError, match=r"engine 1 the CUDA devices 2,3, but .* has 1 of"):
        check_gpus(EngineConfig(tensor_parallel_size=2), third)
    check_gpus(EngineConfig(), third)
    check_gpus(EngineConfig(device="cpu", tensor_parallel_size=2), third)


def test_each_engine_publishes_at_its_own_port():
    config = KVEventsConfig(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5577")
    assert config.of_rank(0) == config
    other = config.of_rank(2)
    assert (other.endpoint, other.replay_endpoint) == ("tcp://*:5559", "tcp://*:5579")
    assert KVEventsConfig(endpoint="ipc:///run/kv").of_rank(1).endpoint == "ipc:///run/kv_dp1"


def test_log_names_the_engine(pair: Replicas, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "strobe"):
        for engine in (*pair.engines, EngineClient(CPU, ServerConfig().logs)):
            engine.restarting = True
            engine._handle(READY)
    texts = [PlainFormatter().format(record) for record in caplog.records]
    assert [text.split(": ", 1)[1] for text in texts] == [
        "engine 0: the engine can answer again",
        "engine 1: the engine can answer again",
        "the engine can answer again",
    ]
    records = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    assert [record.get("engine") for record in records] == [0, 1, None]
    own = JsonFormatter(engine=pair.engines[1].logs.engine)
    assert json.loads(own.format(caplog.records[2]))["engine"] == 1
