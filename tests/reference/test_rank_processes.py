"""Ranks as processes: they start, end together, and say why."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.parallel import shared_memory, torch_group
from strobe.parallel.group import RankFailed
from strobe.parallel.torch_group import TorchGroup
from strobe.ranks import leader
from strobe.ranks.follower import GrammarPrecompiler
from strobe.ranks.leader import Ranks, start_engine
from strobe.ranks.rank_messages import Launch
from strobe.sampling_params import SamplingParams, StructuredOutputs
from tests.server.support.polling import until
from tests.support.engine_runs import run
from tests.support.processes import has_ended
from tests.support.tiny_checkpoints import make_draft, make_target, make_tokenizer

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1, seed=3, max_tokens=24, ignore_eos=True, logprobs=2),
]


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.fixture
def settings(tmp_path: Path) -> EngineConfig:
    make_target(tmp_path / "target")
    make_tokenizer(tmp_path / "target")
    return EngineConfig(
        target=str(tmp_path / "target"),
        draft=str(make_draft(tmp_path / "draft")),
        device="cpu",
        kv_cache_memory="8MiB",
        max_model_len=96,
        max_num_seqs=4,
        tensor_parallel_size=2,
    )


@pytest.fixture
def started(
    settings: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Engine, Ranks]]:
    """Return a function that starts an engine; it returns the other ranks as well."""
    made: list[Ranks] = []

    class Watched(Ranks):
        def __init__(self, *args: Any):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(leader, "Ranks", Watched)
    threads = torch.get_num_threads()

    def start(**changes: Any) -> tuple[Engine, Ranks]:
        engine = start_engine(settings.with_(**changes))
        return engine, made[-1]

    yield start
    for each in made:
        if not each._stopping:
            each.stop()
    torch.set_num_threads(threads)


def test_processes_answer_as_one_rank_does(settings: EngineConfig, started: Any):
    expected = run(Engine(settings.with_(tensor_parallel_size=1)), PROMPTS, PARAMS)
    engine, others = started()
    assert run(engine, PROMPTS, PARAMS) == expected
    assert run(engine, PROMPTS, PARAMS) == expected
    (process,) = others._processes
    del engine
    others.stop()
    assert process.returncode == 0


@pytest.mark.full
def test_processes_answer_as_one_rank_does_by_gloo(
    settings: EngineConfig, started: Any, monkeypatch: pytest.MonkeyPatch
):
    """Gloo serves CPUs of other kinds, and calls torch.distributed as NCCL does."""
    monkeypatch.setattr(leader, "in_shared_memory", lambda device: False)
    monkeypatch.setattr(leader, "STALL_SECONDS", 0.5)
    expected = run(Engine(settings.with_(tensor_parallel_size=1)), PROMPTS, PARAMS)
    engine, others = started()
    assert run(engine, PROMPTS, PARAMS) == expected
    (process,) = others._processes
    others.stop()
    assert process.returncode == 0
    engine, others = started()  # also after another group of this process
    (process,) = others._processes
    engine.add(PROMPTS[0], PARAMS[0].clone(max_tokens=60))
    engine.step()
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RuntimeError):  # by Gloo, once the process is killed
        finish(engine)
    with pytest.raises(RankFailed, match=r"Rank 1 has stalled: the last step it began is \d+,"):
        engine.check_device()


def signal_at_start(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    """Send each rank's process a signal as soon as it exists."""
    start = leader.Ranks._start

    def start_and_signal(self: Ranks, message: Any) -> None:
        start(self, message)
        os.kill(self._processes[-1].pid, number)

    monkeypatch.setattr(leader.Ranks, "_start", start_and_signal)


