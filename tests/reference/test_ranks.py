"""Several ranks give the answers of one."""

from __future__ import annotations

import random
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.parallel import shared_memory
from strobe.parallel.group import RankFailed
from strobe.parallel.shared_memory import SharedMemoryGroup, memory_size
from strobe.sampling_params import SamplingParams
from tests.support import random_engines
from tests.support.engine_runs import run
from tests.support.full_marks import full_where, nightly_where
from tests.support.quantized_checkpoints import quantize
from tests.support.random_engines import (
    TARGETS,
    EngineFactory,
    Findings,
    Setup,
    play_round,
    policy,
    prepared,
)
from tests.support.rank_threads import ranks
from tests.support.target_families import FAMILIES
from tests.support.tiny_checkpoints import make_draft, make_target, make_tokenizer

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11], [5, 6] * 10, [40, 2]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLINGS = [
    GREEDY.clone(logprobs=3),
    GREEDY.clone(temperature=1.0, seed=3, prompt_logprobs=1),
    GREEDY.clone(temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5),
    GREEDY.clone(structured_outputs={"regex": "[ab]{4,9}"}, ignore_eos=False),
]
DIVISIBLE: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 8},
    "gpt_oss in MXFP4": {"intermediate_size": 128, "num_local_experts": 8},
    "qwen3_5": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_5_moe": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "qwen3_next": {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
"""Changes that make a family's sizes divide by four ranks."""


def config(tmp_path: Path, family: str = "qwen3", **options: Any) -> EngineConfig:
    """Write a pair; return settings for it."""
    make, changes = {**FAMILIES, "qwen3": (make_target, {})}[family]
    make(tmp_path / "target", **{**changes, **DIVISIBLE.get(family, {})})
    make_tokenizer(tmp_path / "target")
    defaults: dict[str, Any] = {
        "target": str(tmp_path / "target"),
        "draft": str(make_draft(tmp_path / "draft")),
        "device": "cpu",
        "dtype": "float32",
        "kv_cache_memory": "8MiB",
        "max_model_len": 96,
        "max_num_seqs": 4,
    }
    return EngineConfig(**(defaults | options))


def answers(engine: Engine) -> list[list[int]]:
    """Answer all prompts twice; the second time their prefixes are cached."""
    return run(engine, PROMPTS, SAMPLINGS) + run(engine, PROMPTS, SAMPLINGS)


def check_ranks(settings: EngineConfig, size: int, **options: Any) -> None:
    """Also drafts must be those of one rank, except in near ties. options: settings that a rank
    alone does not have."""
    alone = Engine(settings)
    expected = answers(alone)
    with ranks(settings.with_(**options), size) as engine:
        assert answers(engine) == expected
        accepted = [e.stats.draft_counts.num_accepted for e in (alone, engine)]
        assert accepted[0] == accepted[1] > 0 or settings.adaptive


SHORT = {("qwen3", 2), ("gpt_oss in MXFP4", 2), ("qwen3_5_moe", 2)}
"""Families and numbers of ranks that `make test` runs: with heads alone, with experts in a stored
format, and with recurrent layers."""
ALL_FAMILIES = ["qwen3", *FAMILIES]


def is_other_size(family: str, size: int) -> bool:
    """Whether a family has the other number of ranks until the night."""
    return size != (4 if ALL_FAMILIES.index(family) % 2 else 2)


@full_where(lambda family, size: (family, size) not in SHORT)
@nightly_where(lambda family, size: (family, size) not in SHORT and is_other_size(family, size))
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_ranks_answer_as_one_does(tmp_path: Path, family: str, size: int):
    """Four ranks share two key-value heads, and the vocabulary of 61 tokens divides by none."""
    check_ranks(config(tmp_path, family), size)


@pytest.mark.parametrize("family", ["qwen3", "gemma4"])
def test_no_rank_gathers_all_logits(tmp_path: Path, family: str):
    """Greedy tokens need the largest ones, also where logits are capped, which makes close ones
    equal; sampled tokens need the rank's share of the rows."""
    settings = config(tmp_path, family, method="none")
    expected = run(Engine(settings), PROMPTS[:1], [GREEDY])
    with ranks(settings, 2) as engine:
        ops: Any = engine.runner.model.ops
        join, widths = ops.group.join, list[int]()

        def watched(x: torch.Tensor) -> torch.Tensor:
            widths.append(x.shape[1])
            return join(x)

        ops.group.join = watched
        assert run(engine, PROMPTS[:1], [GREEDY]) == expected
        assert set(widths) == {3}
        widths.clear()
        run(engine, PROMPTS[:1], [GREEDY.clone(temperature=1.0, top_p=0.9, seed=1)])
        assert widths == []


def test_no_rows_are_exchanged():
    group = SharedMemoryGroup(mmap(-1, memory_size(1)), 0, 1, lambda: None)
    for exchange in (group.join, group.swap):
        assert exchange(torch.empty(0, 3)).shape == (0, 3)


def test_rank_that_waits_long_sleeps(monkeypatch: pytest.MonkeyPatch):
    """It would use a whole processor until the other rank has started, or has stalled."""
    naps = list[float]()
    monkeypatch.setattr(shared_memory, "START_SECONDS", 0.2)
    monkeypatch.setattr(shared_memory.time, "sleep", naps.append)
    group = SharedMemoryGroup(mmap(-1, memory_size(2)), 0, 2, lambda: None)
    with pytest.raises(RankFailed, match="Rank 1 has not started"):
        group.join(torch.ones(1, 3))
    assert naps


