"""Loading: the destination of each tensor, and the memory that loading takes."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssForCausalLM, Qwen3ForCausalLM

from strobe.models import weight_loading
from strobe.models.architectures import load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.weight_loading import check_target_tensors, load_target
from strobe.models.weight_mapping import mapping_of
from tests.support.tiny_checkpoints import make_target

LOGGER = "strobe.models.weight_loading"
LOAD_OPTIONS: dict[str, Any] = {
    "max_positions": 40,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}


def loaded(path: Path, **options: Any) -> Any:
    return load_target(path, load_target_config(path), **(LOAD_OPTIONS | options))


def test_sharded_tensors_are_used_exactly_once(tmp_path: Path):
    hf = make_target(tmp_path, shards="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = load_target_config(tmp_path)
    mapping = mapping_of(check_target_tensors(tmp_path, config))
    used = [name for parts in mapping.values() for part in parts for name in part.sources]
    assert sorted(used) == sorted(name.removeprefix("model.") for name in hf.state_dict())
    target = loaded(tmp_path)
    attention = hf.model.layers[1].self_attn
    joined = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(target.layers[1].self_attn.qkv_proj.weight, joined)
    assert torch.equal(target.lm_head.weight, hf.lm_head.weight)


def test_tensor_names_may_carry_a_known_prefix(tmp_path: Path):
    make_target(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    save_file({**renamed, "model.visual.patch.weight": torch.zeros(2)}, weights)
    config = load_target_config(tmp_path)
    with pytest.raises(ValueError, match=r"tensor visual\.patch\.weight is not part of"):
        check_target_tensors(tmp_path, config)
    module = weight_loading.make_target(config, 1)
    module.skipped = ("visual.",)
    weight_loading._check_tensors(module, Checkpoint(tmp_path))


def test_rows_larger_than_copy_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hf = make_target(tmp_path)
    for size in (1, 1000):
        monkeypatch.setattr("strobe.models.checkpoint.AT_ONCE", size)
        target = loaded(tmp_path, dtype=torch.bfloat16)
        for name in ("embed_tokens.weight", "norm.weight", "layers.0.mlp.down_proj.weight"):
            expected = hf.model.get_parameter(name).bfloat16()
            assert torch.equal(target.get_parameter(name), expected)


class Bar:
    """Replaces tqdm and records its options and updates."""

    def __init__(self, **options: Any):
        self.options, self.updates = options, list[int]()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, size: int) -> None:
        self.updates.append(size)


def bar_of(path: Path, monkeypatch: pytest.MonkeyPatch, **load_options: Any) -> Bar:
    """Load a target; return the only progress bar."""
    bars: list[Bar] = []

    def make(**options: Any) -> Bar:
        bars.append(Bar(**options))
        return bars[-1]

    with monkeypatch.context() as patch:
        patch.setattr("tqdm.auto.tqdm", make)
        loaded(path, **load_options)
    (bar,) = bars
    return bar


@pytest.mark.parametrize("shards", [None, "20KB"])
def test_progress_bar_counts_every_byte(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    shards: str | None,
):
    make_target(tmp_path, shards=shards)
    files = [load_file(path) for path in tmp_path.glob("*.safetensors")]
    size = sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    with caplog.at_level(logging.WARNING, LOGGER):
        bar = bar_of(tmp_path, monkeypatch, dtype=torch.bfloat16)
    assert bar.options["total"] == size, "sizes as stored, not as loaded"
    assert sum(bar.updates) == size
    assert len(bar.updates) > 10
    assert bar.options["disable"] is None, "tqdm shows the bar only on a terminal"
    assert tmp_path.name in bar.options["desc"]
    assert not caplog.messages


def test_log_replaces_progress_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    make_target(tmp_path)
    with caplog.at_level(logging.INFO, LOGGER):
        bar = bar_of(tmp_path, monkeypatch)
    assert bar.options["disable"] is True
    (line,) = caplog.messages
    assert line.startswith("loaded 0.00 GB from ")
    assert str(tmp_path) in line
    assert line.endswith(" GB/s")


def test_tensor_used_twice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_target(tmp_path)

    def wrong(*args: Any) -> Any:
        mapping = mapping_of(*args)
        return mapping | {"lm_head.weight": mapping["embed_tokens.weight"]}

    monkeypatch.setattr(weight_loading, "mapping_of", wrong)
    with pytest.raises(RuntimeError, match=r"embed_tokens\.weight would be used twice"):
        check_target_tensors(tmp_path, load_target_config(tmp_path))


PEAK = """
import sys, torch
from pathlib import Path
from strobe.models import checkpoint
from strobe.models.weight_loading import check_target_tensors, load_target
from strobe.models.architectures import load_target_config
import tqdm.auto
checkpoint.AT_ONCE = 1 << 20
field = lambda name: next(int(row.split()[1]) << 10 for row in open("/proc/self/status")
                          if row.startswith(name))
path = Path(sys.argv[1])
config = load_target_config(path)
def get():
    return load_target(path, config, max_positions=8, dtype=torch.bfloat16,
                       device=torch.device("cpu"))
check_target_tensors(path, config)  # brings in the code
open("/proc/self/clear_refs", "w").write("5")
before = field("VmRSS")
model = get()
print(field("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_host_memory_stays_near_weight_size(tmp_path: Path):
    config = make_target(tmp_path).config
    config.update({"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 20000})
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16()
    zeros = {name: torch.zeros_like(t, device="cpu") for name, t in model.state_dict().items()}
    zeros["lm_head.weight"] += 1  # a head equal to the embedding is held once
    save_file(zeros, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    peak, weights = map(int, done.stdout.split())
    assert weights > 180e6
    assert weights * 0.9 < peak < weights * 1.1 + 15e6, "measured: the weights and 12 to 23 MB"


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_host_memory_of_unpacked_gpt_oss_experts(tmp_path: Path):
    """Experts that are not in MXFP4 are transposed while loading, one tensor at a time."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = make_target(tmp_path, family=GptOssForCausalLM, **experts).config
    config.update({"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 16})
    config.layer_types = ["sliding_attention", "full_attention"] * 8
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = GptOssForCausalLM(config).bfloat16()
    zeros = {name: torch.zeros_like(t, device="cpu") for name, t in model.state_dict().items()}
    zeros["lm_head.weight"] += 1
    save_file(zeros, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    peak, weights = map(int, done.stdout.split())
    assert weights > 180e6
    assert weights * 0.9 < peak < weights * 1.1 + 15e6
