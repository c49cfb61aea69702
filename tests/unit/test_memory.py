"""The GPU memory reserved before the KV cache takes the rest."""

from __future__ import annotations

from pathlib import Path

import torch

from strobe.config import DEMO_MODELS, Limits
from strobe.models.architectures import load_target_config
from strobe.runner.buckets import Buckets
from strobe.runner.memory import scratch_bytes


def test_grammar_buffers_fit_narrow_steps():
    """A captured feature takes the rows of two steps and of the persistent buffer."""
    decoder = load_target_config(Path(DEMO_MODELS) / "target").decoder
    limits = Limits(4096, 256, 2048, 3, 16, drafter_block_size=16)
    sizes = [scratch_bytes(limits, decoder, features, torch.bfloat16) for features in (0, 1)]
    rows = 2048 + 256 * 4 + Buckets(256, 3, 16).max_rows
    assert sizes[1] - sizes[0] == rows * decoder.hidden_size * 2