SPARSE = [name for name in FAMILIES if any(part in name for part in ("moe", "oss", "experts"))]
SHORT_SPARSE = {("gemma4 with experts", 2)}


@full_where(lambda family, size: (family, size) not in SHORT_SPARSE)
@nightly_where(
    lambda family, size: (family, size) not in SHORT_SPARSE and is_other_size(family, size)
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", SPARSE)
def test_ranks_with_some_of_the_experts_answer_as_one_does(tmp_path: Path, family: str, size: int):
    check_ranks(config(tmp_path, family), size, enable_expert_parallel=True)


@pytest.mark.parametrize(
    "options",
    [
        {"draft_tensor_parallel_size": 1, "adaptive": False},
        pytest.param({"overlap": 2, "adaptive": False}, marks=pytest.mark.full),
        {"method": "dflash+ngram", "page_size": 4},
        {"draft_sample_method": "greedy", "kv_cache_dtype": "fp8"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_ranks_answer_as_one_does_with_other_settings(tmp_path: Path, options: dict[str, Any]):
    check_ranks(config(tmp_path, **options), 2)


class RankFactory(EngineFactory):
    """Makes engines of several ranks."""

    def __init__(self, root: Path, size: int):
        super().__init__(root, "cpu")
        self.size = size
        self.open: Any = None

    def engine(self, setup: Setup, answers: Any) -> Engine:
        self.open = ranks(self.config(setup), self.size, draft_policy=policy(setup))
        return prepared(self.open.__enter__())


@pytest.mark.full
@nightly_where(lambda seed: seed not in (1, 2, 6))  # with four ranks and with two
@pytest.mark.parametrize("seed", range(12))
def test_random_engine_of_ranks_answers_like_plain_decoding(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Preemption, aborts, grammars, log probabilities and prefix hits."""
    family = list(TARGETS)[seed % len(TARGETS)]
    monkeypatch.setattr(random_engines, "TARGETS", divisible_targets())
    draw = Setup.draw

    def unscripted(rng: random.Random, family: str) -> Setup:
        setup = draw(rng, family)
        return replace(setup, drafter="dflash") if setup.drafter == "script" else setup

    monkeypatch.setattr(Setup, "draw", unscripted)
    factory, findings = RankFactory(tmp_path, 2 + 2 * (seed % 2)), Findings()
    try:
        play_round(factory, seed, findings, [family])
    finally:
        if factory.open is not None:
            factory.open.__exit__(None, None, None)
    assert not findings.faults
    assert len(findings.ties) <= 1


def divisible_targets() -> dict[str, Any]:
    return {
        name: (write, {**changes, **DIVISIBLE.get(name, {})})
        for name, (write, changes) in TARGETS.items()
    }


@pytest.mark.parametrize(
    ("family", "size", "part"),
    [
        ("qwen3", 3, "num_attention_heads 4"),
        ("qwen3", 8, "num_attention_heads 4"),
        ("qwen3_moe", 16, "moe_intermediate_size 24"),
        ("qwen3_5_moe", 8, "shared_expert_intermediate_size 20"),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_named(
    tmp_path: Path, family: str, size: int, part: str
):
    settings = config(tmp_path, family, tensor_parallel_size=size)
    with pytest.raises(ValueError, match=rf"tensor_parallel_size is {size}.* {part}"):
        resolve(settings)


@pytest.mark.parametrize(
    ("family", "size", "problem"),
    [
        ("qwen3", 2, "the target has no experts"),
        ("qwen3_moe", 1, "tensor_parallel_size is 1"),
        ("qwen3_moe", 3, "the target's num_experts 8"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(
    tmp_path: Path, family: str, size: int, problem: str
):
    settings = config(tmp_path, family)
    with pytest.raises(ValueError, match=problem):
        resolve(settings.with_(tensor_parallel_size=size, enable_expert_parallel=True))


@pytest.mark.parametrize(("block", "fits"), [((24, 32), True), ((16, 8), False), ((6, 6), True)])
def test_blocks_of_quantized_weights_are_not_split(
    tmp_path: Path, block: tuple[int, int], fits: bool
):
    """Two ranks share experts of 24 rows."""
    settings = config(tmp_path, "qwen3_moe", tensor_parallel_size=2)
    experts: Any = lambda name: ".experts." in name  # noqa: E731
    quantize(tmp_path / "target", tmp_path / "plain", block, stored=experts)
    if fits:
        check_ranks(settings.with_(tensor_parallel_size=1), 2)
    else:
        with pytest.raises(ValueError, match=r"scale_inv has 2 rows.*which 2 ranks cannot share"):
            resolve(settings)


def test_ranks_on_a_cpu_are_asked_for_by_name(tmp_path: Path):
    settings = config(tmp_path, device="auto", tensor_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"2, but this machine has no CUDA devices; ask for device"
    ):
        resolve(settings)


def test_each_rank_holds_its_part_only(tmp_path: Path):
    """Norms, the drafter's fc and biases that follow a sum are on every rank."""
    settings = config(tmp_path)
    whole = Engine(settings).runner.model
    with ranks(settings, 2) as engine:
        part = engine.runner.model
        sizes = {
            n: (p.numel(), q.numel())
            for (n, p), (_, q) in zip(
                whole.named_parameters(), part.named_parameters(), strict=True
            )
        }
    for name, (all_values, own) in sizes.items():
        if "norm" in name:
            assert own == all_values
        else:
            assert own <= all_values / 2 + 32, name
