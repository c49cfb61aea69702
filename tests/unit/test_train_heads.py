"""Training of DFlash2's and DSpark's heads. Tiny random models, CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_train import (
    BLOCK,
    MASK_TOKEN,
    POSITIONS,
    blocks_of,
    samples,
    settings,
    tiny_draft,
    tiny_target,
)
from torch import Tensor

from strobe.models.architectures import load_draft_config
from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.models.weight_loading import load_draft
from strobe.tools.train.acceptance_length import noise_of_choices
from strobe.tools.train.capture import capture
from strobe.tools.train.draft import (
    as_saved,
    draft_config,
    new_draft,
    save_draft,
)
from strobe.tools.train.edges import candidate_loss, choose, edges_of, previous_tokens
from strobe.tools.train.train_settings import DraftShape
from strobe.tools.train.trainer import Trainer
from strobe.tools.train.training_blocks import context_kv, draft_hidden
from strobe.tools.train.warm_start import continued_config, start_from

HEADS: dict[str, dict[str, Any]] = {
    "dflash2": {"head": "dflash2", "candidates": 6, "conv_group": 8},
    "dspark": {"head": "dspark"},
    "dspark with candidates": {"head": "dspark", "candidates": 6, "confidence": True},
}


def shape_of(name: str, rank: int = 4, **changes: Any) -> DraftShape:
    usual = DraftShape(layers=2, block_size=BLOCK, features=2, rank=rank)
    return replace(usual, **HEADS[name], **changes)


def drafter(target: Target, name: str, start: DFlash | None = None, **changes: Any) -> DFlash:
    config = draft_config(shape_of(name, **changes), target.config, MASK_TOKEN)
    draft = new_draft(config, target, max_positions=POSITIONS, seed=2)
    if start is not None:
        start_from(draft, start)
    return draft


def disturb(draft: DFlash) -> None:
    """Give every tensor of the head and the convolutions an effect."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if name.startswith("draft_head.") or "_conv." in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)


def hidden_of(draft: DFlash, target: Target) -> tuple[Tensor, Tensor]:
    """The residual stream of all slots of a sample, and the tokens before them."""
    sample = samples(1)[0]
    batch, blocks = blocks_of(sample, target, draft)
    features = capture(target, batch.ids, draft.config.capture).features
    hidden = draft_hidden(draft, *context_kv(draft, features), blocks)
    return hidden.flatten(0, 2), previous_tokens(blocks).flatten()


@pytest.mark.parametrize("name", HEADS)
def test_new_head_changes_no_draft(name: str) -> None:
    target = tiny_target()
    start = tiny_draft(target)
    draft = drafter(target, name, start)
    with torch.no_grad():
        hidden, previous = hidden_of(draft, target)
        expected, _ = hidden_of(start, target)
        torch.testing.assert_close(hidden, expected, atol=0.0, rtol=0.0)
        assert choose(draft, hidden, previous).equal(start.head(hidden).argmax(-1))


def test_new_heads_first_loss_is_the_old_drafters() -> None:
    target = tiny_target()
    start = tiny_draft(target)
    losses = list[float]()
    for draft in (start, drafter(target, "dflash2", start), drafter(target, "dspark", start)):
        run = settings()
        run = replace(run, objective=replace(run.objective, unary_share=0.999999))
        losses.append(float(Trainer(target, draft, run, samples(4)).step().loss))
    assert losses[2] == losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_gradients_reach_every_tensor(name: str) -> None:
    target = tiny_target()
    draft = drafter(target, name)
    disturb(draft)
    trainer = Trainer(target, draft, settings(), samples(4))
    before = {name: value.detach().clone() for name, value in draft.named_parameters()}
    trainer.step()
    still = [name for name, value in draft.named_parameters() if value.equal(before[name])]
    assert still == []


