"""Checkpoints written by the speculators package load, and draft the same tokens as the package's
own model. `scripts/speculators_fixture.py` wrote them in an environment with speculators 0.9.0."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from strobe import LLM
from strobe.attention.mask import LayerMask
from strobe.config import EngineConfig
from strobe.hub.locate import locate_models
from strobe.models.dflash_drafter import DFlash
from strobe.models.heads.head import BlockRows, Drafts
from strobe.sampling.sampler import best_two
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.recorded_drafter import Watched, WatchedHead
from tests.support.tiny_checkpoints import make_tokenizer

DATA = Path(__file__).parent / "data" / "speculators"
PROMPT, WINDOW, KNOWN = 8, 20, 23
FULL, CAUSAL = LayerMask(causal=False), LayerMask(causal=True, window=WINDOW)
MASKS = {
    "full": (FULL, FULL),
    "causal": (CAUSAL, FULL),
    "both_ways": (LayerMask(causal=False, window=WINDOW),) * 2,
    "first_slot": (CAUSAL,),
}
HEAD_MASKS = {
    "selector": (LayerMask(causal=False, window=WINDOW),),
    "vanilla": (FULL,),
    "gated": (CAUSAL,),
    "rnn": (FULL,),
    "rnn_apart": (FULL,),
}
"""Of the drafters with heads of DFlash2 and DSpark."""


@dataclass(frozen=True)
class Recorded:
    """The package's results: tokens [T] of a text, features [T, n * H], the target's hidden states;
    for the block at each of anchors [A], logits [A, D, V'] of the predicting slots and the target's
    tokens [A, D]."""

    tokens: list[int]
    features: Tensor
    anchors: list[int]
    logits: Tensor
    drafts: Tensor


def recorded(name: str) -> Recorded:
    values = load_file(DATA / "recorded.safetensors")
    first = 0 if name == "first_slot" else 1
    return Recorded(
        values["tokens"].tolist(),
        values["features"],
        values[f"{name}.anchors"].tolist(),
        values[f"{name}.logits"][:, first:],
        values[f"{name}.tokens"][:, first:],
    )


def recorded_head(name: str) -> dict[str, Tensor]:
    """Return what the package's own head made of each block; see the script."""
    values = load_file(DATA / "heads.safetensors")
    start = f"{name}."
    return {key.removeprefix(start): x for key, x in values.items() if key.startswith(start)}


def engine_of(name: str, watch: type[Watched] = Watched, **options: Any) -> Any:
    config = EngineConfig(str(DATA / "target"), draft=str(DATA / name), page_size=4, **options)
    return make_engine(config, lambda parts, _: watch(parts), names=["dflash"])


def watched(engine: Any) -> Any:
    return engine.proposers["dflash"]


def close(logits: Tensor, expected: Tensor) -> bool:
    """Whether all logits are within 1e-4 of their row's largest."""
    error = (logits - expected).abs().amax(-1)
    return bool((error <= 1e-4 * expected.abs().amax(-1)).all())


def known(model: DFlash, logits: Tensor) -> Tensor:
    """Select the columns of logits [R, V] that the head has, [R, V']."""
    return logits if model.target_ids is None else logits[:, model.target_ids]


def sees(mask: LayerMask, anchor: int, size: int, *, trained: bool) -> Tensor:
    """Return each slot's attention mask, [B, anchor + B]. A window reaches back from the slot
    itself, in training from the block's anchor."""
    slot, key = torch.arange(anchor, anchor + size)[:, None], torch.arange(anchor + size)[None]
    seen = torch.ones(size, anchor + size, dtype=torch.bool)
    if mask.window is not None:
        seen = seen & ((key >= anchor - mask.window) if trained else (slot - key < mask.window))
    return seen & (key <= slot) if mask.causal else seen


@torch.no_grad()
def block_rows(
    model: DFlash, tokens: Tensor, features: Tensor, anchor: int, *, trained: bool
) -> Tensor:
    """Return the residual stream [B, H] of the block at `anchor`, over the recorded features."""
    config = model.config
    keys, values = model.context_kv(features[:anchor], torch.arange(anchor))
    positions = torch.arange(anchor, anchor + config.block_size)
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = tokens[anchor]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        k, v = torch.cat([keys[:, layer], k]), torch.cat([values[:, layer], v])
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = sees(config.decoder.masks[layer], anchor, config.block_size, trained=trained)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)

    return model(ids, positions, attend, offsets=torch.arange(config.block_size))[0]


