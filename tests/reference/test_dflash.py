"""The drafter in the engine against a transcription of it: drafts and context K/V at each step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from tests.support.bookkeeping_checks import check_engine
from tests.support.dflash_transcription import Transcription
from tests.support.engine_runs import drain, make_engine, run
from tests.support.recorded_drafter import Watched
from tests.support.scripted_drafting import Lengths, wavering
from tests.support.tiny_checkpoints import (
    HIDDEN,
    LAYERS,
    VOCAB,
    make_draft,
    make_target,
    pool_bytes,
)
from tests.support.transformers_parity import greedy

FULL, SLIDING = "full_attention", "sliding_attention"

DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding, causal": {"layer_types": [SLIDING, SLIDING], "window": 6},
    "sliding and full": {"layer_types": [SLIDING, FULL], "window": 3},
    "sliding, bidirectional": {
        "layer_types": [SLIDING, SLIDING],
        "window": 5,
        "top": {"is_causal": False},
    },
    "full, forced causal": {"top": {"is_causal": True}},
    "mixed, forced causal": {
        "layer_types": [FULL, SLIDING],
        "window": 5,
        "nested": {"causal": True},
    },
    "top level before nested": {"top": {"is_causal": False}, "nested": {"causal": True}},
    "scaled": {
        "nested": {
            "final_logit_softcapping": 3.0,
            "output_multiplier": 0.7,
            "input_embedding_scale": 1.9,
        }
    },
    "scaled at the top": {
        "top": {
            "final_logit_softcapping": 9.0,
            "output_multiplier": 1.3,
            "input_embedding_scale": 0.4,
        }
    },
    "biased": {"bias": True},
    "nested block, rope parameters": {
        "nested": {"block_size": 8},
        "block": 99,
        "top": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
    },
    "yarn rope": {
        "top": {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 300.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.25,
            }
        },
    },
    "llama3 rope": {
        "top": {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 300.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    },
    "linear rope": {
        "top": {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 300.0, "factor": 4.0},
            "is_neox_style": False,
        },
    },
    "interleaved rope": {"top": {"is_neox_style": False}},
    "partial rotary, scaled values, bidirectional windows": {
        "top": {"partial_rotary_factor": 0.5, "attention_value_scale": 0.612},
        "nested": {"use_swa": True, "swa_window_size": 5},
    },
    "interleaved partial rotary, biased": {
        "top": {"partial_rotary_factor": 0.25, "attention_value_scale": 1.7},
        "nested": {"use_swa": True, "swa_window_size": 9, "is_neox_style": False},
        "bias": True,
    },
    "sinks under the sliding layers' key, partial rotary, scaled values": {
        "layer_types": [SLIDING, SLIDING],
        "window": 5,
        "sinks": True,
        "top": {
            "add_swa_attention_sink_bias": True,
            "is_causal": False,
            "partial_rotary_factor": 0.5,
            "attention_value_scale": 0.612,
        },
        "nested": {"attention_sink_bias": None},
    },
    "sinks in sliding and full layers, biased": {
        "layer_types": [SLIDING, FULL],
        "window": 3,
        "sinks": True,
        "bias": True,
    },
    "last and repeated layers": {"layer_ids": (4, 0, 2, 0)},
}

ANSWER = 22
SAMPLING = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)


@dataclass(frozen=True)
class Schedule:
    """Engine options; rounds: the number of times the prompts run."""

    options: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    preempts: bool = False
    hits: bool = False


SCHEDULES = {
    "at once": Schedule({"enable_prefix_caching": False}),
    "chunks": Schedule({"max_num_seqs": 2, "max_num_batched_tokens": 17, "page_size": 4}),
    "overlap": Schedule(
        {"overlap": 2, "page_size": 1, "max_num_seqs": 4, "max_num_batched_tokens": 40}
    ),
    "prefix hits": Schedule({"page_size": 4}, rounds=2, hits=True),
    "preemption": Schedule(
        {"page_size": 4, "kv_cache_memory": pool_bytes(24, 4, drafter_layers=2)}, preempts=True
    ),
    "preemption, overlap, no cache": Schedule(
        {
            "page_size": 1,
            "kv_cache_memory": pool_bytes(96, 1, drafter_layers=2),
            "overlap": 2,
            "enable_prefix_caching": False,
        },
        rounds=2,
        preempts=True,
    ),
    "fewer drafts": Schedule({"num_drafts": 3, "page_size": 1}, rounds=2),
    "fewer drafts, overlap": Schedule(
        {
            "num_drafts": 2,
            "page_size": 2,
            "overlap": 2,
            "enable_prefix_caching": False,
            "kv_cache_memory": pool_bytes(60, 2, drafter_layers=2),
        },
        rounds=2,
        preempts=True,
    ),
}

THOROUGH = "sliding and full"
CASES = [
    pytest.param(
        drafter,
        schedule,
        id=f"{drafter}-{schedule}",
        marks=[] if drafter == THOROUGH or (i + j) % len(SCHEDULES) == 0 else [pytest.mark.full],
    )
    for i, drafter in enumerate(DRAFTERS)
    for j, schedule in enumerate(SCHEDULES)
]
"""`make test` runs one drafter in every schedule, and each other one in one of them."""


@pytest.fixture(scope="module")
def texts(target: Any) -> list[tuple[list[int], list[int]]]:
    """Return (prompt, answer) of five requests, two of which share a prefix."""
    noise = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (5, 33, 12, 1)]
    prompts.append([*prompts[1][:21], 3, 1, 4])
    return [(p, greedy(target.hf, p, ANSWER, eos_token_id=None)) for p in prompts]


class Reference:
    """The transcription's results for the whole texts, computed once per drafter."""

    def __init__(self, path: Path, target: Any, texts: list[tuple[list[int], list[int]]]):
        self.drafter = Transcription(path, target.hf)
        self.features: dict[tuple[int, ...], torch.Tensor] = {}
        for prompt, answer in texts:
            tokens = prompt + answer
            self.features[tuple(tokens)] = self.drafter.run_target(tokens)[1]
        self.contexts = {k: self.drafter.context(f) for k, f in self.features.items()}
        self._logits: dict[tuple[tuple[int, ...], int, int], torch.Tensor] = {}

    def logits(self, tokens: list[int], start: int, drafts: int) -> torch.Tensor:
        """Return the logits of a block with this number of drafts."""
        key = tuple(tokens), start, drafts
        if key not in self._logits:
            features = self.features[key[0]][:start]
            count = drafts + (not self.drafter.anchor_first)
            self._logits[key] = self.drafter.draft_logits(tokens[start], features, count)
        return self._logits[key]


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, draft: Any, target: Any, texts: Any):
    path = draft(**DRAFTERS[request.param])
    return path, Reference(path, target, texts)


