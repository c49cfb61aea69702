"""The engine's worker in a thread: a real engine and a pipe, with steps that the test allows."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.grammars.trial import GrammarsUnavailable
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.engine_messages import (
    Finish,
    Grammars,
    Rejected,
    Release,
    StepEvents,
    Stop,
    Submit,
)
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.server.engine_process.worker import Worker
from strobe.step import TokenEvent
from strobe.text.tokenizer import Tokenizer
from tests.server.support.polling import PATIENCE, until
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import make_engine, run
from tests.support.text_pair import Pair, make_pair

PROMPT = list(range(100, 130))
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
FREE = 10_000
"""A number of steps that no test reaches."""

both_depths = pytest.mark.parametrize("overlap", [1, 2])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("pair"))


class Desk:
    """The server's end of a worker's pipe. The engine takes a step with work only when allowed."""

    def __init__(self, engine: Engine):
        self.pipe, theirs = multiprocessing.Pipe()
        self.engine, self.worker = engine, Worker(engine, theirs)
        self.steps, self.allowed = 0, threading.Semaphore(0)
        self.events: list[TokenEvent] = []
        self.refused: dict[int, str] = {}
        self.unavailable: set[int] = set()
        self.grammar_faults: list[str | None] = []
        self.snapshot: EngineSnapshot | None = None
        self._step, engine.step = engine.step, self._paced
        self.failure: Exception | None = None
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            self.worker.run()
        except Exception as error:
            self.failure = error

    def _paced(self) -> Any:
        if self.engine.has_work:
            assert self.allowed.acquire(timeout=PATIENCE), "no step was allowed"
            self.steps += 1
        return self._step()

    def is_sent(self) -> bool:
        """Whether the worker's next message is available, or the worker has ended."""
        return not self.worker.inbox.empty() or not self.thread.is_alive()

    def allow(self, steps: int) -> None:
        self.allowed.release(steps)

    def send(self, *messages: Any) -> None:
        """Send a message and wait until it is in the worker's inbox."""
        for message in messages:
            self.pipe.send(message)
        self.pipe.send(Finish(-1, None, "abort"))  # no such request: earlier messages have arrived
        until(self._all_read, "the messages are read")

    def _all_read(self) -> bool:
        """Whether the listening thread has emptied the pipe."""
        return not self.worker.pipe.poll()

    def take(self) -> None:
        """Read the worker's messages so far."""
        while self.pipe.poll():
            message = self.pipe.recv()
            if isinstance(message, StepEvents):
                self.events += message.events
                self.snapshot = message.snapshot or self.snapshot
            elif isinstance(message, Grammars):
                self.grammar_faults.append(message.fault)
            else:
                assert isinstance(message, Rejected)
                self.refused[message.key] = message.error
                if not message.user_error:
                    self.unavailable.add(message.key)

    def hear(self, look: Callable[[], Any], what: str) -> None:
        """Read messages until `look` returns true."""

        def listen() -> Any:
            self.take()
            return look()

        until(listen, what)

    def tokens(self, key: int, choice: int = 0) -> list[int]:
        return [t for e in self.events if (e.key, e.sibling) == (key, choice) for t in e.tokens]

    def reasons(self, key: int) -> dict[int, str]:
        return {e.sibling: e.finish_reason for e in self.events if e.key == key and e.finish_reason}

    @property
    def free(self) -> bool:
        """Whether all pages are free."""
        return self.engine.components.pool.available == self.engine.components.pool.capacity


@contextmanager
def working(pair: Pair, **options: Any) -> Iterator[Desk]:
    options = {"max_num_seqs": 2, "max_model_len": 256, "page_size": 4} | options
    config = EngineConfig(target=str(pair.target), draft=str(pair.draft)).with_(**options)
    desk = Desk(make_engine(config))
    try:
        yield desk
        if not desk.pipe.closed:
            desk.pipe.send(Stop())
        desk.allow(FREE)
        until(lambda: not desk.thread.is_alive(), "the worker leaves")
        assert desk.failure is None
        check_engine(desk.engine)
    finally:
        desk.allow(FREE)
        desk.pipe.close()
        desk.thread.join(PATIENCE)


