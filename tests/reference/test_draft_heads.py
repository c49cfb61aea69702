"""DFlash2's and DSpark's heads: their drafts are those of a transcription in plain torch, and
answers are those of plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.models.architectures import load_draft_config
from strobe.models.weight_loading import check_draft_tensors
from strobe.sampling.noise import gumbel_at
from strobe.sampling_params import SamplingParams
from tests.support.dflash_transcription import Transcription
from tests.support.draft_heads import CANDIDATES, to_dflash2, to_dspark
from tests.support.engine_runs import make_engine, run
from tests.support.recorded_drafter import WatchedHead
from tests.support.tiny_checkpoints import edit_json, make_draft

PROMPTS = [[5, 1, 60, 2, 9], [7] * 11, [33, 8, 21]]
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
SCALED = {"final_logit_softcapping": 2.0, "output_multiplier": 0.7, "input_embedding_scale": 1.9}

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Case:
    """A head, and options of the drafter that it is put on. write(source, directory, target)."""

    write: Callable[[Path, Path, Any], Path]
    options: dict[str, Any]


def selector(**options: Any) -> Callable[[Path, Path, Any], Path]:
    return lambda source, path, target: to_dflash2(source, path, **options)


def markov(**options: Any) -> Callable[[Path, Path, Any], Path]:
    return lambda source, path, target: to_dspark(source, path, **options)


def reduced(**options: Any) -> Callable[[Path, Path, Any], Path]:
    return lambda source, path, target: to_dspark(
        source, path, reduced=target.hf.lm_head.weight, **options
    )


CASES = {
    "dflash2": Case(selector(), {}),
    "dflash2, scaled": Case(selector(**SCALED), {}),
    "dflash2, codebooks with a suffix": Case(selector(suffix=".weight"), {}),
    "dflash2, sliding": Case(
        selector(), {"layer_types": [SLIDING, FULL], "window": 5, "top": {"is_causal": False}}
    ),
    "dflash2, biased, 32 candidates": Case(selector(candidates=32), {"bias": True}),
    "vanilla": Case(markov(), {"block": 7}),
    "vanilla, anchor apart": Case(markov(sample_from_anchor=False), {}),
    "vanilla, best tokens": Case(markov(dspark_draft_topk=CANDIDATES), {"block": 7}),
    "vanilla, best tokens, scaled": Case(
        markov(dspark_draft_topk=CANDIDATES, logit_scale=0.6, final_logit_softcapping=2.0), {}
    ),
    "vanilla, scaled": Case(markov(logit_scale=0.3, final_logit_softcapping=2.0), {}),
    "vanilla, reduced": Case(reduced(), {}),
    "vanilla, reduced, best tokens": Case(reduced(dspark_draft_topk=CANDIDATES), {}),
    "gated": Case(markov(kind="gated"), {"block": 7}),
    "gated, best tokens, reduced": Case(reduced(kind="gated", dspark_draft_topk=CANDIDATES), {}),
    "rnn": Case(markov(kind="rnn"), {"block": 7}),
    "rnn, anchor apart": Case(markov(kind="rnn", sample_from_anchor=False), {}),
    "rnn, best tokens, reduced, scaled": Case(
        reduced(kind="rnn", dspark_draft_topk=CANDIDATES, logit_scale=2.0), {}
    ),
}


def watched(target: Any, path: Path, **options: Any) -> tuple[Engine, WatchedHead]:
    """Build an engine with a recorded drafter."""
    config = EngineConfig(
        target=str(target.path),
        draft=str(path),
        max_model_len=64,
        page_size=4,
        max_num_seqs=3,
        **options,
    )
    engine = make_engine(config, lambda parts, _: WatchedHead(parts), names=["dflash"])
    head: Any = engine.proposers["dflash"]
    return engine, head


@pytest.fixture(scope="module")
def plain(target: Any) -> list[list[int]]:
    engine = make_engine(EngineConfig(target=str(target.path), max_model_len=64))
    return run(engine, PROMPTS, GREEDY)


def draft_of(case: Case, tmp_path: Path, target: Any) -> Path:
    source = make_draft(tmp_path / "source", **case.options)
    return case.write(source, tmp_path / "draft", target)


@pytest.mark.parametrize("name", CASES)
def test_drafts_equal_the_transcription(
    name: str, tmp_path: Path, target: Any, plain: list[list[int]]
):
    path = draft_of(CASES[name], tmp_path, target)
    engine, head = watched(target, path)
    assert run(engine, PROMPTS, GREEDY) == plain
    drafter = Transcription(path, target.hf)
    changed = 0
    for block in head.true_drafts():
        features = drafter.run_target(block.request.tokens)[1][: block.start]
        assert block.tokens == drafter.drafts(block.tail, features, drafter.block)
        changed += block.tokens != block.logits.argmax(-1).tolist()
    assert len(head.true_drafts()) >= 3 * len(PROMPTS)
    assert changed > 0, "the head changes drafts"


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("keys", [{}, {"dspark_draft_topk": CANDIDATES}])
def test_confidence_is_the_evidence(kind: str, keys: dict[str, Any], tmp_path: Path, target: Any):
    """The policy reads -log(1 - p) of the confidence head's p."""
    path = to_dspark(make_draft(tmp_path / "source"), tmp_path / "draft", kind=kind, **keys)
    engine, head = watched(target, path)
    run(engine, PROMPTS[:1], GREEDY)
    drafter = Transcription(path, target.hf)
    blocks = zip(head.drafted, head.blocks, strict=True)
    for block, (_, drafts) in blocks:
        if block not in head.true_drafts():
            continue
        features = drafter.run_target(block.request.tokens)[1][: block.start]
        every = drafter.every_row(block.tail, features, drafter.block)
        expected = [-math.log1p(-p) for p in drafter.corrected(every, block.tail)[1]]
        assert drafts.margins is not None
        assert drafts.margins[0].tolist() == pytest.approx(expected, abs=1e-4)


