"""GGUF files as targets: the same tensors, tokens and answers as the checkpoint in safetensors."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from strobe import LLM, SamplingParams
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.hub.gguf_file import TYPES as HEADER_TYPES
from strobe.hub.gguf_file import read_header
from strobe.models.architectures import load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.quantization import gguf_qwen35
from strobe.models.quantization.gguf import NAMES, GGUFFile
from strobe.models.weight_loading import check_target_tensors

gguf = pytest.importorskip("gguf")

WORDS = ("<|end|>", "<|start|>", "th", "he")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*WORDS[:2], *ALPHABET, *WORDS[2:]]
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": len(TOKENS),
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
PROMPT = [5, 80, 33, 12, 7]
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model_of(kind: str, **changes: Any) -> Any:
    """Return a transformers model with random weights."""
    torch.manual_seed(0)
    kinds = {
        "llama": LlamaConfig,
        "qwen2": Qwen2Config,
        "qwen3": Qwen3Config,
        "qwen3moe": partial(Qwen3MoeConfig, **EXPERTS),
        "smollm3": partial(SmolLM3Config, pad_token_id=0),
    }
    config = kinds[kind](**SHAPE | changes)
    config.eos_token_id = 0
    return AutoModelForCausalLM.from_config(config).float()


def metadata_of(kind: str) -> dict[str, Any]:
    return {
        "general.architecture": kind,
        f"{kind}.expert_count": EXPERTS["num_experts"] if kind.endswith("moe") else 0,
        f"{kind}.expert_used_count": EXPERTS["num_experts_per_tok"],
        f"{kind}.expert_feed_forward_length": EXPERTS["moe_intermediate_size"],
        f"{kind}.block_count": SHAPE["num_hidden_layers"],
        f"{kind}.context_length": SHAPE["max_position_embeddings"],
        f"{kind}.embedding_length": SHAPE["hidden_size"],
        f"{kind}.feed_forward_length": SHAPE["intermediate_size"],
        f"{kind}.attention.head_count": SHAPE["num_attention_heads"],
        f"{kind}.attention.head_count_kv": SHAPE["num_key_value_heads"],
        f"{kind}.attention.key_length": SHAPE["head_dim"],
        f"{kind}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{kind}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(TOKENS) - 2)],
        "tokenizer.ggml.merges": ["t h", "h e"],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def tensors_of(kind: str, model: Any) -> dict[str, NDArray[np.float32]]:
    """Return a model's weights as llama.cpp converts them: with its names, and for Llama with the
    rows of each head of q and k in pairs."""
    names = {ours: theirs for theirs, ours in NAMES.items()}
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and SHAPE["tie_word_embeddings"]:
            continue
        path, _, leaf = name.removeprefix("model.").rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", path)
        prefix = "" if layer is None else f"blk.{layer[1]}."
        if leaf in ("gate_up_proj", "down_proj"):  # of stacked experts
            tensors |= experts_of(prefix, leaf, value.numpy())
            continue
        module = names[path[len(layer[0]) :] if layer else path]
        array = value.numpy()
        if kind in ("llama", "smollm3") and module in ("attn_q", "attn_k"):
            heads = SHAPE["num_attention_heads" if module == "attn_q" else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        tensors[f"{prefix}{module}.{leaf}"] = np.ascontiguousarray(array)
    return tensors


RECURRENT: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
SHARED = {"shared_expert_intermediate_size": 40}


def qwen35(kind: str) -> tuple[Any, dict[str, Any], dict[str, NDArray[np.float32]]]:
    """Return a random Qwen3.5 of transformers, and its metadata and tensors as llama.cpp converts
    it, with one more layer that predicts further tokens."""
    torch.manual_seed(0)
    values = {**SHAPE, **RECURRENT, "tie_word_embeddings": False}
    if kind == "qwen35moe":
        model: Any = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**values, **EXPERTS, **SHARED))
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**values))
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name or "A_log" in name:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    model.generation_config.eos_token_id = 0
    metadata = metadata_of(kind) | {
        f"{kind}.block_count": 5,
        f"{kind}.nextn_predict_layers": 1,
        f"{kind}.full_attention_interval": 4,
        f"{kind}.rope.dimension_count": 8,
        f"{kind}.ssm.conv_kernel": 4,
        f"{kind}.ssm.group_count": 2,
        f"{kind}.ssm.inner_size": 72,
        f"{kind}.ssm.state_size": 8,
        f"{kind}.ssm.time_step_rank": 6,
        f"{kind}.expert_shared_feed_forward_length": SHARED["shared_expert_intermediate_size"],
    }
    names = {ours: theirs for theirs, ours in (NAMES | gguf_qwen35.NAMES).items()}
    tensors = {"blk.4.nextn.eh_proj.weight": np.zeros((64, 128), np.float32)}
    for name, value in model.float().state_dict().items():
        path, _, leaf = name.removeprefix("model.").rpartition(".")
        layer = re.match(r"layers\.(\d+)\.", path)
        prefix = "" if layer is None else f"blk.{layer[1]}."
        module = path[len(layer[0]) :] if layer else path
        if leaf in ("gate_up_proj", "down_proj"):
            tensors |= experts_of(prefix, leaf, value.numpy())
        elif leaf == "A_log":
            tensors[f"{prefix}ssm_a"] = -np.exp(tiled(value.numpy(), 1))
        elif leaf == "dt_bias":
            tensors[f"{prefix}ssm_dt.bias"] = tiled(value.numpy(), 1)
        else:
            tensors[f"{prefix}{names[module]}.{leaf}"] = converted(module, value.numpy())
    return model, metadata, {name: np.ascontiguousarray(a) for name, a in tensors.items()}


def tiled(array: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Put value heads of different key heads side by side. size: rows of a head."""
    heads = array.reshape(2, 3, size, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)


