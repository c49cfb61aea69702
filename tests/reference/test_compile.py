"""Engines whose operations are compiled C: the answers of plain torch, alone, in batches, drafting
and on ranks."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from strobe.attention.compiled import CompiledPlan
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.kernels.cpu import library
from strobe.kernels.cpu.library import CompilerMissing, load_library
from strobe.models.ops.compiled_ops import CompiledOps
from strobe.models.ops.torch_ops import TorchOps
from strobe.models.target import Target
from strobe.sampling_params import SamplingParams
from strobe.tools.verify.reference import StrobeReference
from tests.support.engine_runs import run
from tests.support.rank_threads import ranks
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_draft, make_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = GREEDY.clone(temperature=1.0, seed=7)
PROMPTS = [[5, 7, 9, 11], list(range(3, 40)), [8] * 9, [4, 3, 2]]
LONG = [*range(3, 60)] * 2  # more rows than C attends from


@pytest.fixture
def with_compiler() -> None:
    try:
        load_library()
    except CompilerMissing as missing:
        pytest.skip(str(missing))


def pair(tmp_path: Path, family: str, **options: Any) -> EngineConfig:
    """Write a pair; return settings for it."""
    make, changes = {**FAMILIES, "qwen3": (make_target, {})}[family]
    make(tmp_path / "target", **changes)
    defaults: dict[str, Any] = {
        "target": str(tmp_path / "target"),
        "draft": str(make_draft(tmp_path / "draft")),
        "device": "cpu",
        "kv_cache_memory": "8MiB",
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 160,
        "adaptive": False,
        "compile": True,
    }
    return EngineConfig(**(defaults | options))


def answers(engine: Engine) -> list[list[int]]:
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED, GREEDY]
    return run(engine, [*PROMPTS, LONG], params)


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the attention calls of plans that C and that plain torch run."""
    counts: Counter[str] = Counter()
    for name in ("heads", "joined", "__call__"):
        method = getattr(CompiledPlan, name)

        def wrapped(
            self: CompiledPlan, *args: Any, method: Any = method, name: str = name, **options: Any
        ) -> Any:
            counts["compiled" if name == "heads" else "plain"] += 1
            return method(self, *args, **options)

        monkeypatch.setattr(CompiledPlan, name, wrapped)
    return counts


KINDS = {
    "llama": "compiled",
    "qwen3": "compiled",
    "mistral": "compiled",
    "qwen3_moe": "compiled",
    "gemma4": "both",
    "gpt_oss": "both",
    "qwen3_5_moe": "both",
}
"""Families, and what attends: sinks, heads of 512 and output gates are left to plain torch."""


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize("family", KINDS)
def test_compiled_engine_answers_as_plain_torch_does(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
):
    counts = counted(monkeypatch)
    settings = pair(tmp_path, family)
    drafting = answers(Engine(settings))
    plain = Engine(settings.with_(draft=None, method="none"))
    assert answers(plain) == drafting
    alone = [run(plain, [prompt], GREEDY)[0] for prompt in [PROMPTS[0], LONG]]
    assert alone == [drafting[0], drafting[4]]
    assert counts["compiled"] > 0
    assert bool(counts["plain"]) == (KINDS[family] == "both")
    assert answers(Engine(settings.with_(compile=False))) == drafting


@pytest.mark.usefixtures("with_compiler")
def test_drafter_with_convolutions_and_sinks(tmp_path: Path):
    settings = pair(tmp_path, "qwen3", draft=str(make_draft(tmp_path / "sinks", sinks=True)))
    drafting = answers(Engine(settings))
    assert drafting == answers(Engine(settings.with_(draft=None, method="none")))


@pytest.mark.usefixtures("with_compiler")
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_ranks_answer_as_one_does(tmp_path: Path, family: str):
    settings = pair(tmp_path, family)
    expected = answers(Engine(settings))
    with ranks(settings, 2) as engine:
        assert answers(engine) == expected


@pytest.mark.usefixtures("with_compiler")
def test_asked_reference_attends_in_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counts = counted(monkeypatch)
    settings = pair(tmp_path, "qwen3", attention_backend="reference")
    plain = answers(Engine(settings))
    assert not counts
    assert plain == answers(Engine(settings.with_(attention_backend="auto")))


@pytest.mark.usefixtures("with_compiler")
def test_reference_of_verify_is_plain_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = Engine(pair(tmp_path, "qwen3"))
    target = engine.runner.model
    assert isinstance(target, Target)
    reference = StrobeReference(engine.resolved, target)
    counts = counted(monkeypatch)
    assert reference.logits(PROMPTS[1], 1).shape[0] == len(PROMPTS[1]) - 1
    assert not counts
    assert type(reference.engine.runner.model.ops) is TorchOps
    assert type(target.ops) is CompiledOps


def test_library_is_compiled_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    with_compiler: None,
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO, library.logger.name):
        load_library.__wrapped__()
        load_library.__wrapped__()
        monkeypatch.setattr(library, "_loaded_gomp", lambda: None)
        load_library.__wrapped__()
    origins = [" compiled by " in message for message in caplog.messages]
    assert origins == [True, False, True]
    names = [path.suffix for path in (tmp_path / "strobe" / "compiled").iterdir()]
    assert names == [".so", ".so"]


def test_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    settings = pair(tmp_path, "qwen3")
    with pytest.raises(ValueError, match="none of cc, gcc, clang; install one, such as gcc"):
        resolve(settings)
    monkeypatch.setenv("CC", "my-cc -m64")
    with pytest.raises(ValueError, match="there is no 'my-cc', which CC names"):
        resolve(settings)
    resolve(settings.with_(compile=False))


def test_failing_compiler_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\necho 'x.c:1: error: no such thing' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(failing))
    with pytest.raises(CompilerMissing, match=r"failed: x.c:1: error: no such thing; set CC"):
        load_library.__wrapped__()


@pytest.mark.usefixtures("with_compiler")
def test_other_dtype_is_refused(tmp_path: Path):
    settings = pair(tmp_path, "qwen3", dtype="bfloat16")
    with pytest.raises(ValueError, match="compile is set, but dtype is 'bfloat16'"):
        resolve(settings)
