"""Loading: where each tensor goes, what is held while it goes there, and checkpoints in FP8."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import edit_json, make_draft, make_engine, make_target, run
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.models import load
from strobe.models.checkpoint import Checkpoint
from strobe.models.formats.fp8 import dequantized
from strobe.models.load import check_target_tensors, load_target, weight_bytes
from strobe.models.pieces import pieces_of
from strobe.models.registry import load_target_config
from strobe.request import SamplingParams

HOW: dict[str, Any] = {
    "max_positions": 40,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}
BLOCK = (24, 20)
"""No multiple of any of the tiny model's sizes."""


def loaded(path: Path, **how: Any) -> Any:
    return load_target(path, load_target_config(path), **(HOW | how))


def expanded(scale: Tensor, rows: int, columns: int, block: tuple[int, int]) -> Tensor:
    """The scale of each value, looked up one by one."""
    out = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            out[i, j] = scale[i // block[0], j // block[1]]
    return out


def test_each_tensor_of_a_sharded_checkpoint_is_used_exactly_once(tmp_path: Path):
    hf = make_target(tmp_path, shards="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = load_target_config(tmp_path)
    pieces = pieces_of(check_target_tensors(tmp_path, config))
    used = [name for parts in pieces.values() for piece in parts for name in piece.sources]
    assert sorted(used) == sorted(name.removeprefix("model.") for name in hf.state_dict())
    target = loaded(tmp_path)
    attention = hf.model.layers[1].self_attn
    whole = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(target.layers[1].self_attn.qkv_proj.weight, whole)
    assert torch.equal(target.lm_head.weight, hf.lm_head.weight)


def test_names_may_begin_as_those_of_a_part_of_a_larger_model_do(tmp_path: Path):
    make_target(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    renamed = {n.replace("model.", "model.language_model.", 1): t for n, t in tensors.items()}
    save_file({**renamed, "model.visual.patch.weight": torch.zeros(2)}, weights)
    config = load_target_config(tmp_path)
    with pytest.raises(ValueError, match=r"tensor visual\.patch\.weight is not part of"):
        check_target_tensors(tmp_path, config)
    module = load.make_target(config, 1)
    module.skipped = ("visual.",)
    load._check(module, Checkpoint(tmp_path))


def test_rows_larger_than_what_is_copied_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hf = make_target(tmp_path)
    for size in (1, 1000):
        monkeypatch.setattr("strobe.models.checkpoint.AT_ONCE", size)
        target = loaded(tmp_path, dtype=torch.bfloat16)
        for name in ("embed_tokens.weight", "norm.weight", "layers.0.mlp.down_proj.weight"):
            wanted = hf.model.get_parameter(name).bfloat16()
            assert torch.equal(target.get_parameter(name), wanted)


PEAK = """
import sys, torch
from pathlib import Path
from strobe.models import checkpoint
from strobe.models.load import check_target_tensors, load_target
from strobe.models.registry import load_target_config
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
def test_the_host_holds_no_second_copy_of_the_weights(tmp_path: Path):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 20000}
    make_target(tmp_path, **sizes).bfloat16().save_pretrained(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], check=True, capture_output=True, text=True
    )
    peak, weights = map(int, done.stdout.split())
    assert weights > 60e6
    assert weights * 0.9 < peak < weights * 1.5, "measured: the weights and 15 MB"


# in FP8


@pytest.mark.parametrize("shape", [(300, 200), (128, 256), (1, 1), (1500, 3)])
def test_blocks_are_multiplied_with_their_scales(shape: tuple[int, int]):
    noise = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=noise).to(torch.float8_e4m3fn)
    scale = torch.rand([-(-size // 128) for size in shape], generator=noise) + 0.1
    wanted = weight.float() * expanded(scale, *shape, (128, 128))
    assert torch.equal(dequantized(weight, scale, (128, 128), torch.float32), wanted)
    two = weight.expand(2, *shape), scale.expand(2, *scale.shape)
    both = dequantized(*two, (128, 128), torch.bfloat16)
    assert torch.equal(both[1], wanted.bfloat16())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in FP8, and the same values without quantization."""
    plain, small = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("fp8")
    for path in (plain, small):
        make_target(path)
    tensors, noise = load_file(plain / "model.safetensors"), torch.Generator().manual_seed(2)
    stored = dict(tensors)
    for name, value in tensors.items():
        if "_proj" in name:
            rows, columns = value.shape
            scale = torch.rand(-(-rows // BLOCK[0]), -(-columns // BLOCK[1]), generator=noise) + 0.5
            stored[name] = value.to(torch.float8_e4m3fn)
            stored[name + "_scale_inv"] = scale
            tensors[name] = stored[name].float() * expanded(scale, rows, columns, BLOCK)
    save_file(tensors, plain / "model.safetensors")
    save_file(stored, small / "model.safetensors")
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": ["lm_head"],
    }
    edit_json(small / "config.json", quantization_config=quantization)
    return plain, small


def test_a_checkpoint_in_fp8_is_that_of_the_products_with_its_scales(
    pair: tuple[Path, Path], tmp_path: Path
):
    wanted, found = map(loaded, pair)
    for name, value in wanted.named_parameters():
        assert torch.equal(found.get_parameter(name), value), name
    draft, prompts = make_draft(tmp_path), [[1, 2, 3], [5, 6, 7, 8, 9]]
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    answers = [
        run(make_engine(EngineConfig(str(path), draft=str(draft))), prompts, greedy)
        for path in pair
    ]
    assert answers[0] == answers[1]


def test_products_in_fp8_are_made_of_those_that_were_stored_so(pair: tuple[Path, Path]):
    plain, small = pair
    wanted, found = loaded(plain), loaded(small, fp8=True)
    product = found.layers[0].self_attn.qkv_proj
    assert product.weight.dtype == torch.float8_e4m3fn
    back = product.weight.float() * product.scale[:, None]
    whole = wanted.layers[0].self_attn.qkv_proj.weight
    assert (back - whole).norm() < 0.04 * whole.norm()
    config = load_target_config(small)
    for fp8, module in ((False, wanted), (True, found)):
        held = sum(p.nbytes for p in module.parameters())
        held += sum(b.nbytes for n, b in module.named_buffers() if n.endswith("scale"))
        planned = check_target_tensors(small, config)
        assert weight_bytes(planned, torch.float32, fp8=fp8) == held
    assert not resolve(EngineConfig(str(small))).choice.fp8, "this device has no FP8"


NAME = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Any, str]] = {
    "no scale": (lambda t: t.pop(NAME + "_scale_inv"), "weight_scale_inv is missing"),
    "another scale": (
        lambda t: t.update({NAME + "_scale_inv": torch.ones(1, 1)}),
        r"weight_scale_inv has shape \[1, 1\]",
    ),
    "a scale of nothing": (
        lambda t: t.update({NAME: torch.zeros(48, 32)}),
        "weight_scale_inv is not part of",
    ),
    "static": (
        lambda t: t.update({NAME.replace("weight", "input_scale"): torch.ones(1)}),
        "input_scale is not part of",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_scales_that_do_not_fit_are_named(pair: tuple[Path, Path], tmp_path: Path, name: str):
    change, message = DAMAGES[name]
    tensors = load_file(pair[1] / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((pair[1] / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        check_target_tensors(tmp_path, load_target_config(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"weight_block_size": None}, "weight_block_size is None"),
        ({"weight_block_size": [128]}, r"weight_block_size is \[128\]"),
        ({"rotation": True}, "rotation is True"),
    ],
    ids=str,
)
def test_other_quantization_is_refused_by_name(
    pair: tuple[Path, Path], tmp_path: Path, changes: dict[str, Any], message: str
):
    config = json.loads((pair[1] / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_target_config(tmp_path)