def converted(module: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a module's weight as llama.cpp stores it."""
    if module.endswith("norm") and not module.startswith("linear_attn"):
        return array + 1
    if module.endswith(("in_proj_qkv", "conv1d")):
        whole = array.reshape(array.shape[0], -1)
        return np.concatenate([whole[:32], tiled(whole[32:], 12)])
    if module.endswith("in_proj_z"):
        return tiled(array, 12)
    if module.endswith(("in_proj_a", "in_proj_b")):
        return tiled(array, 1)
    if module.endswith("linear_attn.out_proj"):
        return tiled(array.T, 12).T
    return array[0] if module.endswith("shared_expert_gate") else array


@pytest.mark.parametrize("kind", ["qwen35", "qwen35moe"])
def test_recurrent_models_equal_transformers(kind: str, tmp_path: Path):
    model, metadata, tensors = qwen35(kind)
    file = write(tmp_path / "tiny.gguf", metadata, tensors)
    check_answer(file, model)


def experts_of(prefix: str, leaf: str, array: NDArray[np.float32]) -> dict[str, Any]:
    """Return stacked experts as llama.cpp does, with gate and up apart."""
    if leaf == "down_proj":
        return {f"{prefix}ffn_down_exps.weight": array}
    gate, up = np.split(array, 2, axis=1)
    return {
        f"{prefix}ffn_gate_exps.weight": np.ascontiguousarray(gate),
        f"{prefix}ffn_up_exps.weight": np.ascontiguousarray(up),
    }


def write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], kind: str = "F32"
) -> Path:
    """Write a GGUF file; matrices in the given type."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        number = gguf.GGMLQuantizationType[kind if array.ndim >= 2 else "F32"]
        stored = gguf.quants.quantize(array, number)
        writer.add_tensor(name, stored, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny(path: Path, kind: str = "llama", **options: Any) -> Path:
    return write(path, metadata_of(kind), tensors_of(kind, model_of(kind)), **options)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "qwen3moe", "smollm3"])
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
    "rope": ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type is 'yarn'"),
    "tokenizer": ({"tokenizer.ggml.pre": "new"}, "a tokenizer of the kind 'gpt2', 'new'"),
    "merges": ({"tokenizer.ggml.merges": ["th"]}, "has metadata that is damaged"),
    "heads": ({"llama.attention.head_count": 0}, "num_attention_heads is 0"),
    "no heads": ({"llama.attention.head_count": None}, "lacks .* llama.attention.head_count;"),
    "split": ({"split.count": 3}, "is one of 3 parts of a split model.* --merge"),
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
        (tensors | {"rope_freqs.weight": extra}, "has a tensor rope_freqs.weight, which scales"),
        (tensors | {first: extra}, "has shape .4, 32., config.json asks for .32, 64."),
        ({n: t for n, t in tensors.items() if n != first}, "v_proj.weight is missing"),
    ):
        file = write(tmp_path / "tiny.gguf", metadata, changed)
        with pytest.raises(ValueError, match=message) as caught:
            resolve(EngineConfig().with_(target=str(file)))
        assert str(file) in str(caught.value)
        assert "cache" not in str(caught.value)
        file.unlink()


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
