"""Drafters in every format with the tiny target: answers do not change, and the same weights draft
the same in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from tests.support.dflash_transcription import Transcription
from tests.support.engine_runs import drain, make_engine, run
from tests.support.recorded_drafter import Watched
from tests.support.scripted_drafting import oracle
from tests.support.tiny_checkpoints import HIDDEN, LAYERS, MASK_TOKEN, VOCAB, make_draft
from tests.support.transformers_parity import greedy

IDS = (0, 1, 3)
SAMPLING = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
PROMPTS = [[5, 1, 60, 2, 9], [7] * 11]
KNOWN = list(range(0, VOCAB, 2))
"""The tokens that a reduced head can draft."""


def speculators(path: Path, target: Any, *, reduced: bool = False, **changes: Any) -> Path:
    """Write make_draft's drafter in the speculators library's format."""
    make_draft(path)
    old = json.loads((path / "config.json").read_text())
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    )
    layers = {name: old[name] for name in names}
    layers |= {"model_type": "llama", "sliding_window": 3, "layer_types": ["full_attention"] * 2}
    layers["rope_parameters"] = {"rope_theta": 50000.0, "partial_rotary_factor": 0.25}
    tensors = load_file(path / "model.safetensors")
    tensors["embed_tokens.weight"] = target.hf.model.embed_tokens.weight.detach().clone()
    tensors["lm_head.weight"] = target.hf.lm_head.weight.detach().clone()
    if reduced:
        ids = torch.tensor(KNOWN)
        tensors["lm_head.weight"] = tensors["lm_head.weight"][ids].clone()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.isin(torch.arange(VOCAB), ids)
    save_file(tensors, path / "model.safetensors")
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in IDS],
        "block_size": 8,
        "draft_vocab_size": len(KNOWN) if reduced else VOCAB,
        "mask_token_id": MASK_TOKEN,
        "dtype": "float32",
        "speculators_config": {"algorithm": "dflash", "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": 7}]},
        "transformer_layer_config": layers,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def deepspec(path: Path, *, sinks: bool = False) -> Path:
    """Write make_draft's drafter in DeepSpec's format."""
    make_draft(path, block=7, sinks=sinks)
    config = json.loads((path / "config.json").read_text())
    config |= config.pop("dflash_config")
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": 0, "num_anchors": 512}
    config |= {"enable_confidence_head": False, "tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    return path


def drafted(target: Any, path: Path, **options: Any) -> tuple[list[list[int]], list[Any], Any]:
    config = EngineConfig(
        target=str(target.path), draft=str(path), max_model_len=64, page_size=4, **options
    )
    engine = make_engine(config, lambda parts, _: Watched(parts), names=["dflash"])
    watched: Any = engine.proposers["dflash"]
    return run(engine, PROMPTS, SAMPLING), watched.drafted, engine


def check_drafts(engine: Any, path: Path, target: Any) -> None:
    """Compare the engine's drafts with the transcription's."""
    watched, drafter = engine.proposers["dflash"], Transcription(path, target.hf)
    assert len(watched.true_drafts()) >= 2 * 3
    for drafted in watched.true_drafts():
        features = drafter.run_target(drafted.request.tokens)[1][: drafted.start]
        expected = drafter.draft_logits(drafted.tail, features, drafter.block)
        torch.testing.assert_close(drafted.logits, expected, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    engine = make_engine(EngineConfig(target=str(target.path), max_model_len=64))
    return run(engine, PROMPTS, SAMPLING)


def test_speculators_format_drafts_like_z_lab(
    tmp_path: Path, target: Any, draft: Callable[..., Path], plain: list[list[int]]
):
    answers, expected, _ = drafted(target, draft())
    assert answers == plain
    answers, drafts, engine = drafted(target, speculators(tmp_path, target))
    assert answers == plain
    for a, b in zip(drafts, expected, strict=True):
        torch.testing.assert_close(a.logits, b.logits, atol=1e-4, rtol=1e-4)
    model = engine.proposers["dflash"].inner.model
    assert (model.embed_tokens, model.lm_head) == (None, None), "the target's are used"


def test_reduced_vocabulary_drafts_known_tokens(
    tmp_path: Path, target: Any, draft: Callable[..., Path], plain: list[list[int]]
):
    _, expected, _ = drafted(target, draft())
    answers, drafts, engine = drafted(target, speculators(tmp_path, target, reduced=True))
    assert answers == plain
    first, full = drafts[0].logits, expected[0].logits
    torch.testing.assert_close(first[:, KNOWN], full[:, KNOWN], atol=1e-4, rtol=1e-4)
    check_drafts(engine, tmp_path, target)
    unknown = [t for t in range(VOCAB) if t not in KNOWN]
    assert torch.isneginf(first[:, unknown]).all()
    model = engine.proposers["dflash"].inner.model
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.argmax(x), model.head(x).argmax(-1))


SCALED = {"input_embedding_scale": 1.9, "output_multiplier": 0.7, "final_logit_softcapping": 3.0}
FORMATS: dict[str, Callable[[Path, Any], Path]] = {
    "z-lab": lambda path, target: make_draft(path),
    "z-lab, scaled": lambda path, target: make_draft(path, top=SCALED),
    "DeepSpec": lambda path, target: deepspec(path),
    "speculators": speculators,
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("own", [{"embed_tokens"}, {"lm_head"}, {"embed_tokens", "lm_head"}])
def test_own_embedding_and_head_override_the_target(
    tmp_path: Path, target: Any, plain: list[list[int]], name: str, own: set[str]
):
    path, noise = FORMATS[name](tmp_path, target), torch.Generator().manual_seed(5)
    tables = {
        f"{part}.weight": torch.randn(VOCAB, HIDDEN, generator=noise) * 0.5 for part in sorted(own)
    }
    weights = path / "model.safetensors"
    save_file({**load_file(weights), **tables}, weights)
    answers, _, engine = drafted(target, path)
    assert answers == plain
    model = engine.proposers["dflash"].inner.model
    assert {part for part in ("embed_tokens", "lm_head") if getattr(model, part)} == own
    check_drafts(engine, path, target)


def test_anchor_first_blocks_have_one_more_draft(
    tmp_path: Path, target: Any, draft: Callable[..., Path], plain: list[list[int]]
):
    """Slots 1 and up have the same logits as the plain drafter's; slot 0 adds a row."""
    answers, drafts, engine = drafted(target, deepspec(tmp_path))
    assert answers == plain
    assert engine.limits.num_drafts == 7
    assert drafts[0].logits.shape == (7, VOCAB)
    _, expected, _ = drafted(target, draft(block=7))
    torch.testing.assert_close(drafts[0].logits[1:], expected[0].logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sinks", [False, True])
def test_anchor_first_blocks_are_fully_accepted_when_right(
    tmp_path: Path, target: Any, sinks: bool
):
    """A block of 7 gives 7 drafts, and a step commits 8 tokens."""
    path, count = deepspec(tmp_path, sinks=sinks), 1 + 3 * 8
    config = EngineConfig(target=str(target.path), draft=str(path), max_model_len=64)
    engine = make_engine(config, lambda parts, _: Watched(parts, oracle), names=["dflash"])
    watched: Any = engine.proposers["dflash"]
    answers = [greedy(target.hf, prompt, count, eos_token_id=None) for prompt in PROMPTS]
    sampling = SAMPLING.clone(max_tokens=count)
    requests = [engine.add(prompt, sampling) for prompt in PROMPTS]
    for request, prompt, answer in zip(requests, PROMPTS, answers, strict=True):
        watched.answers[request] = prompt + answer
    drain(engine, requests)
    assert [r.tokens[r.num_prompt :] for r in requests] == answers
    assert (
        engine.stats.draft_counts.num_accepted
        == engine.stats.draft_counts.num_verified
        == 2 * 3 * 7
    )
    assert watched.drafted[0].logits.shape == (7, VOCAB)
    check_drafts(engine, path, target)


NARROW = 24
"""Hidden size of a drafter narrower than its target."""


def narrowed(name: str, value: torch.Tensor) -> torch.Tensor:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return value
    writes = ("fc.weight", "norm.weight", "layernorm.weight", "o_proj.weight", "down_proj.weight")
    return (value[:NARROW] if name.endswith(writes) else value[:, :NARROW]).contiguous()


def test_drafter_may_be_narrower_than_its_target(
    tmp_path: Path, target: Any, plain: list[list[int]]
):
    path = speculators(tmp_path, target, reduced=True, target_hidden_size=HIDDEN)
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    tables = {n: v for n, v in tensors.items() if n in ("d2t", "t2d")}
    save_file({n: narrowed(n, v) for n, v in tensors.items() if n not in tables} | tables, weights)
    config = json.loads((path / "config.json").read_text())
    config["transformer_layer_config"]["hidden_size"] = NARROW
    (path / "config.json").write_text(json.dumps(config))
    answers, drafts, engine = drafted(target, path)
    assert answers == plain
    assert torch.isfinite(drafts[0].logits[:, KNOWN]).all()
    check_drafts(engine, path, target)
    model = engine.proposers["dflash"].inner.model
    assert model.embed_tokens.weight.shape == (VOCAB, NARROW), "not the target's"
    config["target_hidden_size"] = HIDDEN + 8
    (path / "config.json").write_text(json.dumps(config))
    message = f"target_hidden_size is {HIDDEN + 8}, the target's is {HIDDEN}"
    with pytest.raises(ValueError, match=message):
        drafted(target, path)


def test_missing_hidden_state_error_uses_config_numbering(tmp_path: Path, target: Any):
    path = speculators(tmp_path, target, aux_hidden_state_layer_ids=[1, 2, LAYERS + 1])
    message = f"layer_ids holds {LAYERS + 1}, but the target's layers are 0 to {LAYERS};"
    with pytest.raises(ValueError, match=message):
        drafted(target, path)