def test_rank_that_ends_before_the_others_meet_it_is_named(
    started: Any, monkeypatch: pytest.MonkeyPatch
):
    """torch.distributed would wait for it for minutes."""
    monkeypatch.setattr(leader, "in_shared_memory", lambda device: False)
    signal_at_start(monkeypatch, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"Rank 1 has ended while it started \(exit code -9\)"):
        started()


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "gloo"])
def test_rank_that_ends_while_it_loads_is_named(
    started: Any, monkeypatch: pytest.MonkeyPatch, in_memory: bool
):
    monkeypatch.setattr(leader, "in_shared_memory", lambda device: in_memory)
    meet = leader.Ranks.meet

    def meet_and_kill(self: Ranks, resolved: Any) -> Any:
        group = meet(self, resolved)
        self._processes[-1].kill()
        return group

    monkeypatch.setattr(leader.Ranks, "meet", meet_and_kill)
    with pytest.raises(RankFailed, match=r"Rank 1 has ended while it started \(exit code -9\)"):
        started()


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "gloo"])
def test_rank_that_never_starts_is_named(
    started: Any, monkeypatch: pytest.MonkeyPatch, in_memory: bool
):
    monkeypatch.setattr(leader, "in_shared_memory", lambda device: in_memory)
    monkeypatch.setattr(leader, "_STOP_SECONDS", 0.1)
    monkeypatch.setattr(shared_memory if in_memory else torch_group, "START_SECONDS", 0.2)
    signal_at_start(monkeypatch, signal.SIGSTOP)
    with pytest.raises(RankFailed, match="Rank 1 has not started within 900 s"):
        started()


def test_grammars_compile_while_steps_run():
    class Compiler:
        def __init__(self) -> None:
            self.may_end, self.compiled = threading.Event(), list[StructuredOutputs]()

        def compile(self, structured: StructuredOutputs) -> None:
            if structured.regex == "a+":
                self.may_end.wait(30)
            self.compiled.append(structured)

    def plan(structured: StructuredOutputs | None) -> Any:
        sampling = SamplingParams(structured_outputs=structured)
        return SimpleNamespace(admitted=[SimpleNamespace(sampling=sampling)])

    compiler: Any = Compiler()
    slow, quick = StructuredOutputs(regex="a+"), StructuredOutputs(regex="b+")
    precompiler = GrammarPrecompiler(compiler)
    precompiler.compile(slow)
    precompiler.compile(slow)
    precompiler.compile(quick)
    for structured in (None, quick):
        precompiler.wait_for(plan(structured))
    assert compiler.compiled == [quick]
    threading.Timer(0.05, compiler.may_end.set).start()
    precompiler.wait_for(plan(slow))
    assert compiler.compiled == [quick, slow]


def test_other_ranks_are_sent_grammars_before_their_requests(
    started: Any, monkeypatch: pytest.MonkeyPatch
):
    sent: list[Any] = []
    send = leader.Ranks._send

    def keep(self: Ranks, message: Any) -> None:
        sent.append(message)
        send(self, message)

    monkeypatch.setattr(leader.Ranks, "_send", keep)
    engine, others = started()
    grammar = StructuredOutputs(regex="[ab]{4,9}")
    params = PARAMS[0].clone(ignore_eos=False, structured_outputs=grammar)
    run(engine, PROMPTS, [params, params])
    plans = [message.plan for message in sent if isinstance(message, Launch)]
    assert sent[0] == grammar
    assert len(sent) == 1 + len(plans)
    assert plans[0].admitted
    others.stop()  # a grammar that comes later is compiled here, and waits for nobody
    engine.compile(params.clone(structured_outputs=StructuredOutputs(regex="[cd]")))


@pytest.mark.full
def test_rank_that_reads_no_more_plans_ends_the_group(
    started: Any, monkeypatch: pytest.MonkeyPatch
):
    """The plans fill its pipe, which the first rank would wait for."""
    monkeypatch.setattr(leader, "STALL_SECONDS", 1.0)
    engine, others = started()
    engine.add(PROMPTS[0], PARAMS[0])
    engine.step()
    (process,) = others._processes
    os.kill(process.pid, signal.SIGSTOP)
    plan: Any = "x" * (1 << 24)
    with pytest.raises(RankFailed, match="Rank 1 has stalled: the last step it began is 1, while"):
        others.send(plan, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "stalls"])
