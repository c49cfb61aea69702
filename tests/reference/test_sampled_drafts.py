"""Drafts that are sampled change no token of the answers, greedy ones or of any seed, however
requests are run; and the answers follow the target's distribution."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import captured
from safetensors.torch import load_file, save_file
from scipy import stats
from slow_processors import processed
from slow_sampling import distribution
from tiny import SHAPE, make_draft, make_engine, make_target, make_tokenizer, run

from strobe import EngineConfig, SamplingParams
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.warmup.steps import warm_up

ANSWERS, TOKENS = 2000, 4
PROMPT = [1, 2, 3]
WARM = SamplingParams(temperature=1.0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """A tied pair with six tokens, so that every answer of a few tokens can be written down."""
    root = tmp_path_factory.mktemp("small")
    changes = {"vocab_size": 6, "tie_word_embeddings": True}
    hf = make_target(root / "target", eos_token_id=None, seed=8, **changes)
    path = make_draft(root / "draft", mask_token=5, top={"vocab_size": 6}, block=4, seed=1)
    return hf, root / "target", path


KNOWN = [0, 2, 5]
"""The tokens that a reduced head knows."""


@pytest.fixture(scope="module")
def reduced_draft(small: tuple[Any, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small pair's drafter with a head of three of the six tokens, as speculators writes it."""
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
    engine: Engine, asked: SamplingParams, prompt: Sequence[int]
) -> Counter[tuple[int, ...]]:
    """So many siblings' answers, and how often each was given."""
    requests = engine.add_prompt(prompt, asked.clone(n=ANSWERS), seed=5)
    while engine.has_work:
        engine.step()
    return Counter(tuple(request.output_ids) for request in requests)