HOT = SamplingParams(temperature=1.3, max_tokens=18, seed=4, ignore_eos=True)
SCORES = {"final_logit_softcapping": 2.0, "output_multiplier": 0.7}


@pytest.mark.parametrize("keys", [{}, SCORES], ids=["plain", "scaled"])
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.6}, {"top_k": 2}], ids=str)
def test_neutral_dflash2_samples_as_dflash(
    sampling: dict[str, Any], keys: dict[str, Any], tmp_path: Path, target: Any
):
    """Few candidates suffice where they lead the race in which the whole vocabulary runs."""
    source = make_draft(tmp_path / "source", nested=keys)
    path = to_dflash2(source, tmp_path / "draft", neutral=True, candidates=2, **keys)
    tokens: list[list[list[int]]] = []
    for directory in (source, path):
        engine, head = watched(target, directory, draft_sample_method="probabilistic")
        run(engine, PROMPTS, HOT.clone(**sampling))
        tokens.append([block.tokens for block in head.drafted])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("keys", [{}, {"logit_scale": 0.6}, {"final_logit_softcapping": 2.0}])
def test_neutral_dspark_with_few_candidates_samples_as_with_all(
    kind: str, keys: dict[str, Any], tmp_path: Path, target: Any
):
    """The head has a part of the vocabulary; noise belongs to the target's tokens."""
    source = make_draft(tmp_path / "source")
    tokens: list[list[list[int]]] = []
    for name, topk in (("all", {}), ("few", {"dspark_draft_topk": 2})):
        path = to_dspark(
            source,
            tmp_path / name,
            kind=kind,
            neutral=True,
            reduced=target.hf.lm_head.weight,
            **topk,
            **keys,
        )
        engine, head = watched(target, path, draft_sample_method="probabilistic")
        run(engine, PROMPTS, HOT)
        tokens.append([block.tokens for block in head.drafted])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("candidates", [1, CANDIDATES])
def test_neutral_dflash2_equals_dflash(candidates: int, tmp_path: Path, target: Any):
    """With the kernels and the codebook that training starts from; and so do the rows."""
    source = make_draft(tmp_path / "source")
    path = to_dflash2(source, tmp_path / "draft", neutral=True, candidates=candidates)
    both: list[list[Any]] = []
    for directory in (source, path):
        engine, head = watched(target, directory)
        run(engine, PROMPTS, GREEDY)
        both.append(head.drafted)
    for ours, theirs in zip(*both, strict=True):
        assert ours.tokens == theirs.tokens
        assert torch.equal(ours.logits, theirs.logits)


def test_neutral_dspark_equals_dflash(tmp_path: Path, target: Any):
    source = make_draft(tmp_path / "source")
    path = to_dspark(source, tmp_path / "draft", neutral=True, sample_from_anchor=False)
    tokens: list[list[list[int]]] = []
    for directory in (source, path):
        engine, head = watched(target, directory)
        run(engine, PROMPTS, GREEDY)
        tokens.append([block.tokens for block in head.drafted])
    assert tokens[0] == tokens[1]


def test_one_candidate_is_the_most_probable_token(tmp_path: Path, target: Any):
    path = to_dflash2(make_draft(tmp_path / "source"), tmp_path / "draft", candidates=1)
    engine, head = watched(target, path)
    run(engine, PROMPTS, GREEDY)
    for block in head.drafted:
        assert block.tokens == block.logits.argmax(-1).tolist()


def test_convolutions_of_causal_blocks_are_prefixes(tmp_path: Path, target: Any):
    """Where rows see none after them, a block of 4 drafts what one of 8 drafts first."""
    source = make_draft(tmp_path / "source", top={"is_causal": True})
    path = to_dflash2(source, tmp_path / "draft")
    drafts: list[dict[Any, list[int]]] = []
    for count in (3, 7):
        engine, head = watched(target, path, num_drafts=count)
        run(engine, PROMPTS, GREEDY)
        drafts.append({(d.request.tokens[0], d.start): d.tokens for d in head.true_drafts()})
    common = drafts[0].keys() & drafts[1].keys()
    assert len(common) > 5
    for place in common:
        assert drafts[0][place][:3] == drafts[1][place][:3]


