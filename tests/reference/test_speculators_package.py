"""Checkpoints that the speculators package wrote load, and draft what that package's own model
drafts. `scripts/speculators_fixture.py` made them, in an environment with speculators 0.9.0."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import make_engine, make_tokenizer, run
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from watched import Watched

from strobe import LLM
from strobe.attention.mask import LayerMask
from strobe.config import EngineConfig
from strobe.hub.locate import locate_models
from strobe.models.dflash import DFlash
from strobe.sampling_params import SamplingParams

MADE = Path(__file__).parent / "data" / "speculators"
PROMPT, WINDOW, KNOWN = 8, 20, 23
FULL, CAUSAL = LayerMask(causal=False), LayerMask(causal=True, window=WINDOW)
MASKS = {
    "full": (FULL, FULL),
    "causal": (CAUSAL, FULL),
    "both_ways": (LayerMask(causal=False, window=WINDOW),) * 2,
    "first_slot": (CAUSAL,),
}


@dataclass(frozen=True)
class Recorded:
    """What the package computed. tokens [T], features [T, n * H]: of a text and the target's
    hidden states of it; for the block at each of anchors [A], logits [A, D, V'] of the slots that
    predict, and the target's tokens [A, D] of them."""

    tokens: list[int]
    features: Tensor
    anchors: list[int]
    logits: Tensor
    drafts: Tensor


def recorded(name: str) -> Recorded:
    values = load_file(MADE / "recorded.safetensors")
    first = 0 if name == "first_slot" else 1
    return Recorded(
        values["tokens"].tolist(),
        values["features"],
        values[f"{name}.anchors"].tolist(),
        values[f"{name}.logits"][:, first:],
        values[f"{name}.tokens"][:, first:],
    )


def engine_of(name: str, **options: Any) -> Any:
    config = EngineConfig(str(MADE / "target"), draft=str(MADE / name), page_size=4, **options)
    return make_engine(config, lambda parts, _: Watched(parts), names=["dflash"])


def watched(engine: Any) -> Any:
    return engine.proposers["dflash"]


def close(found: Tensor, wanted: Tensor) -> bool:
    """Within 1e-4 of the largest logit of each row."""
    error = (found - wanted).abs().amax(-1)
    return bool((error <= 1e-4 * wanted.abs().amax(-1)).all())


def known(model: DFlash, logits: Tensor) -> Tensor:
    """Of logits [R, V] those of the tokens that the head knows, [R, V']."""
    return logits if model.target_ids is None else logits[:, model.target_ids]


def sees(mask: LayerMask, anchor: int, size: int, *, trained: bool) -> Tensor:
    """[B, anchor + B]: what each slot sees. A window reaches back from the slot itself, and in
    training from the block's anchor."""
    slot, key = torch.arange(anchor, anchor + size)[:, None], torch.arange(anchor + size)[None]
    seen = torch.ones(size, anchor + size, dtype=torch.bool)
    if mask.window is not None:
        seen = seen & ((key >= anchor - mask.window) if trained else (slot - key < mask.window))
    return seen & (key <= slot) if mask.causal else seen


@torch.no_grad()
def block_logits(model: DFlash, about: Recorded, anchor: int, *, trained: bool) -> Tensor:
    """The module's logits [D, V'] for the block at `anchor`, over the recorded features."""
    config = model.config
    keys, values = model.context_kv(about.features[:anchor], torch.arange(anchor))
    positions = torch.arange(anchor, anchor + config.block_size)
    ids = torch.full((config.block_size,), config.mask_token_id)
    ids[0] = about.tokens[anchor]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        k, v = torch.cat([keys[:, layer], k]), torch.cat([values[:, layer], v])
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = sees(config.decoder.masks[layer], anchor, config.block_size, trained=trained)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(0, 1).flatten(1)

    x, _ = model(ids, positions, attend)
    return known(model, model.head(x[-config.block_drafts :]))


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
    """At every anchor, with windows that begin where the package's begin in training."""
    model, about = watched(engine_of(name)).inner.model, recorded(name)
    assert about.anchors == list(range(PROMPT, len(about.tokens) - 5))
    ids = torch.arange(model.config.decoder.vocab_size)
    ids = ids if model.target_ids is None else model.target_ids
    for anchor, wanted, drafts in zip(about.anchors, about.logits, about.drafts, strict=True):
        found = block_logits(model, about, anchor, trained=True)
        assert close(found, wanted)
        assert torch.equal(ids[found.argmax(-1)], drafts)


@pytest.mark.parametrize("name", MASKS)
def test_export_drafts_like_the_original_and_keeps_answers(name: str):
    """Behind Strobe's own features, step by step. Windows are then counted from each slot, as
    engines do: blocks that the window holds with all before them are the package's to the token,
    later ones differ by where the window begins and by nothing else."""
    about, engine = recorded(name), engine_of(name)
    prompt, answer = about.tokens[:PROMPT], about.tokens[PROMPT:]
    asked = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    assert run(engine, [prompt], asked) == [answer], "what transformers generated"
    model, same, other = watched(engine).inner.model, 0, 0
    slides = any(mask.window is not None for mask in MASKS[name])
    for made in watched(engine).true_drafts():
        if made.start not in about.anchors:
            continue
        row = about.anchors.index(made.start)
        found = known(model, made.logits)
        assert close(found, block_logits(model, about, made.start, trained=False))
        if slides and made.start + model.config.block_size > WINDOW:
            other += not close(found, about.logits[row])
            continue
        same += 1
        assert close(found, about.logits[row])
        assert made.tokens == about.drafts[row].tolist()
    assert same > 4
    assert (other > 4) == slides


def test_export_names_target_and_num_drafts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(MADE)
    found = locate_models(EngineConfig("first_slot"))
    assert (found.method, found.num_drafts) == ("dflash", 5)
    assert Path(found.target).resolve() == MADE / "target"
    assert found.draft is not None
    assert Path(found.draft).resolve() == MADE / "first_slot"


@pytest.mark.parametrize("name", MASKS)
def test_served_by_its_own_path_it_answers_as_its_target_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
):
    for part in ("target", name):
        shutil.copytree(MADE / part, tmp_path / part)
    make_tokenizer(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    about = recorded(name)
    prompt: Any = {"prompt_token_ids": about.tokens[:PROMPT]}
    answer = about.tokens[PROMPT:]
    asked = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
    llm = LLM(name, speculative_config={"num_speculative_tokens": 2}, max_model_len=64)
    (output,) = llm.generate([prompt], asked)
    assert output.outputs[0].token_ids == answer
    report = output.outputs[0].speculation
    assert report is not None
    assert report.method == "dflash"
    assert len(report.accepted_per_position) == 2
    assert llm.engine.resolved.limits.num_drafts == 2


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"model": "full"}, "draft is 'full', but causal is a drafter that brings its own; leave"),
        ({"method": "ngram"}, "method is 'ngram', but causal is a drafter that brings its own;"),
    ],
)
def test_export_path_rejects_another_drafter(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sentence: str
):
    monkeypatch.chdir(MADE)
    with pytest.raises(ValueError, match=sentence):
        LLM("causal", speculative_config={**given, "num_speculative_tokens": 2})