@both_depths
def test_disconnect_while_decoding_frees_pages_within_two_steps(pair: Pair, overlap: int):
    with working(pair, overlap=overlap) as desk:
        desk.allow(3)
        desk.send(Submit(1, PROMPT, LONG, "a"))
        desk.hear(lambda: desk.steps == 3 and desk.tokens(1), "the first tokens")
        assert not desk.free
        desk.send(Finish(1, None, "abort"))
        desk.allow(2)
        until(lambda: desk.free, "the pages come back with the second step")
        assert desk.steps <= 5
        assert not desk.worker.requests


@both_depths
def test_disconnect_during_prefill_frees_pages_within_two_steps(pair: Pair, overlap: int):
    prompt = list(range(200, 400))
    with working(pair, overlap=overlap, max_num_batched_tokens=16) as desk:
        desk.allow(2)
        desk.send(Submit(1, prompt, LONG, "a"))
        until(lambda: desk.steps == 2, "two steps of the prompt")
        assert not desk.free
        desk.send(Finish(1, None, "abort"))
        desk.allow(2)
        until(lambda: desk.free, "the pages come back with the second step")
        desk.take()
        assert not desk.events


@both_depths
def test_disconnect_in_queue_never_runs(pair: Pair, overlap: int):
    with working(pair, overlap=overlap, max_num_seqs=1) as desk:
        desk.allow(2)
        desk.send(Submit(1, PROMPT, SHORT, "a"), Submit(2, PROMPT, SHORT, "b"))
        until(lambda: desk.steps == 2, "the first runs")
        until(lambda: len(desk.engine.scheduler.waiting) == 1, "the second waits")
        desk.send(Finish(2, None, "abort"))
        desk.allow(1)
        until(lambda: not desk.engine.scheduler.waiting, "the second has left with one step")
        desk.allow(FREE)
        desk.hear(lambda: desk.reasons(1), "the first comes to its end")
        assert not desk.tokens(2)
        assert len(desk.tokens(1)) == 12


def test_idle_engine_reports_snapshot(pair: Pair):
    """Otherwise /metrics would show the last request as running until the next one."""
    with working(pair) as desk:
        desk.allow(2)
        desk.send(Submit(1, PROMPT, LONG, "a"))
        desk.hear(lambda: desk.tokens(1) and desk.snapshot, "the first request")
        assert desk.snapshot is not None
        assert desk.snapshot.running == 1
        assert desk.snapshot.kv_used > 0
        desk.send(Finish(1, None, "abort"))
        desk.allow(1)
        desk.hear(lambda: desk.snapshot and not desk.snapshot.running, "an idle engine")
        assert desk.snapshot.kv_used == 0


def test_prefix_reset_finds_no_prefix(pair: Pair):
    prompt = list(range(5, 25))
    params = SamplingParams(temperature=0, max_tokens=1)
    with working(pair) as desk:
        desk.allow(FREE)
        for key in range(3):
            desk.send(*[Release()] * (key == 2), Submit(key, prompt, params, str(key)))
            desk.hear(lambda key=key: desk.reasons(key), "the answer")
        cached = [event.start.num_cached for event in desk.events if event.start is not None]
    assert cached[0] == cached[2] == 0
    assert cached[1] == 16


def test_events_match_the_engine_alone(pair: Pair):
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20, ignore_eos=True)
    config = EngineConfig(target=str(pair.target), draft=str(pair.draft), max_model_len=256)
    alone = run(make_engine(config), [PROMPT], params)
    with working(pair, max_num_seqs=4) as desk:
        desk.allow(FREE)
        desk.send(Submit(7, PROMPT, params, "a"), Submit(8, PROMPT, SHORT, "b"))
        desk.hear(lambda: len(desk.reasons(7)) == 3 and desk.reasons(8), "all four answers")
        assert [desk.tokens(7, choice) for choice in range(3)] == alone
        assert len({tuple(answer) for answer in alone}) == 3
        for key, choice in ((7, 0), (7, 1), (7, 2), (8, 0)):
            own = [event for event in desk.events if (event.key, event.sibling) == (key, choice)]
            assert own[0].start is not None
            assert all(event.start is None for event in own[1:])
            assert [e.finish_reason for e in own] == [None] * (len(own) - 1) + ["length"]
        assert not desk.worker.requests