def test_group_ends_with_a_rank(
    started: Any, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    if number == signal.SIGSTOP:
        monkeypatch.setattr(shared_memory, "STALL_SECONDS", 0.5)
    engine, others = started()
    engine.add(PROMPTS[0], PARAMS[0].clone(max_tokens=60))
    for _ in range(3):
        engine.step()
    (process,) = others._processes
    os.kill(process.pid, number)
    sentence = (
        r"Rank 1 has ended in step \d+ \(exit code -9\)\."
        if number == signal.SIGKILL
        else r"Rank 1 has stalled: its last exchange of tensors was number \d+, in step \d+"
    )
    with pytest.raises(RankFailed, match=sentence):
        finish(engine)
    with pytest.raises(RankFailed, match="Rank 1"):
        engine.check_device()
    others.stop()
    assert process.returncode == -9


def test_rank_that_is_out_of_step_ends_the_group(started: Any):
    engine, others = started()
    engine.add(PROMPTS[0], PARAMS[0])
    engine.step()
    others.group.step += 1  # the next plan does not follow
    with pytest.raises(RankFailed, match=r"Rank 1 has ended: Rank 1 has run step 1, but was told"):
        finish(engine)


def test_ranks_in_different_steps_are_noticed(started: Any):
    engine, others = started()
    engine.add(PROMPTS[0], PARAMS[0])
    send = others.send

    def misled(plan: Any, in_flight: int) -> None:
        send(plan, in_flight)
        others.group.step += 1

    engine.on_launch = misled
    with pytest.raises(RankFailed, match=r"The ranks are out of step: they run the steps \[2, 1\]"):
        engine.step()


def test_failure_of_one_rank_at_the_start_is_the_groups(
    started: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    own = leader.of_rank
    monkeypatch.setattr(
        leader,
        "of_rank",
        lambda resolved, rank: own(
            leader.replace(resolved, config=resolved.config.with_(kv_cache_memory=2**60)), rank
        ),
    )
    with pytest.raises(ValueError, match=r"^Rank 1 has ended: kv_cache_memory is 1152921504606"):
        started()
    assert "kv_cache_memory" not in capfd.readouterr().err


def test_ranks_end_with_the_first_ones_process(settings: EngineConfig):
    """Also when that has no time to stop them."""
    code = f"""
import os, signal
from strobe.config import EngineConfig
from strobe.ranks import leader
made = []
init = leader.Ranks.__init__
def keep(self, *args):
    init(self, *args)
    made.append(self)
leader.Ranks.__init__ = keep
leader.start_engine({settings!r})
print(made[0]._processes[0].pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    until(lambda: has_ended(int(done.stdout)), "the other rank has ended")


def stop_in_step(model: Any) -> None:
    """Let the other ranks stop in the middle of their third forward."""
    if os.environ.get("STROBE_TEST_LEADER") == str(os.getpid()):
        return
    embed, calls = model.ops.embed, [0]

    def counted(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return embed(*args)

    model.ops.embed = counted


@pytest.mark.full
def test_rank_that_stalls_within_a_step_ends_a_group_by_gloo(
    settings: EngineConfig, monkeypatch: pytest.MonkeyPatch
):
    """All ranks have begun the step by then."""
    monkeypatch.setattr(leader, "in_shared_memory", lambda device: False)
    monkeypatch.setattr(leader, "STALL_SECONDS", 1.0)
    monkeypatch.setenv("STROBE_TEST_LEADER", str(os.getpid()))
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    threads = torch.get_num_threads()
    engine = start_engine(settings, prepare=stop_in_step)
    engine.add(PROMPTS[0], PARAMS[0])
    with pytest.raises(RuntimeError):
        finish(engine)
    with pytest.raises(RankFailed, match=r"Rank 1 has stalled: the last step it began is 3, while"):
        engine.check_device()
    torch.set_num_threads(threads)


@pytest.fixture
def group_of_four() -> TorchGroup:
    """A group that only counts."""
    group = object.__new__(TorchGroup)
    group.rank, group.size, group.failure, group._finished = 0, 4, None, None
    group._numbers = np.zeros((4, 8), np.int64)
    group._own = group._numbers[0]
    return group


def set_numbers(group: TorchGroup, *numbers: tuple[int, int, int, int]) -> None:
    """numbers: of each rank, the step that it began, launched, its exchanges, and the step that its
    device finished."""
    group._numbers[:, :4] = numbers


def test_rank_with_nothing_to_do_does_not_stall(group_of_four: TorchGroup):
    """Nor does one that waits for the first rank."""
    group = group_of_four
    set_numbers(group, (0, 0, 3, 0), (0, 0, 3, 0), (0, 0, 2, 0), (0, 0, 4, 0))
    assert [group.progress(rank) is None for rank in (1, 2, 3)] == [True, False, True]
    set_numbers(group, (7, 7, 60, 6), (7, 7, 50, 7), (7, 7, 50, 6), (7, 6, 50, 6))
    assert [group.progress(rank) is None for rank in (1, 2, 3)] == [True, False, False]
    set_numbers(group, (7, 6, 60, 6), (7, 7, 50, 6), (7, 6, 50, 6), (6, 6, 50, 6))
    assert [group.progress(rank) is None for rank in (1, 2, 3)] == [True, False, False]


def test_device_copies_the_step_that_it_has_finished(group_of_four: TorchGroup):
    group = group_of_four
    group.step = 1
    group.end_step()
    assert group._own.tolist()[:4] == [1, 1, 0, 1]
    device, shared = torch.zeros(2, 1, dtype=torch.int64)
    group._finished, group.step = (device, shared), 2
    group.end_step()
    assert (group._own.tolist()[:4], shared.item()) == ([2, 2, 0, 1], 2)


@pytest.mark.parametrize(("numbers", "message"), [
    ((7, 6, 42, 6), "Rank 3 has stalled: the last step it began is 7, while rank 0 began 7 more"),
    ((7, 7, 50, 5), r"Rank 3 has stalled: its GPU has not finished step 7 within 0 s\."),
], ids=["process", "gpu"])  # fmt: skip
def test_rank_for_which_the_others_wait_is_named(
    group_of_four: TorchGroup,
    monkeypatch: pytest.MonkeyPatch,
    numbers: tuple[int, int, int, int],
    message: str,
):
    monkeypatch.setattr(leader, "STALL_SECONDS", 0.0)
    monkeypatch.setattr(leader, "_CHECK_SECONDS", 0.001)
    pipes = [Pipe() for _ in range(3)]
    ranks = object.__new__(Ranks)
    ranks._pipes, ranks._blocked = [pipe[0] for pipe in pipes], None
    ranks.group = group_of_four
    set_numbers(group_of_four, (7, 7, 50, 6), (7, 7, 50, 6), (7, 7, 50, 6), numbers)
    pipe = ranks._first_failed()
    assert re.match(message, ranks._reason(ranks._pipes.index(pipe) + 1).error)


@pytest.mark.full
def test_rank_ends_if_the_first_one_ends_before_they_meet(settings: EngineConfig):
    code = f"""
import os, signal
from strobe.ranks import leader
start = leader.Ranks._start
def start_and_end(self, message):
    start(self, message)
    print(self._processes[0].pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
leader.Ranks._start = start_and_end
from strobe.config import EngineConfig
leader.start_engine({settings!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    until(lambda: has_ended(int(done.stdout)), "the other rank has ended")
