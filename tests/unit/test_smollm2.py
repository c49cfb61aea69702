"""The trainer of SmolLM2's drafter: packed answers give the same blocks as single ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.smollm2.answers import Answered, load, save
from scripts.smollm2.packed import (
    PackedBlocks,
    PackedRows,
    Rows,
    block_hidden,
    dense_attention,
    draw_blocks,
    pack,
    target_rows,
)
from scripts.smollm2.train import PackedTrainer, new_config, parse
from strobe.models.architectures import load_target_config
from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.models.weight_loading import load_target
from strobe.tools.train.capture import capture
from strobe.tools.train.draft import draft_config, new_draft
from strobe.tools.train.train_settings import DraftShape
from strobe.tools.train.training_blocks import context_kv, draft_hidden, make_blocks
from strobe.tools.train.warm_start import start_from
from tests.support.tiny_checkpoints import MASK_TOKEN, VOCAB, make_target

SIZES = (30, 10), (40, 5), (25, 12), (33, 20), (50, 30)
"""Tokens of each sequence, and of its prompt."""
LENGTH, BLOCK = 80, 4
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
"""Sums in fp32 in another order."""


def sequences() -> list[tuple[list[int], int, bool]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randint(1, VOCAB - 1, (n,), generator=generator).tolist(), prompt, prompt % 2 == 0)
        for n, prompt in SIZES
    ]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, DFlash]:
    directory = tmp_path_factory.mktemp("target")
    make_target(directory)
    config = load_target_config(directory)
    options = {"dtype": torch.float32, "device": torch.device("cpu")}
    target = load_target(directory, config, max_positions=LENGTH, **options)
    shape = DraftShape(layers=2, block_size=BLOCK, features=2)
    draft = new_draft(draft_config(shape, config, MASK_TOKEN), target, max_positions=LENGTH, seed=0)
    return target, draft


def packed() -> PackedRows:
    rows = Rows(pack(sequences(), LENGTH, seed=0), torch.device("cpu"))
    return rows.batch(0, rows.count, seed=0)


def drawn(rows: PackedRows) -> PackedBlocks:
    generator = torch.Generator().manual_seed(1)
    return draw_blocks(rows, 16, size=BLOCK, mask_token=MASK_TOKEN, generator=generator)


def test_pack_holds_each_sequence_once():
    rows, found = packed(), list[tuple[list[int], int, bool]]()
    for row in range(len(rows.ids)):
        for number in range(1, int(rows.numbers[row].max()) + 1):
            own = rows.numbers[row] == number
            assert rows.positions[row][own].tolist() == list(range(int(own.sum())))
            prompt = int((~rows.supervised[row][own]).sum())
            (sampled,) = set(rows.sampled[row][own].tolist())
            found.append((rows.ids[row][own].tolist(), prompt, sampled))
    assert sorted(found) == sorted(sequences())
    assert not rows.supervised[rows.numbers == 0].any()


def test_packed_rows_equal_single_sequences(pair: tuple[Target, DFlash]):
    target, draft = pair
    rows = packed()
    features, _ = target_rows(target, rows, draft.config.capture)
    result = drawn(rows)
    hidden = block_hidden(
        draft,
        features,
        rows.positions,
        result.blocks.ids,
        result.positions,
        result.mask,
        dense_attention,
    )
    compared = 0
    for row in range(len(rows.ids)):
        for number in range(1, int(rows.numbers[row].max()) + 1):
            own = rows.numbers[row] == number
            ids, supervised = rows.ids[row][own][None], rows.supervised[row][own][None]
            captured = capture(target, ids, draft.config.capture)
            torch.testing.assert_close(features[row][own], captured.features[0], **CLOSE)
            start = int(own.nonzero()[0])
            chosen = own[result.blocks.anchors[row]] & result.blocks.valid[row, :, 0]
            anchors = (result.blocks.anchors[row][chosen] - start)[None]
            expected = make_blocks(
                ids,
                supervised,
                anchors,
                torch.ones_like(anchors, dtype=torch.bool),
                size=BLOCK,
                mask_token=MASK_TOKEN,
            )
            valid = expected.valid[0]
            assert torch.equal(result.blocks.valid[row][chosen], valid)
            assert torch.equal(result.blocks.labels[row][chosen][valid], expected.labels[0][valid])
            context = context_kv(draft, captured.features)
            torch.testing.assert_close(
                hidden[row][chosen], draft_hidden(draft, *context, expected)[0], **CLOSE
            )
            compared += int(chosen.sum())
    assert compared > 40


def test_answers_survive_saving(tmp_path: Path):
    answers = [
        Answered([1, 2, 3], [4, 5], 0, 0.0, False),
        Answered([49151], [7], 2, 1.0, True),
        Answered([6, 6], [8, 9, 10], 1, 0.7, False),
    ]
    assert save(answers, tmp_path, 3) == 4
    assert load([tmp_path / "answers-3.npz"]) == answers


def first_loss(pair: tuple[Target, DFlash], monkeypatch: pytest.MonkeyPatch, *flags: str) -> float:
    """The first step's loss of a drafter that starts from the pair's."""
    command = ["train.py", "TARGET", "OUT", "answers-0.npz", "--rows", "2", "--anchors", "8"]
    usual = ["--loss-rows", "1", "--layers", "2", "--block-size", "4", "--features", "2"]
    monkeypatch.setattr("sys.argv", [*command, *usual, *flags])
    target, start = pair
    options = parse()
    draft = new_draft(new_config(options, target), target, max_positions=LENGTH, seed=1)
    start_from(draft, start)
    rows = Rows(pack(sequences(), LENGTH, seed=0), torch.device("cpu"))
    loss, _, _ = PackedTrainer(target, draft, rows, options).step()
    return float(loss)


@pytest.mark.parametrize(
    "flags",
    [
        ("--head", "dflash2", "--unary-share", "1"),
        pytest.param(("--head", "dflash2", "--full-loss"), marks=pytest.mark.full),
        ("--head", "dspark", "--full-loss"),
    ],
    ids=["dflash2", "dflash2-full-loss", "dspark"],
)
def test_first_loss_with_a_new_head_is_the_old_drafters(
    flags: tuple[str, ...], pair: tuple[Target, DFlash], monkeypatch: pytest.MonkeyPatch
):
    tables = ("--rank", "4", "--conv-group", "8", "--candidates", "8")
    expected = first_loss(pair, monkeypatch)
    assert first_loss(pair, monkeypatch, *flags, *tables) == expected
