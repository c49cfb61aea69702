"""Quantized targets, heads and drafters, alone and on several ranks: they are their dequantized
copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.dflash_drafter import DFlash
from strobe.models.linear import Linear
from strobe.models.quantization.methods import hold_stored
from strobe.models.target import Target
from strobe.models.weight_loading import check_target_tensors, load_draft, load_target
from strobe.parallel.split import Split
from strobe.sampling_params import SamplingParams
from tests.support.draft_heads import to_dflash2, to_dspark
from tests.support.engine_runs import make_engine, run
from tests.support.full_marks import full_where, nightly_where
from tests.support.rank_threads import ranks
from tests.support.stored_weights import is_quantizable, store
from tests.support.target_families import FAMILIES
from tests.support.tested_formats import DRAFTERS, RECORDED, WITH_RANKS
from tests.support.tiny_checkpoints import edit_json, make_draft, make_target

LINEAR = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")
DIRECTORY = Path(__file__).parents[1] / "recorded"
MARKOV_RANK = 32
"""Which every format's groups divide."""
OTHER_HEADS: dict[str, Callable[[Path, Path], Path]] = {
    "dflash": lambda source, path: source.rename(path),
    "dspark": partial(to_dspark, markov_rank=MARKOV_RANK),
    "gated dspark": partial(to_dspark, kind="gated", markov_rank=MARKOV_RANK),
    "rnn dspark": partial(to_dspark, kind="rnn", markov_rank=MARKOV_RANK),
}
"""Heads besides DFlash2's, which the pairs have."""
SHORT = (("dflash", "FP8"), ("dspark", "NVFP4"), ("gated dspark", "int4"), ("rnn dspark", "int8"))
"""Heads and formats that `make test` runs."""
PROMPTS = [[5, 1, 60, 2, 9], [7] * 11]
OPTIONS: dict[str, Any] = {
    "max_positions": 16,
    "dtype": torch.float32,
    "device": torch.device("cpu"),
}