def test_one_of_several_answers_ends_alone(pair: Pair):
    with working(pair, max_num_seqs=4) as desk:
        desk.allow(3)
        params = LONG.clone(n=3, max_tokens=60, temperature=1.0)
        desk.send(Submit(1, PROMPT, params, "a"))
        desk.hear(lambda: desk.steps == 3 and desk.tokens(1, 1), "the first tokens")
        before = len(desk.tokens(1, 1))
        desk.send(Finish(1, 1, "stop"))
        desk.allow(FREE)
        desk.hear(lambda: len(desk.reasons(1)) == 2, "the other two end")
        assert desk.reasons(1) == {0: "length", 2: "length"}
        assert len(desk.tokens(1, 0)) == len(desk.tokens(1, 2)) == 60
        assert len(desk.tokens(1, 1)) - before <= 8, "more than the step that was under way"
        until(lambda: desk.free, "all pages come back")


def test_invalid_prompt_is_rejected_with_reason(pair: Pair):
    with working(pair) as desk:
        desk.allow(FREE)
        desk.send(
            Submit(1, [5] * 300, SHORT, "a"),
            Submit(2, [5, 999_999], SHORT.clone(n=2), "b"),
            Submit(3, PROMPT, SHORT, "c"),
        )
        desk.hear(lambda: desk.reasons(3), "the good one is answered")
        assert desk.refused.keys() == {1, 2}
        assert "300 tokens" in desk.refused[1]
        assert "999999" in desk.refused[2]
        assert not desk.worker.requests


def structured(**form: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=form)


def test_grammar_is_followed_or_rejected(pair: Pair):
    tokenizer = Tokenizer(Path(pair.target))
    with working(pair) as desk:
        desk.allow(FREE)
        desk.send(
            Submit(1, PROMPT, structured(choice=["left", "right"]), "a"),
            Submit(2, PROMPT, structured(regex="(unfinished"), "b"),
            Submit(3, PROMPT, SHORT, "c"),
        )
        desk.hear(lambda: desk.reasons(1) and desk.reasons(3) and desk.refused, "all three")
        assert tokenizer.decode(desk.tokens(1)) in ("left", "right")
        assert desk.reasons(1) == {0: "stop"}
        assert desk.refused.keys() == {2}
        assert "does not compile" in desk.refused[2]


