"""Sampled drafts change no token of greedy or seeded answers, however requests are scheduled, and
answers follow the target's distribution."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy import stats

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.warmup.warmup_steps import warm_up
from tests.support.engine_runs import make_engine, run
from tests.support.full_marks import full_where
from tests.support.reference_processors import processed
from tests.support.reference_sampling import distribution
from tests.support.simulated_graphs import captured
from tests.support.tiny_checkpoints import SHAPE, make_draft, make_target, make_tokenizer

ANSWERS, TOKENS = 2000, 4
PROMPT = [1, 2, 3]
WARM = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """Return a tied pair with six tokens, for which all answers of a few tokens can be listed."""
    root = tmp_path_factory.mktemp("small")
    changes = {"vocab_size": 6, "tie_word_embeddings": True}
    hf = make_target(root / "target", eos_token_id=None, seed=8, **changes)
    path = make_draft(root / "draft", mask_token=5, top={"vocab_size": 6}, block=4, seed=1)
    return hf, root / "target", path


KNOWN = [0, 2, 5]
"""The tokens that a reduced head can draft."""


@pytest.fixture(scope="module")
def reduced_draft(small: tuple[Any, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small pair's drafter with a head of three of the six tokens, in speculators' format."""
    hf, _, draft = small
    path = tmp_path_factory.mktemp("reduced")
    old = json.loads((draft / "config.json").read_text())
    layers = {name: old[name] for name in SHAPE if name in old}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [i + 1 for i in old["dflash_config"]["target_layer_ids"]],
        "block_size": old["block_size"],
        "draft_vocab_size": len(KNOWN),
        "mask_token_id": old["dflash_config"]["mask_token_id"],
        "dtype": "float32",
        "speculators_config": {"algorithm": "dflash"},
        "transformer_layer_config": {**layers, "rope_parameters": {"rope_theta": 50000.0}},
    }
    (path / "config.json").write_text(json.dumps(config))
    table, ids = hf.model.embed_tokens.weight.detach(), torch.tensor(KNOWN)
    tensors = load_file(draft / "model.safetensors")
    tensors |= {"embed_tokens.weight": table.clone(), "lm_head.weight": table[ids].clone()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    save_file(tensors, path / "model.safetensors")
    return path


def answers(
    engine: Engine, sampling: SamplingParams, prompt: Sequence[int]
) -> Counter[tuple[int, ...]]:
    """Sample ANSWERS siblings; return the count of each answer."""
    requests = engine.add_prompt(prompt, sampling.clone(n=ANSWERS), seed=5)
    while engine.has_work:
        engine.step()
    return Counter(tuple(request.output_ids) for request in requests)


def expected_answers(hf: Any, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
    """Return each answer's probability from transformers' logits and the slow processors."""
    probs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        prefixes = list(probs)
        with torch.no_grad():
            logits = hf(torch.tensor([PROMPT + list(prefix) for prefix in prefixes])).logits[:, -1]
        longer: dict[tuple[int, ...], float] = {}
        for prefix, row in zip(prefixes, logits.tolist(), strict=True):
            row = processed(row, sampling, PROMPT, prefix)
            row_probs = distribution(
                row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
            )
            for token, p in enumerate(row_probs):
                if p > 0:
                    longer[(*prefix, token)] = probs[prefix] * p
        probs = longer
    return probs


def check_counts(counts: Counter[tuple[int, ...]], probs: dict[tuple[int, ...], float]) -> None:
    """Compare whole answers, with rare ones summed, and the tokens at each position."""
    assert set(counts) <= set(probs), "an answer that the target cannot give"
    often = [answer for answer, p in probs.items() if p * ANSWERS >= 6]
    seen = [counts[answer] for answer in often]
    expected = [probs[answer] * ANSWERS for answer in often]
    seen.append(ANSWERS - sum(seen))
    expected.append(ANSWERS - sum(expected))
    assert len(often) > 10
    assert stats.chisquare(seen, expected).pvalue > 0.001
    for position in range(TOKENS):
        tokens, chances = Counter[int](), Counter[int]()
        for answer, p in probs.items():
            tokens[answer[position]] += counts[answer]
            chances[answer[position]] += p * ANSWERS  # pyright: ignore[reportArgumentType]
        pairs = [(tokens[token], chance) for token, chance in chances.items() if chance > 1]
        scale = sum(n for n, _ in pairs) / sum(c for _, c in pairs)
        fitted = [c * scale for _, c in pairs]
        assert stats.chisquare([n for n, _ in pairs], fitted).pvalue > 0.001


def config(target: Path, draft: Path | None, **options: Any) -> EngineConfig:
    fields: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 100, "page_size": 4}
    if draft is not None:
        fields |= {"draft": str(draft), "draft_sample_method": "probabilistic"}
    return EngineConfig(str(target), **fields | options)


SAMPLINGS = {
    "hot": WARM.clone(temperature=3.0),
    "filtered": WARM.clone(temperature=4.0, top_k=4, top_p=0.9, min_p=0.02),
    "ruled": WARM.clone(
        temperature=3.0, presence_penalty=1.0, repetition_penalty=1.5, logit_bias={2: 1.5, 4: -2.0}
    ),
    "short": WARM.clone(temperature=3.0, speculation={"num_drafts": 2}),
}


@pytest.mark.parametrize(
    ("name", "reduced"),
    [("hot", False), ("filtered", True), ("ruled", False), ("short", True)],
)
def test_answers_follow_the_target_distribution(
    name: str, reduced: bool, small: tuple[Any, Path, Path], reduced_draft: Path
):
    hf, target, draft = small
    engine = make_engine(config(target, reduced_draft if reduced else draft))
    proposer: Any = engine.proposers["dflash"]
    known = proposer.model.target_ids
    assert (None if known is None else known.tolist()) == (KNOWN if reduced else None)
    check_counts(answers(engine, SAMPLINGS[name], PROMPT), expected_answers(hf, SAMPLINGS[name]))
    stats = engine.stats
    assert 0.1 < stats.draft_counts.num_accepted / stats.draft_counts.num_verified < 0.9


HOT = WARM.clone(temperature=3.0)
BATCH = [
    HOT.clone(temperature=0.0, max_tokens=20),
    HOT.clone(max_tokens=25, seed=4),
    HOT.clone(max_tokens=30, seed=5, top_p=0.8, top_k=4),
    HOT.clone(max_tokens=20, seed=-6, speculation={"num_drafts": 1}),
    HOT.clone(temperature=0.0, max_tokens=17, logprobs=1),
    HOT.clone(max_tokens=22, seed=8, speculation={"method": "ngram"}),
    HOT.clone(max_tokens=22, seed=9, speculation=False),
    HOT.clone(max_tokens=26, seed=10, presence_penalty=0.7, repetition_penalty=1.2, logprobs=2),
    HOT.clone(max_tokens=24, seed=11, top_p=0.9, n=2),
]
"""Requests with and without sampled drafts, for one batch."""
PROMPTS = [[i % 6, (i * 5) % 6, 3] + [4, 1] * (3 * i) for i in range(len(BATCH))]


def alone(target: Path, draft: Path, params: Sequence[SamplingParams] = BATCH) -> list[list[int]]:
    """Return the answers to PROMPTS, one request at a time."""
    return run(make_engine(config(target, draft, max_num_seqs=1)), PROMPTS, params)


@functools.cache
def plain(target: Path, draft: Path) -> list[list[int]]:
    return alone(target, draft, [sampling.clone(speculation=False) for sampling in BATCH])


@full_where(lambda overlap, budget: (overlap == 1) is (budget is None))
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("budget", [None, 50])
def test_sampled_drafts_change_no_token_of_plain_decoding(
    overlap: int, budget: int | None, small: tuple[Any, Path, Path]
):
    """Drafts are sampled with the noise of the target's own tokens, in every schedule."""
    _, target, draft = small
    expected = plain(target, draft)
    options = config(target, draft, overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=6)
    engine = make_engine(options)
    for _ in range(2):  # the second run finds the first one's prefixes cached
        assert run(engine, PROMPTS, BATCH) == expected
    assert run(engine, PROMPTS[::-1], BATCH[::-1])[-1] == expected[0]
    assert 0 < engine.stats.draft_counts.num_accepted < engine.stats.draft_counts.num_verified


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("budget", [None, 48])
def test_replayed_draws_match_eager_draws(
    overlap: int,
    budget: int | None,
    small: tuple[Any, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("strobe.runner.step_output.download", torch.clone)
    _, target, draft = small
    options = config(target, draft, overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=5)
    resolved = resolve(options)
    parts = build(resolved)
    double = captured(parts, 5, resolved.limits.num_drafts)
    engine = Engine(resolved, components=parts)
    assert run(engine, PROMPTS, BATCH) == plain(target, draft)
    assert double.captured == len(parts.graphs) > 4
    assert double.replayed > double.captured


def test_greedy_answers_equal_plain_decoding_in_any_batch(target: Any, draft: Callable[..., Path]):
    """With a vocabulary of 61, for which a random drafter is hardly ever right."""
    cold = WARM.clone(temperature=0.0, max_tokens=30)
    warm = cold.clone(temperature=1.0, seed=1)
    prompts = [[7, 3, 9] * n + [n] for n in (1, 5, 2, 9)]
    plain = run(make_engine(config(target.path, None)), prompts, cold)
    engine = make_engine(config(target.path, draft()))
    assert run(engine, prompts * 2, [cold] * 4 + [warm] * 4)[:4] == plain
    assert run(engine, prompts, cold) == plain


def test_sampled_drafts_change_no_token_under_a_grammar(
    target: Any, draft: Callable[..., Path], tmp_path: Path
):
    """The grammar's forced tokens replace illegal drafts."""
    for file in target.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    make_tokenizer(tmp_path)
    sampling = WARM.clone(
        temperature=4.0,
        max_tokens=8,
        ignore_eos=False,
        structured_outputs={"choice": ["yes no", "yes ab", "yno", "no yes", "nob", "ab yes"]},
    )
    counts = [
        answers(make_engine(config(tmp_path, drafter)), sampling, PROMPT)
        for drafter in (None, draft())
    ]
    assert counts[0] == counts[1]
    assert len(counts[0]) > 4


def test_warm_up_captures_every_decode_step(small: tuple[Any, Path, Path]):
    _, target, draft = small
    resolved = resolve(config(target, draft, max_num_seqs=4))
    parts = build(resolved)
    captured(parts, 4, resolved.limits.num_drafts)
    engine = Engine(resolved, components=parts)
    warm_up(engine)
    before = len(engine.graphs)
    run(engine, [[1, 2]] * 4, WARM.clone(top_p=0.9, max_tokens=12))
    assert len(engine.graphs) == before


@pytest.mark.parametrize(
    ("options", "sampled"), [({}, True), ({"draft_sample_method": "greedy"}, False)]
)
def test_default_drafts_are_sampled_and_greedy_ones_change_no_token(
    options: dict[str, Any], sampled: bool, small: tuple[Any, Path, Path]
):
    _, target, draft = small
    engine = make_engine(EngineConfig(str(target), draft=str(draft), max_model_len=96, **options))
    proposer: Any = engine.proposers["dflash"]
    assert proposer.sampled == sampled
    assert run(engine, PROMPTS, BATCH) == plain(target, draft)


def test_greedy_drafts_need_a_drafter(small: tuple[Any, Path, Path]):
    _, target, _ = small
    with pytest.raises(ValueError, match=r"^draft_sample_method is 'greedy', but no drafter"):
        resolve(config(target, None, draft_sample_method="greedy"))


@pytest.mark.parametrize("value", ["sampled", None, 1])
def test_unknown_sample_method_is_rejected(value: Any, small: tuple[Any, Path, Path]):
    _, target, draft = small
    sentence = r"^draft_sample_method is .*, but must be 'greedy' or 'prob"
    with pytest.raises(ValueError, match=sentence):
        resolve(config(target, draft, draft_sample_method=value))
