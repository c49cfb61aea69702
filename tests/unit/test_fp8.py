"""Weights in FP8, and the drafter's copy of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_draft, make_target

from strobe.models.load import fp8_rows, load_draft, load_target
from strobe.models.registry import load_draft_config, load_target_config

HOW: dict[str, Any] = {
    "max_positions": 40,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "fp8": True,
}


def test_rows_keep_four_bits_and_their_largest_value():
    weight = torch.randn(5000, 24, generator=torch.Generator().manual_seed(3))
    weight[7] = 0
    weight *= torch.logspace(-6, 6, 5000)[:, None]
    rows, scale = fp8_rows(weight)
    assert rows.dtype == torch.float8_e4m3fn
    assert scale[7] == 1
    back = rows.float() * scale[:, None]
    least = scale[:, None] * 2.0**-10  # half a step where the grid is even
    assert ((back - weight).abs() <= weight.abs() * 2.0**-4 + least).all()
    largest = weight.abs().amax(1)
    assert torch.allclose(back.abs().amax(1), largest)


@pytest.mark.parametrize(
    ("vocab", "changes", "copied"),
    [
        (64, {}, True),
        (61, {}, False),
        (64, {"final_logit_softcapping": 9.0}, False),
        (64, {"output_multiplier": 0.5}, False),
    ],
    ids=str,
)
def test_the_drafter_has_a_copy_of_the_head_where_it_can_use_it(
    vocab: int, changes: dict[str, float], copied: bool, tmp_path: Path
):
    make_target(tmp_path / "target", vocab_size=vocab)
    directory = make_draft(tmp_path / "draft", top={"vocab_size": vocab, **changes})
    target = load_target(tmp_path / "target", load_target_config(tmp_path / "target"), **HOW)
    draft = load_draft(directory, load_draft_config(directory), target, **HOW)
    assert target.lm_head is not None
    assert target.lm_head.weight.dtype == draft.head_weight.dtype == torch.float32
    assert target.layers[0].self_attn.o_proj.weight.dtype == torch.float8_e4m3fn
    assert (draft.fp8_head is not None) == copied
    if draft.fp8_head is not None:
        rows, scale = draft.fp8_head
        assert rows.shape == draft.head_weight.shape
        wanted = draft.head_weight
        assert (rows.float() * scale[:, None] - wanted).norm() < 0.04 * wanted.norm()
    assert not [name for name, _ in draft.named_parameters() if "head" in name]
