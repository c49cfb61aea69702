"""Every kind of rope against transformers, and rope fields of config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from strobe.models.config_readers.rope import RopeConfig, read_rope, rope_scaling
from strobe.models.modules import RotaryTable

HERE = Path("config.json")
# Of Llama-3.1-8B, gpt-oss-20b, Qwen3's long contexts, the drafter of Qwen3.6-35B-A3B, and others.
PUBLISHED: dict[str, tuple[int, float, int, dict[str, Any]]] = {
    "llama 3.1": (128, 5e5, 131072, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                  "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}),
    "gpt-oss": (64, 1.5e5, 131072, {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}),
    "qwen3 long": (128, 1e6, 131072, {"type": "yarn", "rope_type": "yarn", "factor": 4.0,
                   "original_max_position_embeddings": 32768}),
    "qwen3.6 drafter": (128, 1e7, 262144, {"rope_type": "yarn", "type": "yarn", "factor": 64.0,
                        "beta_fast": 32.0, "beta_slow": 1.0,
                        "original_max_position_embeddings": 4096}),
    "deepseek": (64, 1e4, 163840, {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0,
                 "mscale_all_dim": 0.8, "original_max_position_embeddings": 4096}),
    "given scale": (64, 1e4, 8192, {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.3,
                    "original_max_position_embeddings": 4096}),
    "narrow ramp": (16, 50.0, 512, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0,
                    "beta_slow": 2.0, "original_max_position_embeddings": 128}),
    "linear": (128, 1e4, 4096, {"rope_type": "linear", "factor": 4.0}),
    "plain": (128, 1e4, 4096, {"rope_type": "default"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_angles_match_transformers(name: str):
    head_dim, theta, longest, parameters = PUBLISHED[name]
    rope = read_rope(parameters, theta, longest, HERE)
    config = Qwen3Config(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=longest,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    if rope.kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        frequencies, scale = theta**-exponents, 1.0
    else:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    torch.testing.assert_close(
        torch.tensor(rope.inverse_frequencies(head_dim)), frequencies.float(), rtol=2e-6, atol=0.0
    )
    assert rope.scale == pytest.approx(scale, rel=1e-6)
    table = RotaryTable(head_dim, rope, 40)
    angle = 39 * frequencies[-1].double()
    assert float(table.cos[39, head_dim - 1]) == pytest.approx(float(angle.cos() * scale), 1e-5)
    assert float(table.sin[39, head_dim - 1]) == pytest.approx(float(angle.sin() * scale), 1e-5)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rope_scaling_round_trips(name: str):
    _, theta, longest, parameters = PUBLISHED[name]
    rope = read_rope(parameters, theta, longest, HERE)
    assert read_rope(rope_scaling(rope) or {}, theta, 1, HERE) == rope


def test_rope_scaling_extends_the_context():
    reach = {name: read_rope(p, t, n, HERE).reach for name, (_, t, n, p) in PUBLISHED.items()}
    assert reach["qwen3 long"] == 131072
    assert reach["qwen3.6 drafter"] == 262144
    assert reach["linear"] == 16384
    assert reach["llama 3.1"] == reach["plain"] == 0


def test_drafter_rope_rotates_the_whole_head():
    """Older exports copy the target's share and sections; training ignored them."""
    leaked = {"partial_rotary_factor": 0.25, "mrope_section": [24, 20, 20], "rope_theta": 1e7}
    assert read_rope(leaked, 1e7, 512, HERE, drafter=True) == RopeConfig(1e7)
    with pytest.raises(ValueError, match="'mrope_section' of a rope of type 'default'"):
        read_rope(leaked, 1e7, 512, HERE)
