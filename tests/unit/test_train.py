"""Drafter training: masks, anchors, loss, learning, export, resume. Tiny random models, CPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.models.architectures import load_draft_config, load_target_config, make_target
from strobe.models.config_readers.rope import RopeConfig
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DecoderConfig, LayerMask, TargetConfig
from strobe.models.target import Target
from strobe.models.weight_loading import load_draft, load_target
from strobe.tools.train.__main__ import train
from strobe.tools.train.acceptance_length import Acceptance, answer_spans, batch_acceptance
from strobe.tools.train.capture import capture, target_choices
from strobe.tools.train.data import (
    Corpus,
    Sample,
    chat_sample,
    epoch_order,
    read_lines,
    read_samples,
)
from strobe.tools.train.draft import as_saved, draft_config, new_draft, save_draft
from strobe.tools.train.loss import (
    Accuracy,
    Slots,
    block_loss,
    decay_weights,
    default_gamma,
    dpace_weights,
    measure_slots,
)
from strobe.tools.train.regenerate import (
    RegenerateSettings,
    engine_answer,
    prompts,
    regenerate,
)
from strobe.tools.train.regenerate import main as regenerate_main
from strobe.tools.train.train_settings import DraftShape, Objective, Schedule, TrainSettings
from strobe.tools.train.trainer import Trainer, learning_rate, split_heldout
from strobe.tools.train.training_blocks import (
    context_kv,
    draft_hidden,
    every_anchor,
    legal_anchors,
    make_blocks,
    random_anchors,
    visible,
)

VOCABULARY, MASK_TOKEN, BLOCK, POSITIONS = 40, 39, 4, 128
FULL = LayerMask(causal=False)
SLIDING = LayerMask(causal=True, window=3)
SYMMETRIC = LayerMask(causal=False, window=3)


def tiny_target(*, window: int | None = None, seed: int = 0) -> Target:
    torch.manual_seed(seed)
    decoder = DecoderConfig(
        hidden_size=32,
        intermediate_size=48,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10000.0),
        max_position=POSITIONS,
        attention_bias=False,
        masks=(LayerMask(True, window),) * 6,
    )
    config = TargetConfig("Qwen3ForCausalLM", decoder, True, "float32", (1,), {})
    target = make_target(config, POSITIONS)
    return target.requires_grad_(False)


def tiny_draft(target: Target, masks: tuple[LayerMask, ...] = (FULL, FULL)) -> DFlash:
    shape = DraftShape(layers=len(masks), block_size=BLOCK, features=2)
    config = draft_config(shape, target.config, MASK_TOKEN)
    config = replace(config, decoder=replace(config.decoder, masks=masks))
    return new_draft(config, target, max_positions=POSITIONS, seed=1)


def samples(count: int, *, seed: int = 0, prompt: int = 5, answer: int = 20) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(2, MASK_TOKEN, (count, prompt + answer), generator=generator).tolist()
    ends = [prompt + answer - i % 5 for i in range(count)]
    return [Sample.of(r[:prompt], r[prompt:end]) for r, end in zip(rows, ends, strict=True)]


def settings(**changes: Any) -> TrainSettings:
    base = TrainSettings(Path("target"), Path("data"), Path("out"))
    schedule = Schedule(steps=6, batch_size=4, anchors=8, learning_rate=2e-3)
    return replace(base, schedule=schedule, **changes)


def blocks_of(sample: Sample, target: Target, draft: DFlash) -> tuple[Any, Any]:
    batch = Corpus([sample]).batch(torch.tensor([0]))
    anchors, live = every_anchor(legal_anchors(batch.supervised))
    blocks = make_blocks(
        batch.ids, batch.supervised, anchors, live, size=BLOCK, mask_token=MASK_TOKEN
    )
    return batch, blocks


# Features


def saved_target(directory: Path, vocabulary: int = VOCABULARY) -> Any:
    """A tiny Qwen3 of transformers, saved in `directory`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    oracle = Qwen3ForCausalLM(config).eval()
    oracle.save_pretrained(directory)
    return oracle