@pytest.mark.parametrize("name", ["dflash2", "vanilla, reduced, best tokens"])
def test_sampled_drafts_race_with_the_requests_noise(name: str, tmp_path: Path, target: Any):
    """Each draft is the argmax, among its candidates after the draft before, of score / T + noise
    at its position."""
    path = draft_of(CASES[name], tmp_path, target)
    engine, head = watched(target, path, draft_sample_method="probabilistic")
    model: Any = head.inner.model
    scores: list[Any] = []
    walk = model.ops.walk

    def recording(edges: Any, ids: Any, margins: Any, noise: Any) -> Any:
        scores.append((edges, ids))
        return walk(edges, ids, margins, noise)

    model.ops.walk = recording
    hot = SamplingParams(temperature=0.8, seed=4, max_tokens=18, ignore_eos=True)
    run(engine, PROMPTS[:2], [hot, GREEDY.clone(ignore_eos=True)])
    moved = 0
    for (edges, ids), (block, drafts) in zip(scores, head.blocks, strict=True):
        assert drafts.tokens is not None
        assert block.noise is not None or block.greedy
        for span, tokens in enumerate(drafts.tokens.tolist()):
            place = 0
            for k, token in enumerate(tokens):
                row = edges[span, k, place]
                if block.noise is not None and block.noise.temperatures[span] > 0:
                    keys, positions, temperatures = (x[span : span + 1] for x in block.noise)
                    chance = gumbel_at(keys, positions + k, ids[span, k : k + 1])[0]
                    row = row / temperatures + chance
                    moved += int(row.argmax() != edges[span, k, place].argmax())
                place = int(row.argmax())
                assert token == int(ids[span, k, place])
    assert moved > 3


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing codebook": (
        lambda tensors: tensors.pop("candidate_selector.successor_codebook"),
        "tensor candidate_selector.successor_codebook is missing",
    ),
    "narrow codebook": (
        lambda tensors: tensors.update(
            {"candidate_selector.predecessor_codebook": torch.zeros(61, 4)}
        ),
        r"predecessor_codebook has shape \[61, 4\], config.json asks for \[61, 8\]",
    ),
    "another number of taps": (
        lambda tensors: tensors.update({"layers.1.mlp_conv.base_kernel": torch.zeros(2, 2, 32)}),
        r"layers.1.mlp_conv.base_kernel has shape \[2, 2, 32\], config.json asks for \[2, 3, 32\]",
    ),
    "one tensor too many": (
        lambda tensors: tensors.update({"markov_head.markov_w1.weight": torch.zeros(61, 8)}),
        "tensor markov_head.markov_w1.weight is not part of this architecture",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_wrong_tensors_are_named(name: str, tmp_path: Path):
    path = to_dflash2(make_draft(tmp_path / "source"), tmp_path / "draft")
    change, message = BROKEN[name]
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        check_draft_tensors(path, load_draft_config(path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"conv_group_size": 5}, "conv_group_size is 5, but must divide hidden_size, 32"),
        ({"conv_group_size": 64}, "conv_group_size is 64, but must divide hidden_size, 32"),
    ],
)
def test_groups_that_disagree_are_named(keys: dict[str, Any], message: str, tmp_path: Path):
    path = to_dflash2(make_draft(tmp_path / "source"), tmp_path / "draft", **keys)
    with pytest.raises(ValueError, match=message):
        load_draft_config(path)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gated", {"markov_head_type": "vanilla"}, "gate_proj.bias is not part of this archite"),
        ("vanilla", {"markov_head_type": "gated"}, "tensor markov_head.gate_proj.weight is miss"),
        ("vanilla", {"markov_head_type": "rnn"}, "tensor markov_head.joint_proj.weight is missing"),
        ("vanilla", {"markov_rank": 16}, r"markov_w1.weight has shape \[61, 8\], config.json asks"),
        ("vanilla", {"enable_confidence_head": False}, "confidence_head.proj.bias is not part of"),
        (
            "vanilla",
            {"confidence_head_with_markov": False},
            r"confidence_head.proj.weight has shape \[1, 40\], config.json asks for \[1, 32\]",
        ),
    ],
)
def test_dspark_tensors_that_disagree_with_the_config_are_named(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
):
    path = to_dspark(make_draft(tmp_path / "source"), tmp_path / "draft", kind=kind)
    edit_json(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        check_draft_tensors(path, load_draft_config(path))


@pytest.mark.parametrize("offset", [30, -1])
def test_token_of_a_reduced_head_out_of_range_is_named_before_loading(
    offset: int, tmp_path: Path, target: Any
):
    path = draft_of(CASES["vanilla, reduced"], tmp_path, target)
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"][0 if offset < 0 else -1] = offset
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor d2t leads to tokens .* lie within 0 to 60"):
        resolve(EngineConfig(str(target.path), draft=str(path)))


def test_more_candidates_than_tokens_are_named(tmp_path: Path, target: Any):
    path = to_dspark(make_draft(tmp_path / "source"), tmp_path / "draft", dspark_draft_topk=9)
    edit_json(path / "config.json", draft_vocab_size=8)
    with pytest.raises(ValueError, match="dspark_draft_topk is 9, but the head knows only 8"):
        load_draft_config(path)