@pytest.mark.parametrize("name", HEADS)
def test_saved_head_loads_with_equal_weights(name: str, tmp_path: Path) -> None:
    target = tiny_target()
    draft = drafter(target, name)
    disturb(draft)
    save_draft(draft, tmp_path, {"eos_token_id": 1})
    config = load_draft_config(tmp_path)
    assert config == replace(draft.config, embedding_scale=None)
    assert not config.anchor_first
    loaded = load_draft(
        tmp_path,
        config,
        target,
        max_positions=POSITIONS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for (key, saved), value in zip(draft.named_parameters(), loaded.parameters(), strict=True):
        assert saved.bfloat16().float().equal(value), key


def test_saved_heads_use_published_names() -> None:
    target = tiny_target()
    names = set(as_saved(tiny_draft(target)))
    selector = {f"candidate_selector.{side}_codebook" for side in ("predecessor", "successor")}
    convolutions = {
        f"layers.{layer}.{part}_conv.{tensor}"
        for layer in range(2)
        for part in ("attention", "mlp")
        for tensor in ("base_kernel", "kernel_projection.weight")
    }
    assert set(as_saved(drafter(target, "dflash2"))) == names | selector | convolutions | {
        "candidate_selector.hidden_projection.weight"
    }
    markov = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    assert set(as_saved(drafter(target, "dspark"))) == names | markov


@pytest.mark.parametrize("name", HEADS)
def test_shorter_vectors_and_narrower_mlps_keep_the_strongest(name: str) -> None:
    target = tiny_target()
    start = drafter(target, name)
    disturb(start)
    edges = edges_of(start)
    assert edges is not None
    with torch.no_grad():
        edges.right[:, [0, 2]] = 0.0
        for parameter_name, parameter in start.named_parameters():
            if parameter_name.endswith("down_proj.weight"):
                parameter[:, ::3] = 0.0
    draft = drafter(target, name, start, rank=2, intermediate_size=32)
    with torch.no_grad():
        hidden, previous = hidden_of(start, target)
        own, _ = hidden_of(draft, target)
        torch.testing.assert_close(own, hidden, atol=1e-5, rtol=1e-5)
        assert choose(draft, hidden, previous).equal(choose(start, hidden, previous))


def test_candidates_loss_is_that_of_all_tokens_if_all_are_candidates() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(5, 7, generator=generator) for _ in range(2))
    labels = torch.tensor([3, 0, 6, 2, 2])
    shares = torch.tensor([0.0, 0.3, 0.5, 1.0, 0.7])
    ids = torch.cat([torch.arange(7).expand(5, 7), labels[:, None]], 1)
    wanted = teacher.log_softmax(-1)
    loss = candidate_loss(logits.gather(1, ids), ids, wanted.gather(1, ids), shares, 0.7)
    mixed = shares[:, None] * wanted.exp() + (1 - shares[:, None]) * F.one_hot(labels, 7)
    cross = -(mixed * logits.log_softmax(-1)).sum(-1)
    overlap = torch.minimum(mixed, logits.softmax(-1)).sum(-1)
    torch.testing.assert_close(loss.loss, 0.3 * cross + 0.7 * (1 - overlap))
    entropy = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(loss.entropy, entropy)
    assert loss.best.equal(logits.argmax(-1))


def test_label_outside_the_candidates_is_never_the_best() -> None:
    ids = torch.tensor([[4, 9, 2]])
    scores = torch.tensor([[1.0, 0.5, 8.0]])
    loss = candidate_loss(scores, ids, torch.zeros(1, 3), torch.zeros(1), 0.0)
    assert loss.best.tolist() == [4]
    assert float(loss.entropy) == pytest.approx(float(-scores.log_softmax(-1)[0, 2]))


def test_noise_of_choices_wins_the_race_and_is_gumbel() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0]).expand(20_000, 4)
    tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
    noise = noise_of_choices(logits, tokens, generator)
    assert (logits + noise).argmax(-1).equal(tokens)
    # A Gumbel variable has mean 0.5772 and variance pi^2 / 6: measured within 0.01 and 0.03.
    torch.testing.assert_close(noise.mean(0), torch.full((4,), 0.5772), atol=0.03, rtol=0.0)
    torch.testing.assert_close(noise.var(0), torch.full((4,), math.pi**2 / 6), atol=0.08, rtol=0.0)
    assert float(noise.T.corrcoef().fill_diagonal_(0.0).abs().max()) < 0.03


@pytest.mark.parametrize("name", HEADS)
def test_edges_alone_learn_which_token_follows_which(name: str) -> None:
    target = tiny_target()
    draft = drafter(target, name, tiny_draft(target))
    edges = edges_of(draft)
    assert edges is not None
    draft.requires_grad_(False)
    edges.right.requires_grad_(True)
    edges.before.requires_grad_(True)
    run = settings()
    run = replace(run, objective=replace(run.objective, unary_share=0.0))
    run = replace(run, schedule=replace(run.schedule, steps=60, learning_rate=0.05))
    trainer = Trainer(target, draft, run, samples(4))
    first = float(trainer.step().loss)
    losses = [float(trainer.step().loss) for _ in range(1, trainer.total)]
    assert losses[-1] < 0.7 * first


def test_continued_config_rejects_another_shape() -> None:
    shape = DraftShape(layers=2, block_size=BLOCK, features=2)
    start = draft_config(shape, tiny_target().config, MASK_TOKEN)
    kept = continued_config(DraftShape(head="dflash2", rank=8), start)
    assert kept.method == "DFlash2"
    assert kept.decoder == start.decoder
    with pytest.raises(ValueError, match=r"draft\.layers is 3, but 2 in the drafter to start from"):
        continued_config(DraftShape(layers=3), start)
    with pytest.raises(ValueError, match="parts that training does not support"):
        continued_config(DraftShape(), replace(start, output_multiplier=2.0))
    with pytest.raises(ValueError, match="has only 48; ask for at most that"):
        continued_config(DraftShape(intermediate_size=64), start)


def test_invalid_heads_raise_errors() -> None:
    with pytest.raises(ValueError, match=r"draft\.candidates is 33, but must be 1 to 32"):
        DraftShape(head="dflash2", candidates=33)
    with pytest.raises(ValueError, match=r"draft\.confidence needs draft\.head dspark"):
        DraftShape(head="dflash2", confidence=True)
    with pytest.raises(ValueError, match=r"draft\.rank is 0, but must be at least 1"):
        DraftShape(head="dspark", rank=0)
    target = tiny_target()
    start = drafter(target, "dflash2")
    with pytest.raises(ValueError, match="a head for DFlash2, the new one is for DSpark"):
        start_from(drafter(target, "dspark"), start)
    with pytest.raises(ValueError, match="a head for DFlash2, the new one is for DFlash;"):
        start_from(tiny_draft(target), start)
    with pytest.raises(ValueError, match="does not fit at draft_head"):
        start_from(drafter(target, "dflash2", rank=8), start)