def test_features_match_transformers_residual_streams(tmp_path: Path) -> None:
    oracle = saved_target(tmp_path)
    target = load_target(
        tmp_path,
        load_target_config(tmp_path),
        max_positions=POSITIONS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    ids = torch.randint(2, MASK_TOKEN, (3, 17))
    with torch.no_grad():
        out = oracle(ids, output_hidden_states=True)
    captured = capture(target, ids, (0, 2, 5))
    expected = torch.cat([out.hidden_states[k] for k in (0, 2, 5)], -1)
    torch.testing.assert_close(captured.features, expected, atol=1e-5, rtol=1e-4)
    assert target_choices(target, captured.hidden, rows=7).equal(out.logits.argmax(-1))


@pytest.mark.parametrize("window", [None, 4])
def test_features_do_not_depend_on_padding_or_other_sequences(window: int | None) -> None:
    target = tiny_target(window=window)
    ids = torch.randint(2, MASK_TOKEN, (2, 20))
    batched = capture(target, ids, (1, 3)).features
    alone = capture(target, ids[1:, :13], (1, 3)).features
    torch.testing.assert_close(batched[1:, :13], alone, atol=1e-5, rtol=1e-4)


# Blocks


def test_masks_match_formula() -> None:
    anchors = torch.tensor([[2, 5]])
    positions = anchors[..., None] + torch.arange(BLOCK)
    length = 9
    for mask in (FULL, SLIDING, SYMMETRIC, LayerMask(causal=True)):
        actual = visible(mask, anchors, positions, length)[0, 0]
        assert actual.shape == (2 * BLOCK, length + 2 * BLOCK)
        for row in range(2 * BLOCK):
            block, slot = divmod(row, BLOCK)
            anchor = int(anchors[0, block])
            p = anchor + slot
            for column in range(length + 2 * BLOCK):
                key_slot = column - length - block * BLOCK
                if column < length:
                    j, exists = column, column < anchor
                else:
                    j, exists = anchor + key_slot, 0 <= key_slot < BLOCK
                near = mask.window is None or abs(p - j) < mask.window
                expected = exists and near and (not mask.causal or j <= p)
                assert bool(actual[row, column]) == expected, (mask, row, column)


def test_anchors_are_legal_distinct_and_reproducible() -> None:
    supervised = torch.zeros(2, 30, dtype=torch.bool)
    supervised[0, 4:20] = True
    supervised[0, 10] = False
    supervised[1, 7:10] = True
    legal = legal_anchors(supervised)
    assert legal[0].nonzero().flatten().tolist() == [*range(4, 9), *range(11, 19)]
    assert legal[1].nonzero().flatten().tolist() == [7, 8]
    drawn, live = random_anchors(legal, 6, torch.Generator().manual_seed(3))
    same_seed, _ = random_anchors(legal, 6, torch.Generator().manual_seed(3))
    next_seed, _ = random_anchors(legal, 6, torch.Generator().manual_seed(4))
    assert drawn.equal(same_seed)
    assert not drawn.equal(next_seed)
    assert live.sum(1).tolist() == [6, 2]
    for row in range(2):
        live_anchors = drawn[row][live[row]]
        assert legal[row][live_anchors].all()
        assert len(set(live_anchors.tolist())) == len(live_anchors)
    all_anchors, all_live = every_anchor(legal)
    assert all_anchors[0][all_live[0]].tolist() == legal[0].nonzero().flatten().tolist()


def test_blocks_hold_the_anchor_and_mask_tokens() -> None:
    sample = Sample.of([2, 3, 4], [10, 11, 12, 13, 14])
    batch = Corpus([sample]).batch(torch.tensor([0]))
    anchors, live = every_anchor(legal_anchors(batch.supervised))
    blocks = make_blocks(
        batch.ids, batch.supervised, anchors, live, size=BLOCK, mask_token=MASK_TOKEN
    )
    assert blocks.anchors.tolist() == [[3, 4, 5, 6]]
    assert blocks.ids[0, 1].tolist() == [11, MASK_TOKEN, MASK_TOKEN, MASK_TOKEN]
    assert blocks.positions[0, 3].tolist() == [6, 7, 8, 9]
    assert blocks.labels[0, 0].tolist() == [11, 12, 13]
    assert blocks.valid[0].tolist() == [
        [True, True, True],
        [True, True, True],
        [True, True, False],
        [True, False, False],
    ]


def one_block(draft: DFlash, features: Tensor, token: int) -> Tensor:
    """Run the drafter as for serving: context [0, start) by `context_kv`, then one block."""
    start = features.shape[0]
    keys, values = draft.context_kv(features, torch.arange(start))
    positions = torch.arange(start, start + BLOCK)
    columns = torch.arange(start + BLOCK)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = draft.config.decoder.masks[layer]
        k, v = torch.cat([keys[:, layer], k]), torch.cat([values[:, layer], v])
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        distance = positions[:, None] - columns
        can_see = torch.ones_like(distance, dtype=torch.bool)
        if mask.causal:
            can_see &= distance >= 0
        if mask.window is not None:
            can_see &= distance.abs() < mask.window
        score = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        score = score.masked_fill(~can_see, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", score, v).flatten(1)

    ids = torch.tensor([token] + [MASK_TOKEN] * (BLOCK - 1))
    hidden, _ = draft(ids, positions, attend)
    return draft.head(hidden[1:])


@pytest.mark.parametrize("masks", [(FULL, FULL), (SLIDING, FULL), (SYMMETRIC, SLIDING)])
def test_training_forward_matches_single_blocks(masks: tuple[LayerMask, ...]) -> None:
    target = tiny_target()
    draft = tiny_draft(target, masks)
    sample = samples(1, answer=40)[0]
    batch, blocks = blocks_of(sample, target, draft)
    features = capture(target, batch.ids, draft.config.capture).features
    keys, values = context_kv(draft, features)
    logits = draft.head(draft_hidden(draft, keys, values, blocks))[0]
    assert logits.shape[0] > 32  # more than one group of blocks
    with torch.no_grad():
        for i, anchor in enumerate(blocks.anchors[0].tolist()):
            expected = one_block(draft, features[0, :anchor], sample.ids[anchor])
            torch.testing.assert_close(logits[i], expected, atol=1e-5, rtol=1e-5)


# Loss


def test_decay_weights_match_the_paper() -> None:
    assert [default_gamma(b) for b in (16, 10, 8)] == [7.0, 5.0, 4.0]
    weights = decay_weights(15, 7.0)
    assert weights[0] == 1.0
    torch.testing.assert_close(weights[7], torch.tensor(-1.0).exp())
    ce = torch.tensor([[1.0, 2.0, 5.0]])
    valid = torch.tensor([[True, True, False]])
    slots = Slots(ce, torch.zeros_like(ce), valid)
    w = float(torch.tensor(-1 / 4.0).exp())
    loss = block_loss(slots, valid, Objective(gamma=4.0))
    assert float(loss) == pytest.approx((1 + 2 * w) / (1 + w))
    assert float(block_loss(slots, torch.zeros_like(valid), Objective())) == 0.0


def test_dpace_weights_match_the_formula() -> None:
    ce = torch.tensor([[0.1, 0.7, 0.3]])
    s = 0.5 * torch.exp(-ce[0]) + 0.5
    p = [float(s[0]), float(s[0] * s[1]), float(s[0] * s[1] * s[2])]
    weights = dpace_weights(ce, torch.ones(1, 3), 0.5)[0]
    assert weights.tolist() == pytest.approx([sum(p), p[1] + p[2], p[2]])
    weights = dpace_weights(ce, torch.tensor([[1, 1, 0]]), 0.5)[0]
    assert weights.tolist() == pytest.approx([p[0] + p[1], p[1], 0.0])


def test_measuring_slots_in_parts_changes_nothing() -> None:
    target = tiny_target()
    hidden = torch.randn(5, 3, 32, requires_grad=True)
    labels = torch.randint(0, VOCABULARY, (5, 3))
    teacher = torch.randn(5, 3, VOCABULARY)
    grads: list[Tensor] = []
    for rows in (None, 4):
        slots = measure_slots(target.head, hidden, labels, teacher, rows=rows)
        loss = block_loss(slots, torch.ones(5, 3).bool(), Objective(kl=0.5))
        grads += torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(grads[0], grads[1])
    logits = target.head(hidden)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(slots.cross_entropy.flatten(), expected)
    p = teacher.softmax(-1)
    kl = (p * (p.log() - logits.log_softmax(-1))).sum(-1)
    torch.testing.assert_close(slots.kl, kl)


def test_expected_length_multiplies_accuracies() -> None:
    accuracy = Accuracy(torch.tensor([8, 4]), torch.tensor([10, 8]))
    assert (accuracy + accuracy).expected_length() == pytest.approx(1 + 0.8 + 0.8 * 0.5)


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    schedule = Schedule(learning_rate=1.0, warmup=0.1)
    rates = [learning_rate(i, 100, schedule) for i in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[100] == pytest.approx(0.0)


# Learning


@pytest.mark.parametrize("objective", [Objective("data"), Objective("data", "dpace", kl=0.1)])
def test_tiny_drafter_overfits_one_sequence(objective: Objective) -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    run = settings(objective=objective)
    run = replace(run, schedule=replace(run.schedule, steps=120, learning_rate=4e-3, anchors=32))
    trainer = Trainer(target, draft, run, samples(1))
    results = [trainer.step() for _ in range(trainer.total)]
    assert min(results[-1].accuracy.per_position()) > 0.98
    assert float(results[-1].loss) < 0.2 * float(results[0].loss)
    batch = trainer.corpus.batch(torch.tensor([0]))
    acceptance = batch_acceptance(draft, target, batch)[0]
    assert acceptance.tokens == 19  # the answer's 20 tokens, the first from the prefill
    assert acceptance.length > 3.5


def test_target_labels_are_its_greedy_tokens() -> None:
    target = tiny_target()
    draft = tiny_draft(target)
    sample = samples(1)[0]
    greedy = list(sample.ids[:5])
    for _ in range(12):
        hidden = capture(target, torch.tensor([greedy]), (1,)).hidden
        greedy.append(int(target_choices(target, hidden)[0, -1]))
    losses: list[float] = []
    for labels in ("data", "target"):
        run = settings(objective=Objective(labels))
        trainer = Trainer(target, draft, run, [Sample.of(greedy[:5], greedy[5:])])
        loss, _ = trainer._loss(
            trainer.corpus.batch(torch.tensor([0])), torch.Generator().manual_seed(0)
        )
        losses.append(loss.item())
    assert losses[0] == losses[1]


def test_resume_equals_uninterrupted_training_bit_for_bit(tmp_path: Path) -> None:
    target, data = tiny_target(), samples(18)
    run = settings()
    uninterrupted = Trainer(target, tiny_draft(target), run, data)
    while uninterrupted.done < 6:
        uninterrupted.step()
    first = Trainer(target, tiny_draft(target), run, data)
    for _ in range(3):
        first.step()
    first.save(tmp_path / "checkpoint.pt")
    torch.manual_seed(123)
    second = Trainer(target, tiny_draft(target), run, data)
    second.load(tmp_path / "checkpoint.pt")
    while second.done < 6:
        second.step()
    expected = uninterrupted.draft.named_parameters()
    for (name, a), b in zip(expected, second.draft.parameters(), strict=True):
        assert a.equal(b), name
    with pytest.raises(ValueError, match="was written with seed = 0, not 5"):
        Trainer(target, tiny_draft(target), replace(run, seed=5), data).load(
            tmp_path / "checkpoint.pt"
        )
    with pytest.raises(ValueError, match="18 training sequences, the data now has 17"):
        Trainer(target, tiny_draft(target), run, data[:-1]).load(tmp_path / "checkpoint.pt")


@pytest.mark.full
def test_compiled_steps_are_full_graphs_with_equal_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def losses(**changes: Any) -> list[float]:
        target = tiny_target(seed=5)
        data = samples(8, prompt=4, answer=30) + samples(8, prompt=9, answer=50)
        trainer = Trainer(target, tiny_draft(target), settings(**changes), data)
        return [float(trainer.step().loss) for _ in range(4)]

    eager, compile = losses(), torch.compile
    monkeypatch.setattr(torch, "compile", partial(compile, backend="eager", fullgraph=True))
    assert losses(compile=True) == pytest.approx(eager, rel=1e-5)


def test_micro_batches_sum_to_one_step() -> None:
    target = tiny_target()
    data = [Sample.of(s.ids[:5], s.ids[5:20]) for s in samples(4)]
    run = settings()
    run = replace(run, schedule=replace(run.schedule, anchors=64))  # all of them, no random choice
    micro = replace(run, schedule=replace(run.schedule, micro_batch=2))
    a, b = (Trainer(target, tiny_draft(target), r, data).step() for r in (run, micro))
    torch.testing.assert_close(a.norm, b.norm, rtol=1e-4, atol=1e-5)
    assert a.accuracy.count.equal(b.accuracy.count)


# Export


@pytest.mark.parametrize("sliding", [0, 1])
def test_saved_draft_loads_with_equal_weights_and_logits(tmp_path: Path, sliding: int) -> None:
    target = tiny_target()
    shape = DraftShape(
        layers=2, block_size=BLOCK, features=2, sliding_layers=sliding, sliding_window=5
    )
    config = draft_config(shape, target.config, MASK_TOKEN)
    draft = new_draft(config, target, max_positions=POSITIONS, seed=1)
    with torch.no_grad():
        for parameter in draft.parameters():  # round to bf16
            parameter.copy_(parameter.bfloat16().float())
    save_draft(draft, tmp_path, {"eos_token_id": 1})
    loaded_config = load_draft_config(tmp_path)
    assert loaded_config == config
    loaded = load_draft(
        tmp_path,
        loaded_config,
        target,
        max_positions=POSITIONS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for (name, a), b in zip(draft.named_parameters(), loaded.parameters(), strict=True):
        assert a.equal(b), name
    ids = samples(1)[0].ids
    features = capture(target, torch.tensor([ids]), config.capture).features[0, :9]
    with torch.no_grad():
        expected, logits = one_block(draft, features, ids[9]), one_block(loaded, features, ids[9])
    # Loaded models compute norms differently: measured 1.6e-6, bound 1e-5.
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_saved_draft_uses_zlabs_names(tmp_path: Path) -> None:
    draft = tiny_draft(tiny_target())
    names = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")),
    }
    layers = {f"layers.{i}.{n}.weight" for i in range(2) for n in names}
    assert set(as_saved(draft)) == layers | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    save_draft(draft, tmp_path, {"bos_token_id": None, "eos_token_id": 1})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3]}
    assert config["num_target_layers"] == 6
    assert config["layer_types"] == ["full_attention"] * 2


# Data


def test_corpus_batches_are_padded_samples() -> None:
    data = samples(9)
    corpus = Corpus(data)
    batch = corpus.batch(torch.tensor([3, 0]))
    assert batch.ids.shape == (2, 64)
    for row, i in enumerate((3, 0)):
        length = len(data[i].ids)
        assert tuple(batch.ids[row, :length].tolist()) == data[i].ids
        assert tuple(batch.supervised[row, :length].tolist()) == data[i].supervised
        assert not batch.supervised[row, length:].any()
        assert not batch.ids[row, length:].any()
    order = epoch_order(corpus.lengths, 4, torch.Generator().manual_seed(0))
    assert [len(b) for b in order] == [4, 4]
    assert len(set(torch.cat(order).tolist())) == 8


def test_walk_counts_verify_steps() -> None:
    result = Acceptance(3)
    result.walk([0, 0, 2, 0, 0, 1, 0, 3, 0, 0], 2, 9)  # 2 -> 5 -> 7 -> end, cut to two drafts
    assert (result.steps, result.tokens) == (3, 7)
    assert result.accepted == [3, 2, 0]
    assert answer_spans([False, True, True, False, True]) == [(1, 2), (4, 4)]


class WordTokenizer:
    """Words are tokens; the template marks turns with <u> and <a>, and drops earlier thinking."""

    words = ("pad", "<e>", "<u>", "<a>", *"abcdefghij", "<t>")

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, **_: Any
    ) -> str:
        text: list[str] = []
        for i, message in enumerate(messages):
            content = message["content"]
            if message["role"] == "user":
                text += ["<u>", content]
            else:
                is_earlier = i < len(messages) - 1
                text += ["<a>", content.replace("<t> ", "") if is_earlier else content, "<e>"]
        return " ".join([*text, *(["<a>"] if add_generation_prompt else [])])

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self.words.index(word) for word in text.split()]