def block_logits(model: DFlash, about: Recorded, anchor: int, *, trained: bool) -> Tensor:
    """Return the module's logits [D, V'] for the block at `anchor`."""
    tokens = torch.tensor(about.tokens)
    x = block_rows(model, tokens, about.features, anchor, trained=trained)
    return known(model, model.head(x[-model.config.block_drafts :]))


@pytest.mark.parametrize("name", MASKS)
def test_package_export_is_read_completely(name: str):
    model = watched(engine_of(name)).inner.model
    config = model.config
    assert config.format == "speculators"
    assert config.decoder.masks == MASKS[name]
    assert (config.capture, config.mask_token_id, config.block_size) == ((1, 2, 3), 60, 5)
    assert config.block_drafts == config.recommended_drafts == (5 if name == "first_slot" else 4)
    reduced = name in ("causal", "both_ways")
    assert config.draft_vocab_size == (KNOWN if reduced else None)
    assert (model.embed_tokens, model.lm_head is not None) == (None, reduced)
    assert config.decoder.attention_bias == (name == "full")


@pytest.mark.parametrize("name", MASKS)
def test_logits_and_drafts_match_the_package(name: str):
    """Compares every anchor, with windows that start where the package's start in training."""
    model, about = watched(engine_of(name)).inner.model, recorded(name)
    assert about.anchors == list(range(PROMPT, len(about.tokens) - 5))
    ids = torch.arange(model.config.decoder.vocab_size)
    ids = ids if model.target_ids is None else model.target_ids
    for anchor, expected, drafts in zip(about.anchors, about.logits, about.drafts, strict=True):
        logits = block_logits(model, about, anchor, trained=True)
        assert close(logits, expected)
        assert torch.equal(ids[logits.argmax(-1)], drafts)


@pytest.mark.parametrize("name", MASKS)
def test_export_drafts_like_the_original_and_keeps_answers(name: str):
    """Drafts over Strobe's own features, step by step. Windows count from each slot, as in engines:
    blocks that lie inside the window match the package to the token, later ones differ only by the
    window's start."""
    about, engine = recorded(name), engine_of(name)
    prompt, answer = about.tokens[:PROMPT], about.tokens[PROMPT:]
    sampling = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    assert run(engine, [prompt], sampling) == [answer], "what transformers generated"
    model, num_equal, num_different = watched(engine).inner.model, 0, 0
    slides = any(mask.window is not None for mask in MASKS[name])
    for drafted in watched(engine).true_drafts():
        if drafted.start not in about.anchors:
            continue
        row = about.anchors.index(drafted.start)
        logits = known(model, drafted.logits)
        assert close(logits, block_logits(model, about, drafted.start, trained=False))
        if slides and drafted.start + model.config.block_size > WINDOW:
            num_different += not close(logits, about.logits[row])
            continue
        num_equal += 1
        assert close(logits, about.logits[row])
        assert drafted.tokens == about.drafts[row].tolist()
    assert num_equal > 4
    assert (num_different > 4) == slides


@pytest.mark.parametrize("name", HEAD_MASKS)
def test_package_export_with_a_head_is_read_completely(name: str):
    config = watched(engine_of(name)).inner.model.config
    is_selector = name == "selector"
    assert (config.format, config.method) == ("speculators", "DFlash2" if is_selector else "DSpark")
    assert config.decoder.masks == HEAD_MASKS[name]
    assert (config.capture, config.mask_token_id, config.block_size) == ((1, 2, 3), 60, 5)
    assert config.anchor_first == (name in ("vanilla", "rnn"))
    assert config.block_drafts == config.recommended_drafts == 4 + config.anchor_first
    assert config.draft_vocab_size == (None if name in ("selector", "vanilla") else KNOWN)
    if is_selector:
        head = config.head
        assert (head.conv_kernel_size, head.conv_group_size) == (3, 4)
        assert (head.selector_rank, head.selector_top_k) == (8, 4)
    else:
        assert (config.head.rank, config.head.kind) == (8, name.removesuffix("_apart"))
        assert config.head.confidence
        assert config.head.confidence_with_markov == (name != "rnn")


