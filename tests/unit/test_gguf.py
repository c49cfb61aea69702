"""GGUF files as targets: the same tensors, tokens and answers as the checkpoint in safetensors."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from strobe import LLM, SamplingParams
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.hub.gguf_file import TYPES as HEADER_TYPES
from strobe.hub.gguf_file import read_header
from strobe.models import checkpoint
from strobe.models.architectures import load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.quantization.gguf import GGUFFile
from strobe.models.weight_loading import check_target_tensors

gguf = pytest.importorskip("gguf")

from tests.support.gguf_files import (  # noqa: E402
    CONFIGS,
    HYBRIDS,
    SHAPE,
    TOKENS,
    hybrid,
    metadata_of,
    model_of,
    tensors_of,
    tiny,
    write,
)
from tests.support.tested_formats import GGUF_EXPERTS  # noqa: E402

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
PROMPT = [5, 80, 33, 12, 7]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_recurrent_models_equal_transformers(kind: str, tmp_path: Path):
    model, metadata, tensors = hybrid(kind)
    file = write(tmp_path / "tiny.gguf", metadata, tensors)
    check_answer(file, model)


@pytest.mark.parametrize("kind", CONFIGS)
def test_answers_equal_transformers(kind: str, tmp_path: Path):
    model = model_of(kind)
    check_answer(write(tmp_path / "tiny.gguf", metadata_of(kind), tensors_of(kind, model)), model)


def check_answer(file: Path, model: Any) -> None:
    """Compare a file's greedy answer with that of transformers' model."""
    expected = model.generate(torch.tensor([PROMPT]), max_new_tokens=16, do_sample=False)
    llm = LLM(file, method="none", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=16)
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("stored", TYPES)
def test_tensors_are_dequantized(stored: str, tmp_path: Path):
    model = model_of("llama")
    tensors = tensors_of("llama", model)
    file = write(tmp_path / "tiny.gguf", metadata_of("llama"), tensors, stored)
    checkpoint = Checkpoint(gguf_directory(file))
    number = gguf.GGMLQuantizationType[stored]
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        array = value.numpy()
        if array.ndim == 2:
            array = gguf.quants.dequantize(gguf.quants.quantize(array, number), number)
        read = checkpoint.read(name.removeprefix("model."))
        torch.testing.assert_close(read.float(), torch.from_numpy(array), rtol=0, atol=0)


BLOCKS = [name for name, values, _ in HEADER_TYPES.values() if values in (64, 256)]


@pytest.mark.parametrize("stored", [*BLOCKS, "IQ4_NL", "MXFP4"])
def test_blocks_of_each_type_are_dequantized(stored: str, tmp_path: Path):
    number = gguf.GGMLQuantizationType[stored]
    values, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (4, 2 * size), np.uint8)
    blocks[:, size - 4 :: size] = 0  # a scale that is finite
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "llama")
    writer.add_tensor("output.weight", blocks, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = GGUFFile(tmp_path / "k.gguf").tensors["lm_head.weight"]
    assert (tensor.stored.shape, tensor.dtype) == ((4, 2 * values), "F32")
    read = tensor.decode(torch.from_numpy(blocks.reshape(-1)))
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, number))
    torch.testing.assert_close(read, expected, rtol=0, atol=0, equal_nan=True)


def test_experts_are_parts_of_the_tensor_that_stacks_them(tmp_path: Path):
    tensors = tensors_of("qwen3moe", model_of("qwen3moe"))
    factors = np.arange(1, 7, dtype=np.float32)
    tensors["blk.1.ffn_down_exps.scale"] = factors
    file = write(tmp_path / "tiny.gguf", metadata_of("qwen3moe"), tensors, "Q8_0")
    checkpoint = Checkpoint(gguf_directory(file))
    number = gguf.GGMLQuantizationType["Q8_0"]
    array = tensors["blk.1.ffn_down_exps.weight"]
    values = gguf.quants.dequantize(gguf.quants.quantize(array, number), number)
    for expert in range(6):
        read = checkpoint.read(f"layers.1.mlp.experts.{expert}.down_proj.weight")
        expected = torch.from_numpy(values[expert] * factors[expert])
        torch.testing.assert_close(read, expected, rtol=0, atol=0)


@pytest.mark.parametrize("stored", ["F32", "Q8_0"])
def test_head_equal_to_the_embedding_is_held_once(stored: str, tmp_path: Path):
    tensors = tensors_of("llama", model_of("llama"))
    embedding = tensors["token_embd.weight"]
    for head, is_equal in ((embedding, True), (embedding[::-1].copy(), False)):
        named = tensors | {"output.weight": head}
        file = write(tmp_path / "tiny.gguf", metadata_of("llama"), named, stored)
        directory = gguf_directory(file)
        config = load_target_config(directory)
        assert (check_target_tensors(directory, config).lm_head is None) == is_equal
        file.unlink()


def test_tokenizer_and_chat_template_are_the_files(tmp_path: Path):
    llm = LLM(tiny(tmp_path / "tiny.gguf"), method="none", device="cpu")
    tokenizer = llm.tokenizer
    assert tokenizer.decode(tokenizer.encode("the end, 12 é")) == "the end, 12 é"
    assert tokenizer.encode("th<|start|>") == [TOKENS.index("th"), 1]
    assert tokenizer.chat_text([{"role": "user", "content": "hi"}]) == "hi"


@pytest.mark.parametrize(("split", "count"), [("qwen2", 3), ("qwen35", 2)])
def test_qwen35_keeps_marks_with_their_letters(split: str, count: int, tmp_path: Path):
    metadata = metadata_of("qwen3") | {"tokenizer.ggml.pre": split}
    file = write(tmp_path / "tiny.gguf", metadata, tensors_of("qwen3", model_of("qwen3")))
    tokenizer = Tokenizer.from_file(str(gguf_directory(file) / "tokenizer.json"))
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("x\u0301y!")
    assert len(pieces) == count
    assert tokenizer.decode(tokenizer.encode("x\u0301y!").ids) == "x\u0301y!"


def test_directory_is_written_once_per_file(tmp_path: Path):
    file = tiny(tmp_path / "tiny.gguf")
    first = gguf_directory(file)
    assert gguf_directory(file) == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    with file.open("ab") as more:
        more.write(b"\0")
    assert gguf_directory(file) != first


def test_default_sampling_values_are_part_of_the_directory(tmp_path: Path):
    file = tiny(tmp_path / "tiny.gguf")
    for sampling in ({"temperature": 0.0}, {}):
        directory = gguf_directory(file, sampling)
        resolved = resolve(EngineConfig().with_(target=str(directory), method="none"))
        assert resolved.target.sampling == sampling


# bad files


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def patched(file: Path, at: int, values: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[at : at + len(values)] = values
    file.write_bytes(bytes(content))


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (lambda f: f.unlink(), "does not exist; name a GGUF file"),
    "empty": (lambda f: cut(f, 0), "is damaged"),
    "no GGUF": (lambda f: patched(f, 0, b"PK"), "is no GGUF file: it does not start with 'GGUF'"),
    "version": (lambda f: patched(f, 4, struct.pack("<I", 1)), "has version 1 of the GGUF format"),
    "header cut": (lambda f: cut(f, 200), "is cut short within its header"),
    "tensor cut": (lambda f: cut(f, f.stat().st_size - 64), "is cut short: tensor .* ends at byte"),
    "counts": (
        lambda f: patched(f, 16, struct.pack("<Q", 1 << 60)),
        "is (cut short within its header|damaged)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_a_one_line_error(damage: str, tmp_path: Path):
    file = tiny(tmp_path / "tiny.gguf")
    spoil, message = DAMAGES[damage]
    spoil(file)
    with pytest.raises(ValueError, match=message) as caught:
        resolve(EngineConfig().with_(target=str(file)))
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.json")), "nothing is left behind"


@pytest.mark.parametrize("named", ["<|endoftext|>", "<|im_end|>"])
@pytest.mark.parametrize("kind", [1, 3])
def test_end_tokens_of_text_and_turn_both_end_an_answer(named: str, kind: int, tmp_path: Path):
    """The metadata names one of them; the type of the other may be wrong."""
    ends = ["<|endoftext|>", "<|im_end|>"]
    numbers = [100, 101]  # in the place of two bytes
    tokens = [*TOKENS[:100], *ends, *TOKENS[102:]]
    kinds = [3, 3, *[1] * 98, kind, kind, *[1] * (len(TOKENS) - 102)]
    metadata = metadata_of("qwen3") | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": tokens.index(named),
    }
    file = write(tmp_path / "tiny.gguf", metadata, tensors_of("qwen3", model_of("qwen3")))
    llm = LLM(file, method="none", device="cpu")
    assert list(llm.engine.resolved.target.eos_ids) == [TOKENS.index("<|end|>"), *numbers]
    assert llm.tokenizer.encode("<|endoftext|><|im_end|>") == numbers


def test_tokens_that_the_metadata_calls_ends_end_an_answer(tmp_path: Path):
    metadata = metadata_of("llama") | {
        "tokenizer.ggml.eot_token_id": 5,
        "tokenizer.ggml.eom_token_id": 7,
    }
    file = write(tmp_path / "tiny.gguf", metadata, tensors_of("llama", model_of("llama")))
    assert load_target_config(gguf_directory(file)).eos_ids == (0, 5, 7)


UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"general.architecture": "mamba"}, "general.architecture is 'mamba'"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is 8, which is not supported"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, "llama.rope.scaling.type is 'longrope'"),
    "no factor": (
        {"llama.rope.scaling.type": "linear"},
        "lacks the metadata llama.rope.scaling.factor",
    ),
    "window": ({"llama.attention.sliding_window": 9}, "llama.attention.sliding_window is 9"),
    "drafter": (
        {"general.architecture": "eagle3"},
        "describes a drafter for EAGLE-3, which is not supported in a GGUF file",
    ),
    "tokenizer": ({"tokenizer.ggml.pre": "new"}, "a tokenizer of the kind 'gpt2', 'new'"),
    "merges": ({"tokenizer.ggml.merges": ["th"]}, "has metadata that is damaged"),
    "heads": ({"llama.attention.head_count": 0}, "num_attention_heads is 0"),
    "no heads": ({"llama.attention.head_count": None}, "lacks .* llama.attention.head_count;"),
    "split": ({"split.count": 3}, "must end with -00001-of-00003.gguf"),
    "odd heads": ({"llama.attention.key_length": 15}, "head_dim is 15, but rope needs an even"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "lacks the metadata tokenizer.ggml.tokens"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_metadata_is_a_one_line_error(case: str, tmp_path: Path):
    changes, message = UNSUPPORTED[case]
    metadata = {k: v for k, v in (metadata_of("llama") | changes).items() if v is not None}
    file = write(tmp_path / "tiny.gguf", metadata, tensors_of("llama", model_of("llama")))
    with pytest.raises(ValueError, match=message) as caught:
        resolve(EngineConfig().with_(target=str(file)))
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)
    assert "cache" not in str(caught.value)


def test_wrong_tensors_are_one_line_errors(tmp_path: Path):
    metadata, tensors = metadata_of("llama"), tensors_of("llama", model_of("llama"))
    extra = np.zeros((4, 32), np.float32)
    first = next(name for name in tensors if "attn_v" in name)
    for changed, message in (
        (tensors | {"rope_freqs.weight": extra}, "rope_freqs.weight with factors that are not"),
        (tensors | {first: extra}, "has shape .4, 32., config.json asks for .32, 64."),
        ({n: t for n, t in tensors.items() if n != first}, "v_proj.weight is missing"),
    ):
        file = write(tmp_path / "tiny.gguf", metadata, changed)
        with pytest.raises(ValueError, match=message) as caught:
            resolve(EngineConfig().with_(target=str(file)))
        assert str(file) in str(caught.value)
        assert "cache" not in str(caught.value)
        file.unlink()


def split(directory: Path) -> tuple[Path, Any]:
    """Return the first of three parts, and transformers' model."""
    model = model_of("gpt-oss")
    metadata = metadata_of("gpt-oss")
    return write(directory / "tiny", metadata, tensors_of("gpt-oss", model), parts=3), model


