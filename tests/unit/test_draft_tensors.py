"""Drafters' tensors: published names and shapes fit, and mismatches are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strobe.models.architectures import load_draft_config
from strobe.models.config_readers.draft_vocabulary import read_target_ids
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DraftConfig
from strobe.models.weight_loading import check_draft_tensors
from strobe.models.weight_mapping import mapping_of
from tests.support.drafter_configs import QWEN3_8B_DFLASH, written
from tests.support.tiny_checkpoints import HIDDEN, VOCAB, edit_json, make_draft

PARAMETERS = 1_048_626_432


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the 58 tensors of z-lab/Qwen3-8B-DFlash-b16."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (4096, 20480),
        "hidden_norm.weight": (4096,),
        "norm.weight": (4096,),
    }
    for i in range(5):
        layer = {
            "input_layernorm": (4096,),
            "post_attention_layernorm": (4096,),
            "self_attn.q_proj": (4096, 4096),
            "self_attn.k_proj": (1024, 4096),
            "self_attn.v_proj": (1024, 4096),
            "self_attn.o_proj": (4096, 4096),
            "self_attn.q_norm": (128,),
            "self_attn.k_norm": (128,),
            "mlp.gate_proj": (12288, 4096),
            "mlp.up_proj": (12288, 4096),
            "mlp.down_proj": (4096, 12288),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a sparse file of bfloat16 tensors: a header and the right length, but no data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in sorted(shapes.items()):
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def test_published_8b_drafter_matches_module_tensors(tmp_path: Path):
    path, shapes = written(tmp_path, QWEN3_8B_DFLASH), published_shapes()
    hollow(path / "model.safetensors", shapes)
    assert len(shapes) == 58
    assert (path / "model.safetensors").stat().st_size == 2_097_259_104, "the published size"
    module = check_draft_tensors(path, load_draft_config(path))
    mapping = [part for parts in mapping_of(module, shapes).values() for part in parts]
    assert {k: v for part in mapping for k, v in part.sources.items()} == shapes
    assert sum(p.numel() for p in module.parameters()) == PARAMETERS
    assert {p.device.type for p in module.parameters()} == {"meta"}
    assert (module.embed_tokens, module.lm_head) == (None, None)
    for name in ("fc.weight", "layers.4.mlp.down_proj.weight"):
        hollow(path / "model.safetensors", {k: v for k, v in shapes.items() if k != name})
        with pytest.raises(ValueError, match=f"tensor {name} is missing"):
            check_draft_tensors(path, load_draft_config(path))


def check(path: Path) -> DFlash:
    return check_draft_tensors(path, load_draft_config(path))


def change(path: Path, edit: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    weights = path / "model.safetensors"
    save_file(edit(load_file(weights)), weights)
    return path


RENAMED: dict[str, tuple[str, str]] = {
    "a prefix": ("", "model."),
    "the first layer": ("layers.0.", "midlayer."),
    "an encoder's linear layer": ("fc.", "encoder.fc."),
    "an encoder's norm": ("hidden_norm.", "encoder.output_norm_enc."),
}


@pytest.mark.parametrize("name", RENAMED)
def test_tensor_aliases_are_known(tmp_path: Path, name: str):
    own, alias = RENAMED[name]

    def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            alias + k.removeprefix(own) if k.startswith(own) else k: v for k, v in tensors.items()
        }

    check(change(make_draft(tmp_path), rename))


def with_tensors(**more: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, **{k.replace("__", "."): v for k, v in more.items()}}


SINKS = ("layers.0.self_attn.attention_sink_bias", "layers.1.self_attn.attention_sink_bias")


def test_every_layer_with_configured_sinks_has_them(tmp_path: Path):
    path = make_draft(tmp_path, sinks=True)
    module = check(path)
    mapping = [part for parts in mapping_of(module).values() for part in parts]
    sources = {k: v for part in mapping for k, v in part.sources.items()}
    assert [sources[name] for name in SINKS] == [(4,), (4,)]
    change(path, lambda tensors: {k: v for k, v in tensors.items() if k != SINKS[1]})
    with pytest.raises(ValueError, match=f"tensor {SINKS[1]} is missing"):
        check(path)
    change(path, with_tensors(layers__1__self_attn__attention_sink_bias=torch.zeros(2)))
    with pytest.raises(ValueError, match=rf"{SINKS[1]} has shape \[2\]"):
        check(path)


UNKNOWN = (
    "aux_hidden_norms.0.weight",
    "layers.0.attention_conv.base_kernel",
    "d2t",
    "mask_hidden",
)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_tensor_is_named(tmp_path: Path, name: str):
    path = change(make_draft(tmp_path), lambda tensors: {**tensors, name: torch.zeros(3)})
    with pytest.raises(ValueError, match=f"tensor {name} is not part of this architecture"):
        check(path)


def test_fc_width_matches_named_layers(tmp_path: Path):
    path = make_draft(tmp_path, layer_ids=(0, 1, 3))
    edit_json(path / "config.json", dflash_config={"mask_token_id": 1, "target_layer_ids": [0, 3]})
    message = (
        rf"fc.weight reads {3 * HIDDEN} values per token, but target_layer_ids \[0, 3\] names 2 "
        rf"layers of {HIDDEN}, which make {2 * HIDDEN}"
    )
    with pytest.raises(ValueError, match=message):
        check(path)


def test_own_embedding_and_head_are_loaded(tmp_path: Path):
    more = with_tensors(
        embed_tokens__weight=torch.zeros(VOCAB, HIDDEN), lm_head__weight=torch.ones(VOCAB, HIDDEN)
    )
    module = check(change(make_draft(tmp_path), more))
    assert module.embed_tokens is not None
    assert module.lm_head is not None
    assert module.lm_head.weight.shape == (VOCAB, HIDDEN)


@pytest.fixture
def reduced(tmp_path: Path) -> DraftConfig:
    """Return a config whose head has 8 of a vocabulary of 16."""
    inner = {**QWEN3_8B_DFLASH["dflash_config"], "mask_token_id": 15}
    small = {**QWEN3_8B_DFLASH, "vocab_size": 16, "dflash_config": inner}
    config = load_draft_config(written(tmp_path, small))
    return replace(config, draft_vocab_size=8, format="speculators")


def test_d2t_holds_offsets(reduced: DraftConfig, tmp_path: Path):
    known = [0, 2, 4, 6, 8, 10, 12, 14]
    flags = torch.tensor([i in known for i in range(16)])
    for t2d in (None, flags):
        ids = read_target_ids(torch.arange(8), t2d, reduced, tmp_path)
        assert ids.tolist() == known


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 9], "tokens 0 to 16"),
        ([-1, 1, 2, 3, 4, 5, 6, 7], "tokens -1 to 14"),
        ([1, 0, 2, 3, 4, 5, 6, 7], "must all differ"),
    ],
)
def test_d2t_must_map_to_distinct_tokens(
    reduced: DraftConfig, tmp_path: Path, offsets: list[int], message: str
):
    with pytest.raises(ValueError, match=message):
        read_target_ids(torch.tensor(offsets), None, reduced, tmp_path)


def test_t2d_must_agree_with_d2t(reduced: DraftConfig, tmp_path: Path):
    with pytest.raises(ValueError, match="t2d and d2t name different tokens"):
        read_target_ids(torch.arange(8), torch.arange(16) % 2 == 1, reduced, tmp_path)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [(None, "tensor d2t is missing"), (torch.arange(5), r"tensor d2t has shape \[5\]")],
)
def test_reduced_head_needs_an_offset_for_each_row(
    tmp_path: Path, d2t: Tensor | None, message: str
):
    path = make_draft(tmp_path)
    more = {} if d2t is None else {"d2t": d2t}
    change(path, with_tensors(lm_head__weight=torch.zeros(8, HIDDEN), **more))
    config = replace(load_draft_config(path), draft_vocab_size=8, format="speculators")
    with pytest.raises(ValueError, match=message):
        check_draft_tensors(path, config)
    change(path, with_tensors(d2t=torch.arange(8)))
    module = check_draft_tensors(path, config)
    assert module.embed_tokens is None, "the target's"
    assert module.lm_head is not None
    assert module.lm_head.weight.shape == (8, HIDDEN)