def test_slow_grammar_blocks_no_other_request(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    begun, go = threading.Event(), threading.Event()
    with working(pair) as desk:
        compile = desk.engine.compile

        def slow(params: SamplingParams) -> None:
            begun.set()
            assert go.wait(PATIENCE)
            compile(params)

        monkeypatch.setattr(desk.engine, "compile", slow)
        desk.allow(FREE)
        constraint = structured(choice=["left", "right"])
        desk.send(Submit(1, PROMPT, constraint, "a"), Submit(2, PROMPT, constraint, "b"))
        assert begun.wait(PATIENCE)
        desk.send(Submit(3, PROMPT, SHORT, "c"), Submit(4, PROMPT, SHORT, "d"))
        desk.hear(lambda: desk.reasons(3) and desk.reasons(4), "those without a grammar")
        desk.send(Finish(1, None, "abort"))
        until(lambda: desk.worker.aborted, "the first is aborted before it reaches the engine")
        go.set()
        desk.hear(lambda: desk.reasons(2), "the one still wanted")
        assert not any(event.key == 1 for event in desk.events)
        assert not desk.worker.aborted
        assert not desk.worker.compiling


def test_abandoned_rejected_grammar_leaves_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    begun, go = threading.Event(), threading.Event()
    with working(pair) as desk:
        compile = desk.engine.compile

        def slow(params: SamplingParams) -> None:
            begun.set()
            assert go.wait(PATIENCE)
            compile(params)

        monkeypatch.setattr(desk.engine, "compile", slow)
        desk.send(Submit(1, PROMPT, structured(regex="(unfinished"), "a"))
        assert begun.wait(PATIENCE), "if aborted earlier, it would not be compiled at all"
        desk.send(Finish(1, None, "abort"))
        until(lambda: desk.worker.aborted, "it is aborted")
        go.set()
        until(lambda: not desk.worker.aborted, "it is forgotten")
        assert not desk.worker.compiling
        desk.take()
        assert not desk.refused


def test_unavailable_grammars_are_reported_until_they_compile_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.server.engine_process.worker._RETRY_GRAMMARS", 0.01)
    with working(pair) as desk:
        desk.allow(FREE)
        trial, fault = desk.engine.grammars.compiler.trial, GrammarsUnavailable("No process.")

        def broken() -> None:
            raise fault

        with monkeypatch.context() as patch:
            patch.setattr(trial, "_start", broken)
            desk.send(Submit(1, PROMPT, structured(regex="a+"), "a"))
            desk.hear(lambda: desk.refused, "the refusal")
            assert desk.unavailable == {1}
            assert desk.refused == {1: "No process."}
            assert desk.grammar_faults == ["No process."]
            desk.send(Submit(2, PROMPT, SHORT, "b"))
            desk.hear(lambda: desk.reasons(2), "a request without a grammar")
        desk.hear(lambda: desk.grammar_faults == ["No process.", None], "another attempt")
        desk.send(Submit(3, PROMPT, structured(regex="a+"), "c"))
        desk.hear(lambda: desk.reasons(3), "the grammar is followed")
        assert desk.unavailable == {1}


def test_failing_step_ends_only_the_faulty_request(pair: Pair):
    """Wherever the failure is, all other requests are answered normally."""
    with working(pair) as desk:
        launch, engine = desk.engine.launch, desk.engine

        def failing(plan: Any) -> Any:
            running = {record.slot: record.request for record in engine.scheduler.running}
            if any(running[span.slot].key == 1 for span in plan.spans):
                raise RuntimeError("not this one")
            return launch(plan)

        engine.launch = failing
        desk.send(*[Submit(key, PROMPT, SHORT, f"r{key}") for key in (0, 1, 2)])
        desk.allow(FREE)
        desk.hear(lambda: all(desk.reasons(key) for key in (0, 1, 2)), "all three have ended")
        ends = {e.key: e for e in desk.events if e.finish_reason is not None}
        assert {key: event.finish_reason for key, event in ends.items()} == {
            0: "length", 1: "error", 2: "length"
        }  # fmt: skip
        assert "not this one" in str(ends[1].error)


@pytest.mark.parametrize("busy", [False, True])
def test_engine_exits_when_server_is_gone(pair: Pair, busy: bool):
    with working(pair) as desk:
        if busy:
            desk.allow(2)
            desk.send(Submit(1, PROMPT, LONG, "a"))
            desk.hear(lambda: desk.steps == 2 and desk.tokens(1), "it runs")
        desk.pipe.close()
        until(desk.is_sent, "the worker got the message")
        desk.allow(1)
        until(lambda: not desk.thread.is_alive(), "the worker leaves with its next step")


def test_stop_aborts_running_requests(pair: Pair):
    with working(pair) as desk:
        desk.allow(2)
        desk.send(Submit(1, PROMPT, LONG, "a"), Submit(2, PROMPT, LONG, "b"))
        until(lambda: desk.steps == 2, "they run")
        desk.pipe.send(Stop())
        until(desk.is_sent, "the worker got the message")
        desk.allow(1)
        until(lambda: not desk.thread.is_alive(), "the worker leaves with its next step")
        assert desk.steps <= 3
