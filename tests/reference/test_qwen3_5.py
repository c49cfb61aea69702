"""Qwen3.5, dense and with experts, against transformers; its speculation, captured and eager,
against plain decoding."""

from __future__ import annotations

import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.config import EngineConfig
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.models.architectures import load_target_config
from strobe.sampling_params import SamplingParams
from strobe.tools.checkpoint_info import describe
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import make_engine, put, run, watched
from tests.support.full_marks import full_where
from tests.support.losslessness_matrix import (
    EXPERT_CASES,
    FAMILY_CASES,
    PlainAnswers,
    compare,
    make_pair,
)
from tests.support.recurrent_checkpoints import EXPERTS, KINDS, ROPE, make_hybrid
from tests.support.scripted_drafting import Scripted, wavering
from tests.support.simulated_graphs import captured
from tests.support.step_failures import fail_calls, run_with_failures
from tests.support.tiny_checkpoints import HIDDEN, LAYERS, edit_json, join_experts, make_draft
from tests.support.transformers_parity import (
    GEOMETRY,
    Case,
    check_layers,
    check_text,
    layer_outputs,
    prompts,
    record,
)

COLD = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
BOUND = 1e-3
"""Measured 4.4e-4, and 2.6e-4 between transformers in single and in double precision: early outputs
of a state are small, and its norm enlarges them."""


def nest(path: Path) -> None:
    """Write the form of the published checkpoints: the text's config inside a multimodal one, and
    tensors of the vision tower and of an MTP head."""
    text = json.loads((path / "config.json").read_text())
    extra = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "full_attention_interval": 4}
    text = {**extra, "mtp_num_hidden_layers": 1, "mlp_only_layers": [], **text}
    config = {
        "architectures": [text["architectures"][0].replace("CausalLM", "ConditionalGeneration")],
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5", "depth": 27},
        "image_token_id": 3,
        "tie_word_embeddings": text.pop("tie_word_embeddings"),
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    named = {
        name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()
    }
    named["model.visual.patch_embed.proj.weight"] = torch.ones(2, 3)
    named["mtp.fc.weight"] = torch.ones(4)
    save_file(named, path / "model.safetensors")


def as_published(path: Path) -> None:
    """Write the published form with experts: joined, and without an MLP size."""
    join_experts(path)
    edit_json(path / "config.json", intermediate_size=None)
    nest(path)


def by_interval(path: Path) -> None:
    edit_json(path / "config.json", layer_types=None, full_attention_interval=2)


CASES = {
    "untied": Case({}),
    "tied, nested": Case({"tie_word_embeddings": True}, nest),
    "equal key heads, a short convolution": Case(
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 8}
    ),
    "one key-value head, the whole head rotated": Case(
        {"num_key_value_heads": 1, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}
    ),
    "layers by interval, another epsilon": Case(
        {"layer_types": [KINDS[i % 2] for i in range(LAYERS)], "rms_norm_eps": 1e-3}, by_interval
    ),
    "experts, as published": Case(EXPERTS, as_published),
    "separate experts, tied": Case({**EXPERTS, "tie_word_embeddings": True}),
    "experts of odd sizes, all but one chosen": Case(
        {**EXPERTS, "num_experts": 5, "num_experts_per_tok": 4, "moe_intermediate_size": 15}
    ),
}