@pytest.fixture(scope="module", params=DRAFTERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a quantized target and drafter, and copies of the same values."""
    path = tmp_path_factory.mktemp(request.param)
    make_target(path / "target", intermediate_size=64)
    to_dflash2(make_draft(path / "plain dflash", intermediate=64), path / "draft")
    for name in ("target", "draft"):
        quantize(path / name, path / f"dense {name}", request.param)
    return path


def quantize(path: Path, plain: Path, name: str) -> None:
    """Store all weights of a tiny model that can be so in a format; see `store`."""
    store(path, plain, name, partial(is_quantizable, format=name))


def check_equal(actual: nn.Module, expected: nn.Module) -> None:
    parameters = dict(expected.named_parameters())
    assert parameters.keys() == dict(actual.named_parameters()).keys()
    for name, parameter in actual.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], atol=0, rtol=3e-7, msg=name)


def test_weights_are_those_of_the_dequantized_copy(pair: Path):
    targets = [
        load_target(path, load_target_config(path), **OPTIONS)
        for path in (pair / "target", pair / "dense target")
    ]
    check_equal(targets[0], targets[1])
    drafts = [
        load_draft(path, load_draft_config(path, pair / "target"), targets[1], **OPTIONS)
        for path in (pair / "draft", pair / "dense draft")
    ]
    check_equal(drafts[0], drafts[1])
    assert drafts[0].config.quantization is not None


def test_held_layers_have_the_same_values(pair: Path):
    dense = load_target(pair / "dense target", load_target_config(pair / "dense target"), **OPTIONS)
    config = hold_stored(load_target_config(pair / "target"), pair / "target")
    held = load_target(pair / "target", config, **OPTIONS)
    check_held(held, dense)
    draft_config = load_draft_config(pair / "draft", pair / "target")
    drafts = [
        load_draft(pair / "draft", config, held, **OPTIONS)
        for config in (draft_config, hold_stored(draft_config, pair / "draft"))
    ]
    check_held(drafts[1], drafts[0])


def check_held(actual: Target | DFlash, expected: Target | DFlash) -> None:
    """Check that a model holds layers as stored, in the bytes that were planned for them."""
    of_layers = dict(expected.named_modules())
    stored = {
        path: linear.stored
        for path, linear in actual.named_modules()
        if isinstance(linear, Linear) and linear.stored is not None
    }
    assert len(stored) >= 4
    for path, product in stored.items():
        weight = of_layers[path].weight
        torch.testing.assert_close(product.dense(torch.float32), weight, atol=0, rtol=3e-7)
        tensors = [value for part in product.parts for value in vars(part).values()]
        num_bytes = sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
        assert num_bytes <= product.nbytes + 100
        assert product.nbytes < 0.7 * weight.nbytes


@pytest.mark.parametrize("family", ["llama", "gemma4", "qwen3_5_moe"])
def test_held_layers_of_each_family_have_the_same_values(tmp_path: Path, family: str):
    make, changes = FAMILIES[family]
    make(tmp_path / "target", **changes)
    store(tmp_path / "target", tmp_path / "dense", "FP8", lambda name: name.endswith(LINEAR))
    dense = load_target(tmp_path / "dense", load_target_config(tmp_path / "dense"), **OPTIONS)
    config = hold_stored(load_target_config(tmp_path / "target"), tmp_path / "target")
    check_held(load_target(tmp_path / "target", config, **OPTIONS), dense)


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "gemma4", "gemma4 with experts", "qwen3_5_moe"]
)
def test_layers_of_each_family_take_quantized_weights(tmp_path: Path, family: str):
    make, changes = FAMILIES[family]
    make(tmp_path / "target", **changes)
    store(tmp_path / "target", tmp_path / "dense", "FP8", lambda name: name.endswith(LINEAR))
    targets = [
        load_target(path, load_target_config(path), **OPTIONS)
        for path in (tmp_path / "target", tmp_path / "dense")
    ]
    check_equal(targets[0], targets[1])


@full_where(lambda pair, temperature: 2 * temperature != DRAFTERS.index(pair) % 4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_over_a_quantized_head_change_no_answer(pair: Path, temperature: float):
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=12, ignore_eos=True)
    answers = list[Any]()
    verified = list[int]()
    for target, draft, weight_dtype in (
        ("dense target", None, "float32"),
        ("target", None, "float32"),
        ("target", None, "stored"),
        ("target", "draft", "float32"),
        ("target", "draft", "stored"),
        ("dense target", "dense draft", "float32"),
    ):
        engine = make_engine(
            EngineConfig(
                target=str(pair / target),
                draft=None if draft is None else str(pair / draft),
                device="cpu",
                dtype="float32",
                weight_dtype=weight_dtype,
            )
        )
        answers.append(run(engine, PROMPTS, params))
        verified.append(engine.stats.draft_counts.num_verified)
    assert all(answer == answers[0] for answer in answers)
    assert verified[3] == verified[4] == verified[5] > 0


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a target in NVFP4 and a copy of the same values."""
    path = tmp_path_factory.mktemp("targets")
    make_target(path / "target", intermediate_size=64)
    quantize(path / "target", path / "dense target", "NVFP4")
    return path


@full_where(lambda head, name: (head, name) not in SHORT)
@nightly_where(
    lambda head, name: (
        (head, name) not in SHORT
        and (list(OTHER_HEADS).index(head) + DRAFTERS.index(name)) % len(OTHER_HEADS) != 0
    )
)
@pytest.mark.parametrize("head", OTHER_HEADS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_quantized_drafters_draft_as_their_dense_copies(
    targets: Path, tmp_path: Path, head: str, name: str
):
    """A head in any format gives the drafts of its dequantized weights, and no other answer."""
    source = make_draft(tmp_path / "source", intermediate=64)
    draft = OTHER_HEADS[head](source, tmp_path / "draft")
    quantize(draft, tmp_path / "dense", name)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    answers = list[Any]()
    counts = list[tuple[int, int]]()
    for target, own, weight_dtype in (
        ("target", None, "float32"),
        ("target", draft, "float32"),
        ("target", draft, "stored"),
        ("dense target", tmp_path / "dense", "float32"),
    ):
        config = EngineConfig(
            target=str(targets / target),
            draft=None if own is None else str(own),
            device="cpu",
            dtype="float32",
            weight_dtype=weight_dtype,
            adaptive=False,
        )
        engine = make_engine(config)
        answers.append(run(engine, PROMPTS, params))
        drafts = engine.stats.draft_counts
        counts.append((drafts.num_verified, drafts.num_accepted))
    assert all(answer == answers[0] for answer in answers)
    assert counts[1] == counts[2] == counts[3]
    assert counts[1][0] > 0


@full_where(lambda pair: pair not in ("native FP8", "NVFP4", "int4"))
@pytest.mark.parametrize("pair", WITH_RANKS, indirect=True)
def test_two_ranks_draft_and_answer_as_one(pair: Path):
    params = [
        SamplingParams(temperature=temperature, seed=3, max_tokens=12, ignore_eos=True)
        for temperature in (0.0, 1.0)
    ]
    settings = EngineConfig(
        target=str(pair / "target"),
        draft=str(pair / "draft"),
        device="cpu",
        dtype="float32",
        weight_dtype="stored",
        kv_cache_memory="8MiB",
        adaptive=False,
    )
    plain = make_engine(settings.with_(draft=None, method="none"))
    expected = run(plain, PROMPTS, params)
    alone = Engine(settings)
    assert run(alone, PROMPTS, params) == expected
    with ranks(settings, 2) as engine:
        assert run(engine, PROMPTS, params) == expected
        counts = [each.stats.draft_counts for each in (alone, engine)]
    assert counts[0].num_accepted == counts[1].num_accepted
    assert counts[0].num_verified > 0


MINISTRAL = "Ministral's FP8"


@pytest.fixture
def ministral(tmp_path: Path) -> Path:
    """A directory with a tiny Ministral 3 as published in FP8, inside a multimodal config, and a
    copy of the same values."""
    make, changes = FAMILIES["ministral3"]
    make(tmp_path / "target", **changes)
    store(tmp_path / "target", tmp_path / "dense", MINISTRAL, lambda name: name.endswith(LINEAR))
    path = tmp_path / "target" / "config.json"
    text = json.loads(path.read_text())
    quantization = text.pop("quantization_config")
    quantization["modules_to_not_convert"] = ["model.vision_tower", "lm_head"]
    quantization["dequantize"] = False
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": text,
        "vision_config": {"model_type": "pixtral"},
        "quantization_config": quantization,
    }
    path.write_text(json.dumps(outer))
    return tmp_path


def test_ministral_loads_in_fp8_as_published(ministral: Path):
    targets = [
        load_target(path, load_target_config(path), **OPTIONS)
        for path in (ministral / "target", ministral / "dense")
    ]
    check_equal(targets[0], targets[1])


@pytest.mark.parametrize(
    ("leaf", "value", "sentence"),
    [
        (
            "weight_scale_inv",
            torch.ones(2, 1),
            r"has shape \[2, 1\], but without weight_block_size",
        ),
        ("weight_scale_inv", torch.ones(1, dtype=torch.int32), "holds I32 values, but must hold"),
        ("weight_scale_inv", None, "down_proj.weight_scale is missing"),
    ],
)
def test_fp8_without_blocks_needs_one_scale(
    ministral: Path, leaf: str, value: torch.Tensor | None, sentence: str
):
    file = ministral / "target" / "model.safetensors"
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith(f"layers.0.mlp.down_proj.{leaf}")]
    del tensors[name]
    save_file(tensors | ({} if value is None else {name: value}), file)
    with pytest.raises(ValueError, match=sentence):
        check_target_tensors(ministral / "target", load_target_config(ministral / "target"))