def test_split_models_are_read_from_all_parts(tmp_path: Path):
    """Gate and up of an expert are in different parts."""
    check_answer(*split(tmp_path))


def test_parts_of_split_models_are_named(tmp_path: Path):
    first, _ = split(tmp_path)
    second = first.with_name("tiny-00002-of-00003.gguf")
    with pytest.raises(ValueError, match=r"not the first part.*; name tiny-00001-of-00003\.gguf"):
        gguf_directory(second)
    renamed = first.rename(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=r"must end with -00001-of-00003\.gguf"):
        gguf_directory(renamed)
    renamed.rename(first)
    second.unlink()
    with pytest.raises(ValueError, match=r"but tiny-00002-of-00003\.gguf is not beside it"):
        gguf_directory(first)


def test_changed_part_of_a_split_model_is_read_again(tmp_path: Path):
    first, _ = split(tmp_path)
    directory = gguf_directory(first)
    assert gguf_directory(first) == directory
    write(
        tmp_path / "tiny",
        metadata_of("gpt-oss"),
        tensors_of("gpt-oss", model_of("gpt-oss")),
        "F16",
        parts=3,
    )
    assert gguf_directory(first) != directory


@pytest.mark.parametrize("experts", GGUF_EXPERTS)
def test_gpt_oss_keeps_experts_in_mxfp4(experts: str, tmp_path: Path):
    """Others are dequantized."""
    model = model_of("gpt-oss")
    tensors = tensors_of("gpt-oss", model)
    number = gguf.GGMLQuantizationType[experts]
    file = write(tmp_path / "tiny.gguf", metadata_of("gpt-oss"), tensors, experts=experts)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(("gate_up_proj", "down_proj")):  # inputs before outputs
                array = np.ascontiguousarray(value.numpy().swapaxes(1, 2))
                stored = gguf.quants.dequantize(gguf.quants.quantize(array, number), number)
                value.copy_(torch.from_numpy(stored).transpose(1, 2))
    check_answer(file, model)
    quantization = load_target_config(gguf_directory(file)).quantization
    assert (quantization is not None) == (experts == "MXFP4")