def test_chats_supervise_target_text() -> None:
    chat = [
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "c d"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "<t> f g"},
    ]
    sample = chat_sample(WordTokenizer(), {"messages": chat}, "x:1", (1,))
    tokens = " ".join(WordTokenizer.words[i] for i in sample.ids)
    assert tokens == "<u> a b <a> c d <e> <u> e <a> <t> f g <e>"
    marked = [WordTokenizer.words[i] for i, m in zip(*vars(sample).values(), strict=True) if m]
    assert marked == ["c", "d", "<e>", "<t>", "f", "g", "<e>"]
    with pytest.raises(ValueError, match="the last message is not an answer"):
        chat_sample(WordTokenizer(), {"messages": chat[:1]}, "x:1", (1,))


def test_errors_name_the_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"

    def read(text: str) -> list[Sample]:
        path.write_text(text)
        return read_samples(path, None, vocabulary=40, eos_ids=(1,), max_length=8)

    good = '{"prompt_ids": [3, 4], "output_ids": [5, 6, 7]}\n'
    assert read(good + "\n") == [Sample.of([3, 4], [5, 6, 7])]
    with pytest.raises(ValueError, match="jsonl:2: Expecting"):
        read(good + "{")
    with pytest.raises(ValueError, match="output_ids must be a list of token ids from 0 to 39"):
        read('{"prompt_ids": [3], "output_ids": [40, 2]}')
    with pytest.raises(ValueError, match="needs either messages"):
        read('{"text": "hello"}')
    with pytest.raises(ValueError, match="no answer of two or more tokens within max_length 8"):
        read('{"prompt_ids": [3], "output_ids": [4]}')