def test_fp8_modules_that_are_not_converted_must_not_be_in_fp8(ministral: Path):
    path = ministral / "target" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["modules_to_not_convert"].append("re:.*q_proj$")
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"q_proj is stored in FP8, but quantization_config says"):
        check_target_tensors(ministral / "target", load_target_config(ministral / "target"))


def check_ranks(path: Path) -> None:
    """Compare the parts that two ranks load with the whole."""
    config = load_target_config(path)
    whole = load_target(path, config, **OPTIONS)
    parts = list[Any]()
    of_ranks = list[Any]()
    for rank in range(2):
        split = Split(rank=rank, size=2, draft_size=2)
        own, _ = split.split(config, None)
        opener = split.opener("auto")
        parts.append(load_target(path, own, **OPTIONS, open=opener))
        of_ranks.append(load_target(path, hold_stored(own, path), **OPTIONS, open=opener))
    for layer, first, second in zip(whole.layers, parts[0].layers, parts[1].layers, strict=True):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            halves = [part.get_submodule(name).weight for part in (first, second)]
            assert torch.equal(torch.cat(halves, 1), layer.get_submodule(name).weight)
        halves = [part.mlp.gate_up_proj.weight.unflatten(0, (2, -1)) for part in (first, second)]
        fused = layer.get_submodule("mlp.gate_up_proj").weight
        assert torch.equal(torch.cat(halves, 1).flatten(0, 1), fused)
    heads = [part.lm_head.weight for part in parts]
    assert torch.equal(torch.cat(heads), whole.lm_head.weight)
    for held, part in zip(of_ranks, parts, strict=True):
        check_held(held, part)


@pytest.mark.parametrize("name", RECORDED)
def test_ranks_hold_parts_of_the_dequantized_weights(name: str):
    check_ranks(DIRECTORY / name)


@pytest.mark.parametrize("name", ["GPTQ", "AutoRound", "AWQ"])
def test_ranks_hold_parts_of_transposed_weights(tmp_path: Path, name: str):
    make_target(tmp_path / "target", intermediate_size=64)
    quantize(tmp_path / "target", tmp_path / "dense", name)
    check_ranks(tmp_path / "target")


def test_groups_by_activations_need_one_rank_and_scales(tmp_path: Path):
    path = tmp_path / "target"
    make_target(path, intermediate_size=64)
    quantize(path, tmp_path / "dense", "GPTQ by activations")
    with pytest.raises(ValueError, match="g_idx orders groups by activations, which several ranks"):
        check_ranks(path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.g_idx"][5] = 9
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ValueError, match="g_idx names group 9, but 4 groups have scales"):
        load_target(path, load_target_config(path), **OPTIONS)


OTHERS = [
    ({"quant_method": "gptq", "bits": 3}, "bits is 3, which is not supported"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "is 'marlin'"),
    ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type is 'mx_fp'"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
    ({"quant_method": "awq", "bits": 8}, "bits is 8, which is not supported"),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
]


@pytest.mark.parametrize(("values", "sentence"), OTHERS)
def test_other_layouts_are_one_sentence(tmp_path: Path, values: dict[str, Any], sentence: str):
    make_target(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=values)
    with pytest.raises(ValueError, match=sentence):
        load_target_config(tmp_path)
