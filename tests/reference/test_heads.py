"""A drafter's head is a part of its own: a new one, greedy or sampled, changes no answer, and its
drafts are those of its formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.build import build, resolve
from strobe.engine.engine import Engine
from strobe.models.architectures import load_draft_config
from strobe.models.heads import HEADS
from strobe.models.heads.head import BlockRows, Drafts
from strobe.models.weight_loading import check_draft_tensors
from strobe.sampling_params import SamplingParams
from tests.support.bigram_head import ENTRY, to_bigram
from tests.support.engine_runs import run
from tests.support.full_marks import full_where
from tests.support.losslessness_matrix import (
    COMBINATIONS,
    LENGTH,
    SLOW_COMBINATIONS,
    Combination,
    Pair,
    PlainAnswers,
    compare,
    few_cases,
    prompts,
    workload,
)
from tests.support.simulated_graphs import captured

DRAFTING = [
    c
    for c in dict.fromkeys([*COMBINATIONS, *SLOW_COMBINATIONS])
    if c.proposer in ("dflash", "per request")
]


class Bigram(NamedTuple):
    pair: Pair
    table: Tensor


@pytest.fixture(scope="module", autouse=True)
def entry() -> Iterator[None]:
    """Register the head."""
    with pytest.MonkeyPatch.context() as patch:
        for method, module in ENTRY.items():
            patch.setitem(HEADS, method, module)
        yield


@pytest.fixture(scope="module")
def bigram(
    entry: None, target: Any, draft: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Bigram:
    path = tmp_path_factory.mktemp("bigram") / "draft"
    return Bigram(Pair(target.path, path), to_bigram(draft(), path))


@pytest.fixture(scope="module")
def plain(bigram: Bigram) -> PlainAnswers:
    return PlainAnswers(bigram.pair)


@pytest.mark.parametrize("c", few_cases(DRAFTING, 3))
def test_outputs_equal_plain_decoding(c: Combination, bigram: Bigram, plain: PlainAnswers):
    compare(c, bigram.pair, plain(c.workload))


@full_where(lambda name, padded: padded is (name == "sampled"))
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "captured"])
@pytest.mark.parametrize("name", ["greedy", "sampled", "mixed"])
def test_sampled_drafts_equal_plain_decoding(
    name: str, padded: bool, bigram: Bigram, plain: PlainAnswers
):
    engine, _ = recorded(bigram.pair, padded=padded, draft_sample_method="probabilistic")
    texts, params = zip(*workload(name), strict=True)
    assert run(engine, texts, params) == plain(name)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_drafts_follow_the_formula(method: str, bigram: Bigram):
    """Each draft is the argmax of its row's logits, plus the table's row of the draft before it,
    plus the request's noise where drafts are sampled."""
    engine, blocks = recorded(bigram.pair, draft_sample_method=method)
    params = SamplingParams(temperature=0.7 * (method != "greedy"), seed=3, max_tokens=20)
    run(engine, prompts()[:3], params.clone(ignore_eos=True))
    model: Any = engine.proposers["dflash"]
    corrected = 0
    for block, drafts in blocks:
        assert block.greedy == (method == "greedy")
        logits = model.model.head(block.hidden.flatten(0, 1)).unflatten(0, block.hidden.shape[:2])
        assert drafts.tokens is not None
        before = torch.cat([block.anchor[:, None], drafts.tokens[:, :-1]], 1)
        scores = logits + bigram.table[before]
        expected = block.choose(scores, 0)
        assert torch.equal(expected.tokens, drafts.tokens)  # type: ignore[arg-type]
        assert torch.equal(expected.margins, drafts.margins)  # type: ignore[arg-type]
        if block.greedy:
            assert torch.equal(drafts.tokens, scores.argmax(-1))
        corrected += int((logits.argmax(-1) != drafts.tokens).sum())
    assert corrected > 20, "the table changes drafts"


def test_missing_table_and_missing_scale_are_named(bigram: Bigram, tmp_path: Path):
    source = bigram.pair.draft
    config = load_draft_config(source)
    tensors = load_file(source / "model.safetensors")
    del tensors["bigram_table"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="tensor bigram_table is missing"):
        check_draft_tensors(tmp_path, config)
    text = (source / "config.json").read_text().replace('"bigram_scale": 1.5', '"bigram_scale": 0')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="bigram_scale is 0, but must be a positive number"):
        load_draft_config(tmp_path)


def test_unregistered_head_is_refused(bigram: Bigram, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(HEADS, next(iter(ENTRY)))
    with pytest.raises(ValueError, match="describes a drafter for Bigram, which is not supported"):
        load_draft_config(bigram.pair.draft)


def recorded(
    pair: Pair, *, padded: bool = False, **options: Any
) -> tuple[Engine, list[tuple[BlockRows, Drafts]]]:
    """Build an engine, and return it with a list that its blocks and their drafts are added to."""
    config = EngineConfig(
        str(pair.target), draft=str(pair.draft), max_model_len=LENGTH, max_num_seqs=4, **options
    )
    resolved = resolve(config)
    parts = build(resolved)
    if padded:
        captured(parts, 4, resolved.limits.num_drafts)
    blocks: list[tuple[BlockRows, Drafts]] = []
    head: Any = parts.proposers["dflash"].model.draft_head  # type: ignore[union-attr]
    forward = head.forward

    def recording(model: Any, block: BlockRows) -> Drafts:
        blocks.append((block, forward(model, block)))
        return blocks[-1][1]

    head.forward = recording
    return Engine(resolved, components=parts), blocks