def test_tensors_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Of 3 rows, which do not divide the others."""
    monkeypatch.setattr(checkpoint, "AT_ONCE", 3 * 4 * SHAPE["hidden_size"])
    model = model_of("qwen3")
    check_answer(
        write(tmp_path / "a.gguf", metadata_of("qwen3"), tensors_of("qwen3", model)), model
    )


def test_recurrent_layers_are_those_of_the_metadata(tmp_path: Path):
    """They take precedence over an interval."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    model, metadata, tensors = hybrid("qwen35", layer_types=kinds)
    check_answer(write(tmp_path / "tiny.gguf", metadata, tensors), model)


def test_error_names_the_link_that_the_user_named(tmp_path: Path):
    tensors = tensors_of("llama", model_of("llama"))
    del tensors["output_norm.weight"]
    file = write(tmp_path / "0a1b2c", metadata_of("llama"), tensors)
    link = tmp_path / "tiny.gguf"
    link.symlink_to(file)
    with pytest.raises(ValueError, match=r"/tiny\.gguf: tensor norm\.weight is missing"):
        resolve(EngineConfig().with_(target=str(link)))


def test_unsupported_type_is_a_one_line_error(tmp_path: Path):
    file = tiny(tmp_path / "tiny.gguf")
    name = b"token_embd.weight"
    place = file.read_bytes().index(name) + len(name) + 4 + 16  # dimensions: their number, sizes
    patched(file, place, struct.pack("<I", 41))
    with pytest.raises(ValueError, match="is stored in GGUF's type 41, but only F32, F16"):
        read_header(file)