def context_checker(
    engine: Engine, reference: Reference, sequences: dict[Request, list[int]]
) -> Any:
    """Return a check that the drafter's store holds each running request's committed context, but
    for pages that were given back."""
    store, size = engine.components.stores["draft"], engine.limits.page_size
    group = store.spec.group_of(0)

    def check(requests: list[Request]) -> None:
        for record in engine.scheduler.running:
            pages = torch.tensor(record.lease.tables[group])
            first = record.lease.first_held(group) * size
            positions = torch.arange(first, record.lease.length)
            slots = pages[positions // size] * size + positions % size
            for layer, (keys, values) in enumerate(
                reference.contexts[tuple(sequences[record.request])]
            ):
                stored = store.layers[layer][slots]
                torch.testing.assert_close(stored[:, 0], keys[positions], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(stored[:, 1], values[positions], atol=1e-4, rtol=1e-4)

    return check


def count_hits(engine: Engine) -> list[int]:
    """Return a list that receives the cached length of each admitted request."""
    hits: list[int] = []
    apply = engine.state.apply

    def applying(plan: Any) -> None:
        hits.extend(admission.length for admission in plan.admitted)
        apply(plan)

    engine.state.apply = applying
    return hits


def play(
    engine: Engine,
    watched: Watched,
    reference: Reference,
    texts: list[tuple[list[int], list[int]]],
    sampling: list[SamplingParams] | None = None,
) -> None:
    """Run all texts once and check outputs and context K/V at each step."""
    params = sampling or [SAMPLING] * len(texts)
    requests = [engine.add(p, s) for (p, _), s in zip(texts, params, strict=True)]
    sequences = {r: p + a for r, (p, a) in zip(requests, texts, strict=True)}
    watched.answers.update(sequences)
    drain(engine, requests, each_step=context_checker(engine, reference, sequences))
    assert [r.tokens for r in requests] == list(sequences.values())


def check_drafts(watched: Watched, reference: Reference) -> None:
    for drafted in watched.true_drafts():
        expected = reference.logits(drafted.request.tokens, drafted.start, len(drafted.logits))
        torch.testing.assert_close(drafted.logits, expected, atol=1e-4, rtol=1e-4)
        best = expected.topk(2).values
        clear = (best[:, 0] - best[:, 1]) > 1e-3
        assert clear.sum() > len(clear) / 2
        tokens = torch.tensor(drafted.tokens)
        assert torch.equal(tokens[clear], expected.argmax(-1)[clear])


def config(target: Any, path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(target=str(target.path), draft=str(path), max_model_len=96).with_(**options)


@pytest.mark.parametrize(("reference", "name"), CASES, indirect=["reference"])
def test_drafts_and_context_match_transcription(
    name: str, reference: tuple[Path, Reference], target: Any, texts: Any
):
    path, transcribed = reference
    scene = SCHEDULES[name]
    engine = make_engine(
        config(target, path, **scene.options),
        lambda parts, _: Watched(parts, wavering),
        names=["dflash"],
    )
    hits = count_hits(engine)
    watched: Any = engine.proposers["dflash"]
    for _ in range(scene.rounds):
        play(engine, watched, transcribed, texts)
    assert (engine.stats.preemptions > 0) == scene.preempts
    assert any(hits) >= scene.hits
    accepted = engine.stats.draft_counts.num_accepted
    assert 0 < accepted < engine.stats.draft_counts.num_verified
    assert len(watched.true_drafts()) >= 5 * 3 * scene.rounds
    check_drafts(watched, transcribed)


@pytest.mark.parametrize("overlap", [1, 2])
def test_non_drafting_requests_keep_drafter_context(
    overlap: int, draft: Callable[..., Path], target: Any, texts: Any
):
    path = draft(**DRAFTERS["sliding and full"])
    transcribed = Reference(path, target, texts)
    engine = make_engine(
        config(target, path, page_size=4, overlap=overlap),
        lambda parts, _: Watched(parts, wavering),
        names=["dflash"],
        draft_policy=Lengths(lambda request, limit: (len(request.tokens) * 5) % (limit + 1)),
    )
    watched: Any = engine.proposers["dflash"]
    speculations = [None, False, {"method": "ngram"}, {"num_drafts": 3}, {"method": "dflash"}]
    play(engine, watched, transcribed, texts, [SAMPLING.clone(speculation=s) for s in speculations])
    assert {d.request.method for d in watched.drafted} == {"dflash"}
    check_drafts(watched, transcribed)
    hits = count_hits(engine)
    play(engine, watched, transcribed, texts)
    assert max(hits) >= 32, "the prefix of a request that did not draft is not cached"
    check_drafts(watched, transcribed)


@pytest.mark.parametrize(("num_drafts", "drafts"), [(1, 3), (3, 3), (4, 7), (7, 7), (8, 9)])
def test_block_covers_only_the_verified_drafts(
    num_drafts: int, drafts: int, draft: Callable[..., Path], target: Any, texts: Any
):
    path = draft(block=10)
    transcribed = Reference(path, target, texts)
    engine = make_engine(
        config(target, path, num_drafts=num_drafts),
        lambda parts, _: Watched(parts, wavering),
        names=["dflash"],
    )
    watched: Any = engine.proposers["dflash"]
    play(engine, watched, transcribed, texts)
    assert {len(drafted.tokens) for drafted in watched.drafted} == {drafts}
    check_drafts(watched, transcribed)


@pytest.fixture(scope="module")
def lucky(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """Return a tied pair with six tokens, for which even a random drafter is often right."""
    root = tmp_path_factory.mktemp("lucky")
    changes = {"vocab_size": 6, "tie_word_embeddings": True}
    hf = make_target(root / "target", eos_token_id=None, seed=8, **changes)
    path = make_draft(root / "draft", mask_token=5, top={"vocab_size": 6}, block=4, seed=1)
    return hf, root / "target", path


@pytest.mark.parametrize("prompt", [[1, 2, 3], [4] * 9, [0, 3, 0, 5, 2, 1, 1]])
def test_steps_match_reference_loop(lucky: tuple[Any, Path, Path], prompt: list[int]):
    hf, target, path = lucky
    expected = Transcription(path, hf).generate(prompt, len(prompt) + 70)
    engine = make_engine(EngineConfig(target=str(target), draft=str(path), max_model_len=128))
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    outputs: list[list[int]] = []
    while engine.has_work:
        outputs += [event.tokens for event in engine.step()]
        check_engine(engine)
    assert sum(map(len, outputs)) == 60 == request.num_output
    assert outputs[:-1] == expected[: len(outputs) - 1]
    assert expected[len(outputs) - 1][: len(outputs[-1])] == outputs[-1]
    assert len({len(tokens) for tokens in outputs}) > 1, "nothing was ever accepted"


def test_capture_ids_select_layer_outputs(tmp_path: Path):
    """In this target, layer i only adds a constant vector."""
    hf = make_target(tmp_path / "target", attention_bias=True)
    with torch.no_grad():
        for i, layer in enumerate(hf.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.self_attn.o_proj.bias.fill_(10.0 ** (i - 2))
            layer.mlp.down_proj.weight.zero_()
    hf.save_pretrained(tmp_path / "target")
    ids = (3, 0, LAYERS - 1)
    path = make_draft(tmp_path / "draft", layer_ids=ids)
    engine = make_engine(
        EngineConfig(target=str(tmp_path / "target"), draft=str(path), max_model_len=32),
        lambda parts, _: Watched(parts),
        names=["dflash"],
    )
    prompt = [5, 1, 60, 2]
    run(engine, [prompt], SamplingParams(temperature=0, max_tokens=1))
    (hidden,) = engine.proposers["dflash"].hidden  # pyright: ignore
    embedded = hf.model.embed_tokens.weight[prompt]
    for position, i in enumerate(ids):
        added = sum(10.0 ** (j - 2) for j in range(i + 1))
        captured = hidden[:, position * HIDDEN : (position + 1) * HIDDEN]
        torch.testing.assert_close(captured, embedded + added, atol=1e-4, rtol=1e-5)


def test_default_capture_ids_follow_the_format(tmp_path: Path, target: Any):
    path = make_draft(tmp_path, layer_ids=(1, 1), nested={"target_layer_ids": None})
    engine = make_engine(EngineConfig(target=str(target.path), draft=str(path), max_model_len=32))
    assert engine.runner.capture == (2, 3)