def test_regenerate_answers_every_turn_and_continues(tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"messages": chat}) + '\n{"prompt_ids": [7, 8]}\n')
    prompt_ids = list(prompts(source, WordTokenizer(), room=20))
    assert [" ".join(WordTokenizer.words[i] for i in ids) for ids in prompt_ids] == [
        "<u> a <a>",
        "<u> a <a> b <e> <u> c <a>",
        "d e",
    ]
    calls: list[int] = []

    def answer(part: list[list[int]], start: int) -> list[list[int]]:
        calls.append(start)
        return [[len(ids), 1] for ids in part]

    assert regenerate(prompt_ids[:2], answer, output, at_once=1) == 2
    assert regenerate(prompt_ids, answer, output, at_once=1) == 3
    assert calls == [0, 1, 2]
    regenerated = read_samples(output, None, vocabulary=40, eos_ids=(1,), max_length=99)
    assert regenerated == [Sample.of(ids, [len(ids), 1]) for ids in prompt_ids]
    with pytest.raises(ValueError, match="answers to other prompts"):
        regenerate(prompt_ids[1:], answer, output, at_once=1)
    with pytest.raises(ValueError, match="has 8 tokens, but the target's context has room"):
        list(prompts(source, WordTokenizer(), room=6))


def test_only_newlines_end_data_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a\u2028b\x85c"}\r\n\n{"text": "d"}')
    assert [line["text"] for _, line in read_lines(path)] == ["a\u2028b\x85c", "d"]
    assert [place for place, _ in read_lines(path)] == [f"{path}:1", f"{path}:3"]


