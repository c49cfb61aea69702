"""Steps whose results fail to commit: wherever that raises, no token is lost, repeated or changed,
and an advisory part that fails ends no step."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import make_engine, run
from tests.support.full_marks import full_where, nightly_where
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.tiny_checkpoints import make_tokenizer

COLD = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
TEXTS = [[(5 * i + n) % 50 for i in range(n)] for n in (9, 23, 5)]
PARAMS = [
    COLD,
    COLD.clone(temperature=0.9, seed=4, frequency_penalty=0.4, logprobs=1),
    COLD.clone(structured_outputs={"regex": "[ab0-9]{30}"}, ignore_eos=False, prompt_logprobs=0),
]


@pytest.fixture(scope="module")
def path(
    request: pytest.FixtureRequest, target: Any, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a target with a tokenizer, with recurrent layers if the parameter says so."""
    directory = tmp_path_factory.mktemp("target") / "target"
    if getattr(request, "param", "attention") == "recurrent":
        directory.mkdir()
        make_hybrid(directory)
    else:
        shutil.copytree(target.path, directory)
    make_tokenizer(directory)
    return directory


def engine_of(path: Path, method: Any, overlap: int, draft: Callable[..., Path]) -> Engine:
    options: dict[str, Any] = {} if method == "none" else {"num_drafts": 5}
    config = EngineConfig(
        str(path), draft=str(draft()), method=method, overlap=overlap, max_model_len=64,
        page_size=4, max_num_seqs=3, max_num_batched_tokens=24, **options,
    )  # fmt: skip
    return make_engine(config)


def finished(engine: Engine, requests: list[Request]) -> int:
    """Step to the end and return the number of steps that raised. Events must add up."""
    reported: dict[Any, list[int]] = {request.key: [] for request in requests}
    starts: list[Any] = []
    failures = 0
    for _ in range(400):
        try:
            for event in engine.step():
                reported[event.key] += event.tokens
                starts += [event.key] if event.start is not None else []
        except (MemoryError, KeyboardInterrupt):
            failures += 1
        check_engine(engine)
        if not engine.has_work:
            break
    assert not engine.has_work, "the engine hangs"
    assert reported == {request.key: request.output_ids for request in requests}
    assert sorted(starts) == sorted(reported)
    assert engine.components.pool.available == engine.components.pool.capacity
    return failures


class Fault:
    """Raises at our `call`-th function call within the `turn`-th call of `function`."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.turn, self.call = 0, 0
        self.kind: type[BaseException] = MemoryError
        self.calls = 0
        """Function calls within the last watched call."""

    def __call__(self, *args: Any, **named: Any) -> Any:
        self.turn -= 1
        if self.turn:
            return self.function(*args, **named)
        self.calls = 0

        def watch(frame: FrameType, event: str, arg: Any) -> None:
            if event == "call" and "strobe/" in frame.f_code.co_filename:
                self.calls += 1
                if self.calls == self.call:
                    sys.setprofile(None)
                    raise self.kind("injected")

        sys.setprofile(watch)
        try:
            return self.function(*args, **named)
        finally:
            sys.setprofile(None)


@full_where(lambda stage, overlap: (stage == "result") is (overlap == 1))
@nightly_where(
    lambda stage, overlap, method: (
        (stage == "result") is (overlap == 1) and method != "dflash+ngram"
    )
)
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize(
    ("path", "method"),
    [
        pytest.param("attention", "none", marks=pytest.mark.full),
        ("attention", "dflash+ngram"),
        pytest.param("attention", "dflash", marks=pytest.mark.full),
        pytest.param("attention", "ngram", marks=pytest.mark.full),
        pytest.param("recurrent", "dflash+ngram", marks=pytest.mark.full),
    ],
    indirect=["path"],
)
@pytest.mark.parametrize(
    ("stage", "stride"),
    [
        ("result", 9),
        ("commit", 23),
        pytest.param("result", 1, marks=pytest.mark.full),
        pytest.param("commit", 2, marks=pytest.mark.full),
    ],
)
def test_exception_while_committing_a_result_loses_no_token(
    stage: str, stride: int, method: str, overlap: int, path: Path, draft: Callable[..., Path]
):
    engine = engine_of(path, method, overlap, draft)
    expected = run(engine, TEXTS, PARAMS)
    assert expected == run(engine_of(path, "none", 1, draft), TEXTS, PARAMS)
    owner, name = (engine, "_result") if stage == "result" else (engine.scheduler, "commit")
    fault = Fault(getattr(owner, name))
    setattr(owner, name, fault)
    failures, max_calls = 0, 1
    for number in range(1, 400):
        # Calls of an early step, of a middle step, and of a step in which answers end.
        fault.turn, fault.call = (2, 6, 13)[number % 3], 1 + number // 3 * stride
        if fault.call > max_calls + 2 * stride:
            break
        fault.kind = (MemoryError, KeyboardInterrupt)[number % 2]
        requests = [engine.add(text, params) for text, params in zip(TEXTS, PARAMS, strict=True)]
        failures += finished(engine, requests)
        max_calls = max(max_calls, fault.calls)
        assert [request.output_ids for request in requests] == expected, fault.call
        scores = requests[2].prompt_logprobs
        assert [score and score.token for score in scores] == [None, *TEXTS[2][1:]]
    assert failures > 2


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("part", ["observe", "plan", "propose"])
def test_failing_advice_costs_no_token_and_is_logged_once(
    part: str, overlap: int, path: Path, draft: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    engine = engine_of(path, "dflash+ngram", overlap, draft)
    expected = run(engine, TEXTS, PARAMS)

    def failing(*args: Any) -> Any:
        raise RuntimeError("no advice")

    owner = engine.proposers["ngram"] if part == "propose" else engine.scheduler.draft_policy
    setattr(owner, part, failing)
    assert run(engine, TEXTS, PARAMS) == expected
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    subject = "Drafting" if part == "propose" else "The draft policy"
    assert record.getMessage() == f"{subject} failed; steps go on without its advice."
    assert record.exc_info