@pytest.mark.parametrize("name", HEAD_MASKS)
@torch.no_grad()
def test_heads_match_the_packages_own(name: str):
    """Compares the rows that the head reads at every anchor, its scores, its drafts and the
    evidence of these."""
    text = load_file(DATA / "recorded.safetensors")
    about = recorded_head(name)
    model = watched(engine_of(name, WatchedHead)).inner.model
    num_drafts = model.config.block_drafts
    corrected: list[Tensor] = []

    def choose(logits: Tensor, first: int) -> Drafts:
        corrected.append(known(model, logits.flatten(0, 1)))
        tokens, margins = best_two(logits.flatten(0, 1))
        return Drafts(tokens[:, None], margins[:, None])

    assert about["anchors"].tolist() == list(range(PROMPT, len(text["tokens"]) - 5))
    for row, anchor in enumerate(about["anchors"].tolist()):
        x = block_rows(model, text["tokens"], text["features"], anchor, trained=True)
        assert close(model.normed(x), about["hidden"][row])
        block = BlockRows(
            hidden=x[None, -num_drafts:],
            anchor=text["tokens"][anchor : anchor + 1],
            anchor_hidden=x[:1] if model.draft_head.reads_anchor else None,
            greedy=True,
            margins=True,
            choose=choose,
            noise=None,
            lead=None,
        )
        corrected.clear()
        drafts = model.draft_head(model, block)
        scores = about["scores"][row]
        assert drafts.tokens[0].tolist() == about["tokens"][row].tolist()
        if name == "selector":
            candidates = model.tokens_of(model.best(model.normed(x[-num_drafts:]), 4)[1])
            assert torch.equal(candidates.sort().values, about["candidates"][row].sort().values)
            best = scores.topk(2).values
            evidence = best[:, 0] - best[:, 1]
        else:
            assert close(torch.cat(corrected), scores)
            evidence = torch.nn.functional.softplus(about["confidence"][row])
        torch.testing.assert_close(drafts.margins[0], evidence, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", HEAD_MASKS)
def test_heads_draft_like_the_package_step_by_step(name: str):
    """Over Strobe's own features, where windows start as in training."""
    text = load_file(DATA / "recorded.safetensors")["tokens"].tolist()
    about = recorded_head(name)
    engine = engine_of(name, WatchedHead)
    answer = text[PROMPT:]
    sampling = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    assert run(engine, [text[:PROMPT]], sampling) == [answer]
    slides = HEAD_MASKS[name][0].window is not None
    drafts = dict(zip(about["anchors"].tolist(), about["tokens"].tolist(), strict=True))
    compared = 0
    for drafted in watched(engine).true_drafts():
        inside = not slides or drafted.start + 5 <= WINDOW
        if inside and drafted.start in drafts:
            assert drafted.tokens == drafts[drafted.start]
            compared += 1
    assert compared > 4


def test_export_names_target_and_num_drafts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(DATA)
    located = locate_models(EngineConfig("first_slot"))
    assert (located.method, located.num_drafts) == ("dflash", 5)
    assert Path(located.target).resolve() == DATA / "target"
    assert located.draft is not None
    assert Path(located.draft).resolve() == DATA / "first_slot"


@pytest.mark.parametrize("name", [*MASKS, "selector", "gated"])
def test_export_served_by_its_path_answers_like_its_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
):
    for part in ("target", name):
        shutil.copytree(DATA / part, tmp_path / part)
    make_tokenizer(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    text = load_file(DATA / "recorded.safetensors")["tokens"].tolist()
    prompt: Any = {"prompt_token_ids": text[:PROMPT]}
    answer = text[PROMPT:]
    sampling = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    options: dict[str, Any] = {"max_model_len": 64, "adaptive": False}
    llm = LLM(name, speculative_config={"num_speculative_tokens": 2}, **options)
    (output,) = llm.generate([prompt], sampling)
    assert output.outputs[0].token_ids == answer
    report = output.outputs[0].speculation
    assert report is not None
    assert report.method == "dflash"
    assert len(report.counts.accepted_per_position) == 2
    assert llm.engine.resolved.limits.num_drafts == 2


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model": "full"}, "draft is 'full', but causal is a drafter that brings its own; leave"),
        ({"method": "ngram"}, "method is 'ngram', but causal is a drafter that brings its own;"),
    ],
)
def test_export_path_rejects_another_drafter(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], sentence: str
):
    monkeypatch.chdir(DATA)
    with pytest.raises(ValueError, match=sentence):
        LLM("causal", speculative_config={**fields, "num_speculative_tokens": 2})