# The command


def saved_tokenizer(directory: Path) -> None:
    """Save a tokenizer of words w0, w1, ... with ids 0, 1, ...; in a chat, w1 ends a message."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(MASK_TOKEN)}
    model = Tokenizer(models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="w0", eos_token="w1")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }} w1 {% endfor %}"
        "{% if add_generation_prompt %}{% endif %}"
    )
    tokenizer.save_pretrained(directory)


def test_command_trains_resumes_and_writes_a_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, data, output = tmp_path / "target", tmp_path / "data.jsonl", tmp_path / "out"
    saved_target(target)
    saved_tokenizer(target)
    answer = " ".join(f"w{i}" for i in range(2, 12))
    chat = {
        "messages": [
            {"role": "user", "content": "w20 w21"},
            {"role": "assistant", "content": answer},
        ]
    }
    ids = {"prompt_ids": [7, 8], "output_ids": list(range(2, 15))}
    data.write_text("".join(json.dumps(line) + "\n" for line in [chat, ids] * 4))
    run = TrainSettings(
        target,
        data,
        output,
        draft=DraftShape(layers=1, block_size=BLOCK, features=2),
        schedule=Schedule(steps=4, batch_size=4, anchors=4),
        max_length=64,
        heldout=0.1,
        device="cpu",
        log_every=2,
    )
    capsys.readouterr()
    train(run)
    first, evaluation, written = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"training \(step 1: loss \d+\.\d{3}, length \d\.\d\d\): "
        r"1 of 4 steps, \S+ per second, 0:\d\d:\d\d left",
        first,
    )
    assert evaluation.startswith("step 4: held-out acceptance length ")
    assert written == f"drafter written to {output}"
    config = load_draft_config(output)
    assert config.mask_token_id == MASK_TOKEN  # the first row the tokenizer does not use
    records = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == [2, 4, 4]
    assert records[-1]["heldout_acceptance_length"] >= 1.0
    assert records[1]["learning_rate"] < records[0]["learning_rate"]
    with pytest.raises(ValueError, match="pass --resume to continue from it"):
        train(run)
    train(replace(run, resume=True))  # no steps are left; the drafter is written again
    with pytest.raises(ValueError, match=r"written with seed = 0, not 1"):
        train(replace(run, resume=True, seed=1))


@pytest.mark.parametrize("head", ["dflash", "dflash2", "dspark"])
def test_engine_acceptance_equals_the_walks(
    head: Literal["dflash", "dflash2", "dspark"], tmp_path: Path
) -> None:
    from strobe import LLM, SamplingParams

    directory, drafter, output = tmp_path / "target", tmp_path / "draft", tmp_path / "out.jsonl"
    saved_target(directory)
    saved_tokenizer(directory)
    prompt_ids = [list(s.ids[:5]) for s in samples(6)]
    answers = engine_answer(RegenerateSettings(directory, tmp_path, output, max_tokens=24))
    regenerate(prompt_ids, answers, output, at_once=4)
    data = read_samples(output, None, vocabulary=VOCABULARY, eos_ids=(1,), max_length=64)
    assert len(data) == 6
    target = load_target(
        directory,
        load_target_config(directory),
        max_positions=POSITIONS,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    shape = DraftShape(layers=2, block_size=BLOCK, features=2, head=head, rank=4, conv_group=8)
    config = draft_config(shape, target.config, MASK_TOKEN)
    draft = new_draft(config, target, max_positions=POSITIONS, seed=1)
    run = settings()
    run = replace(run, schedule=replace(run.schedule, steps=40, batch_size=6, anchors=16))
    trainer = Trainer(target, draft, run, data)
    while trainer.done < trainer.total:
        trainer.step()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(parameter.bfloat16().float())
    save_draft(draft, drafter, {"eos_token_id": 1})
    counted = batch_acceptance(draft, target, trainer.corpus.batch(torch.arange(6)))
    llm = LLM(str(directory), str(drafter), dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=24)
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for sample, walk, output in zip(data, counted, outputs, strict=True):
        assert list(sample.ids[5:]) == output.outputs[0].token_ids
        report = output.outputs[0].speculation
        assert report is not None
        counts = report.counts
        assert (counts.steps, counts.accepted_per_position) == (walk.steps, walk.accepted)
    assert sum(sum(walk.accepted) for walk in counted) > 6


# Settings


def test_invalid_settings_raise_errors() -> None:
    target = tiny_target().config
    with pytest.raises(ValueError, match=r"draft\.block_size is 1"):
        DraftShape(block_size=1)
    with pytest.raises(ValueError, match="ask for 0 to 5"):
        DraftShape(sliding_layers=6)
    with pytest.raises(ValueError, match="micro_batch is 3, but must divide batch_size 32"):
        Schedule(micro_batch=3)
    with pytest.raises(ValueError, match="a target of 6 layers gives 1 to 3"):
        draft_config(DraftShape(), target, MASK_TOKEN)
    with pytest.raises(ValueError, match="must name different layers from 0 to 5"):
        draft_config(DraftShape(target_layer_ids=(1, 6)), target, MASK_TOKEN)
    with pytest.raises(ValueError, match="mask_token_id is 40, but the target's ids are 0 to 39"):
        draft_config(DraftShape(features=2), target, 40)
    with pytest.raises(ValueError, match="1 of them would be held out"):
        split_heldout(samples(1), 0.5, 0)


# The programs


def test_regenerate_works_with_a_short_context_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is shorter than the default of max_tokens."""
    target, data, output = tmp_path / "target", tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    saved_target(target)
    saved_tokenizer(target)
    assert load_target_config(target).decoder.max_position < RegenerateSettings.max_tokens
    data.write_text('{"prompt_ids": [7, 8]}\n')
    arguments = [f"--target={target}", f"--data={data}", f"--output={output}"]
    monkeypatch.setattr(sys, "argv", ["regenerate", *arguments])
    assert regenerate_main() == 0
    (line,) = [line for _, line in read_lines(output)]
    assert line["prompt_ids"] == [7, 8]
    assert line["output_ids"]


@pytest.mark.parametrize(
    "module",
    ["strobe.tools.train", pytest.param("strobe.tools.train.regenerate", marks=pytest.mark.full)],
)
def test_programs_end_quietly_when_the_pipe_closes(module: str) -> None:
    run = subprocess.run(
        f"{sys.executable} -m {module} --help | true; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr) == (141, "", "")


def test_program_errors_are_one_line(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "strobe.tools.train", "--target=/none", "--data=/none",
         f"--output={tmp_path / 'out'}"],
        capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert (run.returncode, run.stdout, run.stderr.count("\n")) == (2, "", 1)
    assert run.stderr.startswith("strobe: /none does not exist")