def expected_answers(hf: Any, asked: SamplingParams) -> dict[tuple[int, ...], float]:
    """Each answer's probability, by transformers' logits and the processors written out."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        begun = list(found)
        with torch.no_grad():
            logits = hf(torch.tensor([PROMPT + list(before) for before in begun])).logits[:, -1]
        longer: dict[tuple[int, ...], float] = {}
        for before, row in zip(begun, logits.tolist(), strict=True):
            row = processed(row, asked, PROMPT, before)
            chances = distribution(row, asked.temperature, asked.top_k, asked.top_p, asked.min_p)
            for token, chance in enumerate(chances):
                if chance > 0:
                    longer[(*before, token)] = found[before] * chance
        found = longer
    return found


def check_counts(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> None:
    """Whole answers, those that are rare together, and each place by itself."""
    assert set(counts) <= set(wanted), "an answer that the target cannot give"
    often = [answer for answer, p in wanted.items() if p * ANSWERS >= 6]
    seen = [counts[answer] for answer in often]
    expected = [wanted[answer] * ANSWERS for answer in often]
    seen.append(ANSWERS - sum(seen))
    expected.append(ANSWERS - sum(expected))
    assert len(often) > 10
    assert stats.chisquare(seen, expected).pvalue > 0.001
    for place in range(TOKENS):
        tokens, chances = Counter[int](), Counter[int]()
        for answer, p in wanted.items():
            tokens[answer[place]] += counts[answer]
            chances[answer[place]] += p * ANSWERS  # pyright: ignore[reportArgumentType]
        pairs = [(tokens[token], chance) for token, chance in chances.items() if chance > 1]
        scale = sum(n for n, _ in pairs) / sum(c for _, c in pairs)
        fitted = [c * scale for _, c in pairs]
        assert stats.chisquare([n for n, _ in pairs], fitted).pvalue > 0.001


def config(target: Path, draft: Path | None, **options: Any) -> EngineConfig:
    given: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 100, "page_size": 4}
    if draft is not None:
        given |= {"draft": str(draft), "draft_sample_method": "probabilistic"}
    return EngineConfig(str(target), **given | options)


ASKED = {
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
def test_answers_follow_the_targets_distribution(
    name: str, reduced: bool, small: tuple[Any, Path, Path], reduced_draft: Path
):
    hf, target, draft = small
    engine = make_engine(config(target, reduced_draft if reduced else draft))
    proposer: Any = engine.proposers["dflash"]
    known = proposer.model.target_ids
    assert (None if known is None else known.tolist()) == (KNOWN if reduced else None)
    check_counts(answers(engine, ASKED[name], PROMPT), expected_answers(hf, ASKED[name]))
    stats = engine.stats
    assert 0.1 < stats.draft_counts.num_accepted / stats.draft_counts.num_verified < 0.9


HOT = WARM.clone(temperature=3.0)
SEVERAL = [
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
"""Requests whose drafts are sampled and others, in one batch."""
PROMPTS = [[i % 6, (i * 5) % 6, 3] + [4, 1] * (3 * i) for i in range(len(SEVERAL))]


def alone(target: Path, draft: Path, asked: Sequence[SamplingParams] = SEVERAL) -> list[list[int]]:
    """The answers to the above, one request at a time."""
    return run(make_engine(config(target, draft, max_num_seqs=1)), PROMPTS, asked)


def plain(target: Path, draft: Path) -> list[list[int]]:
    return alone(target, draft, [asked.clone(speculation=False) for asked in SEVERAL])


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("budget", [None, 50])
def test_sampled_drafts_change_no_token_of_plain_decoding(
    overlap: int, budget: int | None, small: tuple[Any, Path, Path]
):
    """However requests are run: drafts are sampled with the noise of the target's own tokens."""
    _, target, draft = small
    wanted = plain(target, draft)
    given = config(target, draft, overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=6)
    engine = make_engine(given)
    for _ in range(2):  # the second time over what the first left in the cache
        assert run(engine, PROMPTS, SEVERAL) == wanted
    assert run(engine, PROMPTS[::-1], SEVERAL[::-1])[-1] == wanted[0]
    assert 0 < engine.stats.draft_counts.num_accepted < engine.stats.draft_counts.num_verified


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("budget", [None, 48])
def test_replayed_draws_match_eager_draws(
    overlap: int,
    budget: int | None,
    small: tuple[Any, Path, Path],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("strobe.runner.pending.download", torch.clone)
    _, target, draft = small
    given = config(target, draft, overlap=overlap, max_num_batched_tokens=budget, max_num_seqs=5)
    resolved = resolve(given)
    parts = build(resolved)
    double = captured(parts, 5, resolved.limits.num_drafts)
    engine = Engine(resolved, components=parts)
    assert run(engine, PROMPTS, SEVERAL) == plain(target, draft)
    assert double.captured == len(parts.graphs) > 4
    assert double.replayed > double.captured


def test_greedy_answers_are_plain_decodings_in_any_batch(target: Any, draft: Callable[..., Path]):
    """With a vocabulary of 61, whose random drafter is hardly ever right."""
    cold = WARM.clone(temperature=0.0, max_tokens=30)
    warm = cold.clone(temperature=1.0, seed=1)
    prompts = [[7, 3, 9] * n + [n] for n in (1, 5, 2, 9)]
    plain = run(make_engine(config(target.path, None)), prompts, cold)
    engine = make_engine(config(target.path, draft()))
    assert run(engine, prompts * 2, [cold] * 4 + [warm] * 4)[:4] == plain
    assert run(engine, prompts, cold) == plain


def test_under_a_grammar_sampled_drafts_change_no_token(
    target: Any, draft: Callable[..., Path], tmp_path: Path
):
    """Whose forced tokens replace drafts that it does not allow."""
    for file in target.path.iterdir():
        (tmp_path / file.name).symlink_to(file)
    make_tokenizer(tmp_path)
    asked = WARM.clone(
        temperature=4.0,
        max_tokens=8,
        ignore_eos=False,
        structured_outputs={"choice": ["yes no", "yes ab", "yno", "no yes", "nob", "ab yes"]},
    )
    found = [
        answers(make_engine(config(tmp_path, drafter)), asked, PROMPT)
        for drafter in (None, draft())
    ]
    assert found[0] == found[1]
    assert len(found[0]) > 4


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


def test_by_default_drafts_are_greedy_and_no_token_changes(small: tuple[Any, Path, Path]):
    _, target, draft = small
    engine = make_engine(EngineConfig(str(target), draft=str(draft), max_model_len=96))
    assert run(engine, PROMPTS, SEVERAL) == plain(target, draft)


def test_probabilistic_drafts_need_a_drafter(small: tuple[Any, Path, Path]):
    _, target, _ = small
    with pytest.raises(
        ValueError, match=r"^draft_sample_method is 'probabilistic', but no drafter"
    ):
        resolve(config(target, None, draft_sample_method="probabilistic"))


@pytest.mark.parametrize("value", ["sampled", None, 1])
def test_unknown_sample_method_is_rejected(value: Any, small: tuple[Any, Path, Path]):
    _, target, draft = small
    sentence = r"^draft_sample_method is .*, but must be 'greedy' or 'prob"
    with pytest.raises(ValueError, match=sentence):
        resolve(config(target, draft, draft_sample_method=value))