@pytest.fixture(scope="module", params=CASES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """(transformers' model, directory)"""
    case, path = CASES[request.param], tmp_path_factory.mktemp("qwen3_5")
    hf = make_hybrid(path, seed=len(request.param), **case.changes)
    case.after(path)
    return hf, path


@pytest.mark.parametrize(("page_size", "budget"), GEOMETRY[1::2])
def test_layers_and_logits_match_for_any_chunking(
    model: tuple[Any, Path], page_size: int, budget: int
):
    check_layers(*model, page_size, budget, atol=BOUND)


@pytest.mark.parametrize("model", [*CASES][:-2], indirect=True)
def test_greedy_text_matches_transformers(model: tuple[Any, Path]):
    check_text(*model)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return (transformers' model, directory) of the target that the tests below share."""
    path = tmp_path_factory.mktemp("hybrid")
    return make_hybrid(path), path


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """Return the same with experts."""
    path = tmp_path_factory.mktemp("sparse")
    return make_hybrid(path, **EXPERTS), path


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(tmp_path_factory.mktemp("draft"))


@pytest.mark.parametrize("budget", [300, 64, 33])
def test_prompts_near_chunk_length_match_transformers(budget: int, hybrid: tuple[Any, Path]):
    hf, path = hybrid
    lengths = [1, 15, 16, 17, 63, 64, 65, 130]
    config = EngineConfig(
        str(path), max_model_len=160, max_num_seqs=8, max_num_batched_tokens=budget
    )
    engine = make_engine(config)
    seen = record(engine)
    run(engine, prompts(lengths), COLD.clone(max_tokens=3))
    requests = {request for request, _ in seen}
    assert sorted(request.num_prompt for request in requests) == lengths
    for request in requests:
        expected, _ = layer_outputs(hf, request.tokens[:-1])
        outputs = torch.stack([seen[request, p] for p in range(len(expected))]).view(expected.shape)
        torch.testing.assert_close(outputs, expected, atol=BOUND, rtol=1e-5)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    return PlainAnswers(make_pair(root, make_hybrid, layers=3, seed=1, layer_types=KINDS[:3]))


@pytest.fixture(scope="module")
def sparse_plain(tmp_path_factory: pytest.TempPathFactory) -> PlainAnswers:
    root = tmp_path_factory.mktemp("pair")
    return PlainAnswers(make_pair(root, make_hybrid, layers=3, layer_types=KINDS[:3], **EXPERTS))


@pytest.mark.parametrize("c", FAMILY_CASES)
def test_outputs_equal_plain_decoding(c: Any, plain: PlainAnswers):
    compare(c, plain.pair, plain(c.workload))


@pytest.mark.parametrize("c", EXPERT_CASES)
def test_outputs_equal_plain_decoding_with_experts(c: Any, sparse_plain: PlainAnswers):
    compare(c, sparse_plain.pair, sparse_plain(c.workload))


def config(path: Path, **options: Any) -> EngineConfig:
    return EngineConfig(str(path), max_model_len=96, max_num_seqs=5, page_size=4, **options)


TEXTS = prompts([3, 17, 40, 1, 8, 29])


@functools.cache
def plain_answers(path: Path, *texts: tuple[int, ...]) -> list[list[int]]:
    """Return greedy answers of plain decoding, all of the same length."""
    return run(make_engine(config(path)), texts, COLD)


REPLAYED = [(1, None, "hybrid"), (2, 48, "hybrid"), (2, None, "sparse")]


@pytest.mark.parametrize(("overlap", "budget", "target"), REPLAYED)
def test_replayed_steps_match_eager_steps(
    overlap: int,
    budget: int | None,
    target: str,
    request: pytest.FixtureRequest,
    drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """With a drafter that guesses, and with one that is right up to a changing position."""
    monkeypatch.setattr("strobe.runner.step_output.download", torch.clone)
    path = request.getfixturevalue(target)[1]
    texts, cold = TEXTS[:4], COLD.clone(max_tokens=16)
    expected = run(make_engine(config(path)), texts, cold)
    options: dict[str, Any] = {"overlap": overlap, "max_num_batched_tokens": budget}
    for draft, method in ((str(drafter), "dflash"), (None, "ngram")):
        drafting = {"draft": draft, "method": method, "num_drafts": 7}
        resolved = resolve(config(path, **options, **drafting))
        parts = build(resolved)
        script = Scripted(parts.state, 7, wavering)
        if method == "ngram":
            put(parts, {"ngram": script})
        double = captured(parts, 5, 7)
        engine = watched(Engine(resolved, components=parts))
        requests = [engine.add(prompt, cold) for prompt in texts]
        script.answers = dict(zip(requests, map(list.__add__, texts, expected), strict=True))
        while engine.has_work:
            engine.step()
            check_engine(engine)
        assert [request.output_ids for request in requests] == expected
        assert double.captured > 1
        assert double.replayed > 1
        if method == "ngram":
            assert sum(request.draft_counts.num_accepted for request in requests) > 20


@full_where(lambda stage, overlap: overlap == 1 and stage != "half")
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize(
    "method", ["dflash", *[pytest.param(m, marks=pytest.mark.full) for m in ("none", "ngram")]]
)
@pytest.mark.parametrize("stage", ["before", "half", "after", "commit"])
def test_answers_finish_when_every_second_step_fails(
    stage: str, method: str, overlap: int, hybrid: tuple[Any, Path], drafter: Path
):
    """Chunks and steps that succeeded are kept, whatever the failed step wrote."""
    drafts = {} if method == "none" else {"num_drafts": 7}
    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, **drafts}
    engine = make_engine(
        config(hybrid[1], draft=str(drafter), method=method, overlap=overlap).with_(**options)
    )
    texts = [TEXTS[2], TEXTS[1], prompts([60])[0]]
    sampling = COLD.clone(max_tokens=16)
    owner: Any = {
        "before": engine.runner, "half": engine.runner.model.layers[2].mlp,
        "after": engine.state, "commit": engine.scheduler,
    }[stage]  # fmt: skip
    name = {"half": "forward", "before": "forward", "after": "accept", "commit": "_commit"}[stage]
    true, calls = getattr(owner, name), 0

    def failing(*args: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        result = None if stage == "before" and calls % 2 == 0 else true(*args, **named)
        if calls % 2 == 0:
            raise MemoryError("no memory")
        return result

    setattr(owner, name, failing)
    requests = [engine.add(prompt, sampling) for prompt in texts]
    steps = failures = 0
    while engine.has_work:
        steps += 1
        assert steps < 1000
        try:
            engine.step()
        except MemoryError:
            failures += 1
        check_engine(engine)
    assert failures > 10
    assert [request.finish_reason for request in requests] == ["length"] * 3
    expected = plain_answers(hybrid[1], *map(tuple, texts))
    assert [request.output_ids for request in requests] == [tokens[:16] for tokens in expected]
    assert engine.components.pool.available == engine.components.pool.capacity


@full_where(lambda method, overlap: overlap == 1 and method != "forward")
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("method", ["propose", "forward", "observe"])
def test_failed_step_restarts_its_requests(
    method: str, overlap: int, hybrid: tuple[Any, Path], drafter: Path
):
    """The failed step may already have changed its requests' states."""
    path = hybrid[1]
    options: dict[str, Any] = {"draft": str(drafter), "overlap": overlap}
    engine = make_engine(config(path, **options, max_num_batched_tokens=40))
    owner: Any = {"forward": engine.runner}.get(method, engine.proposers)
    fail_calls(owner, method, lambda call: call in (2, 5, 9))
    requests = [engine.add(prompt, COLD) for prompt in TEXTS]
    assert run_with_failures(engine) == 3
    assert [r.output_ids for r in requests] == plain_answers(path, *map(tuple, TEXTS))


def test_pages_hold_attention_layers_only(
    hybrid: tuple[Any, Path], caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.WARNING):
        engine = make_engine(config(hybrid[1]))
    assert len(engine.components.stores["target"].layers) == 2
    states = engine.components.states
    assert states is not None
    tensors = (*states.tensors, states.length)
    spec, pending = states.spec, states.pending
    per_slot = spec.bytes_per_slot(pending, torch.float32)
    row = 2 * spec.heads + spec.key_heads * spec.key_dim + spec.heads * spec.value_dim
    window = (spec.kernel - 1 + pending) * spec.channels
    assert per_slot == 4 * (spec.values + spec.layers * (window + pending * row)) + 8
    assert sum(part.nbytes for part in tensors) == 6 * per_slot
    kept = states.kept_state.nbytes + states.kept_window.nbytes
    assert kept == 32 * spec.bytes_per_kept_state(torch.float32)
    assert engine.resolved.state_bytes == 6 * per_slot
    assert engine.resolved.kept_state_bytes == kept
    off = make_engine(config(hybrid[1], enable_prefix_caching=False))
    assert off.components.states is not None
    assert off.components.states.kept_state.nbytes == 0
    assert not caplog.records


def test_states_beyond_memory_are_rejected(
    hybrid: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("strobe.runner.memory.free_memory", lambda device: 3_400_000)
    with pytest.raises(ValueError, match=r"^max_num_seqs is 400, whose states .* ask for fewer\.$"):
        resolve(EngineConfig(str(hybrid[1]), max_model_len=64, max_num_seqs=400))


def test_info_reports_recurrent_layers(hybrid: tuple[Any, Path]):
    facts = describe(hybrid[1])
    assert facts["layers"] == LAYERS
    assert facts["recurrent_layers"] == 3
    states = load_target_config(hybrid[1]).states
    assert states is not None
    assert facts["recurrent_state_bytes_per_request"] > 4 * states.values, "kept rows count"
    assert facts["kv_bytes_per_token_bf16"] == 2 * 2 * 2 * 2 * 16
    assert facts["kept_state_bytes"] == states.bytes_per_kept_state(torch.float32)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"layer_types": ["mamba"] * LAYERS}, "layer type 'mamba' is not supported"),
    ({"linear_num_key_heads": 3}, "linear_num_value_heads 4 is not a multiple"),
    ({"attn_output_gate": False}, "attn_output_gate is False, which is not supported"),
    ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'"),
    ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1, but must be"),
    (
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.3}},
        "partial_rotary_factor 0.3 turns",
    ),
    ({"hidden_size_per_layer": 7}, "hidden_size_per_layer is 7, which is not known"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
@pytest.mark.parametrize("nested", [False, True])
def test_unsupported_field_is_named(
    changes: dict[str, Any], message: str, nested: bool, tmp_path: Path
):
    make_hybrid(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    if nested:
        nest(tmp_path)
    with pytest.raises(ValueError, match=message):
        resolve(config(tmp_path))


def test_null_in_text_config_falls_back_to_outer_config(tmp_path: Path):
    make_hybrid(tmp_path)
    nest(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text())["text_config"] | {"dtype": None, "eos_token_id": None}
    edit_json(path, dtype="float16", eos_token_id=[7, 8], text_config=inner)
    config_read = load_target_config(tmp_path)
    assert (config_read.eos_ids, config_read.dtype) == ((7, 8), "float16")


WRONG_EXPERTS: list[tuple[dict[str, Any], str]] = [
    ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but there are 8 experts"),
    ({"num_local_experts": 4}, "num_local_experts is 4, which is not supported"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False, which is not supported"),
    ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], which is not supported"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2, which is not supported"),
    ({"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size is 0, but must be"),
    ({"n_group": 4}, "n_group is 4, which is not known"),
    ({"num_experts": 7}, r"gate\.weight has shape \[8, 32\], config\.json asks for \[7, 32\]"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG_EXPERTS)
def test_unsupported_expert_field_is_named(changes: dict[str, Any], message: str, tmp_path: Path):
    make_hybrid(tmp_path, **EXPERTS)
    as_published(tmp_path)
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit_json(tmp_path / "config.json", text_config={**inner, **changes})
    with pytest.raises(ValueError, match=message):
        resolve(config(tmp_path))


def test_hidden_size_matches_the_drafter(hybrid: tuple[Any, Path]):
    assert hybrid[0].config.hidden_size == HIDDEN
