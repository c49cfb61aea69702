"""GGUF files against llama.cpp itself: log probabilities and tokens. Skipped without the package
llama-cpp-python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from strobe import LLM, SamplingParams
from strobe.hub.gguf_checkpoint import gguf_directory
from strobe.hub.gguf_tokenizer import SPLITS

llama_cpp = pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from tests.support.gguf_files import (  # noqa: E402
    CONFIGS,
    HYBRIDS,
    TOKENS,
    hybrid,
    metadata_of,
    model_of,
    tensors_of,
    write,
)

pytestmark = pytest.mark.full
IDS = torch.randint(2, 200, (24,), generator=torch.Generator().manual_seed(0)).tolist()
FP32 = 0
"""llama.cpp's number of the type."""
BOUND = 1e-5
"""Measured 2.4e-6."""
GELU_BOUND = 1e-2
"""llama.cpp looks GELU up in a table of fp16 values: measured 4.1e-3. Against transformers in fp32
these models differ by 1.8e-5."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_model(file: Path) -> Any:
    """Open a file in llama.cpp, keys and values in fp32. Negative values are read from the file."""
    return llama_cpp.Llama(
        str(file),
        n_ctx=256,
        n_batch=64,
        n_threads=1,
        logits_all=True,
        type_k=FP32,
        type_v=FP32,
        flash_attn=False,
        yarn_attn_factor=-1.0,
        yarn_beta_fast=-1.0,
        yarn_beta_slow=-1.0,
        verbose=False,
    )


def check(file: Path, bound: float = BOUND) -> None:
    """Compare the log probabilities of all tokens after each of a prompt's."""
    model = open_model(file)
    model.eval(IDS)
    logits = torch.from_numpy(model.scores[: len(IDS) - 1].copy())
    llm = LLM(file, method="none", device="cpu")
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=len(TOKENS))
    (output,) = llm.generate([{"prompt_token_ids": IDS}], params, use_tqdm=False)
    actual = torch.zeros_like(logits)
    for row, entries in zip(actual, output.prompt_logprobs[1:], strict=True):
        for token, entry in entries.items():
            row[token] = entry.logprob
    torch.testing.assert_close(actual, logits.log_softmax(-1), atol=bound, rtol=0)


@pytest.mark.parametrize("kind", CONFIGS)
def test_log_probabilities_equal_llama_cpps(kind: str, tmp_path: Path):
    tensors = tensors_of(kind, model_of(kind))
    file = write(tmp_path / "tiny.gguf", metadata_of(kind), tensors)
    check(file, GELU_BOUND if kind.startswith("gemma4") else BOUND)


@pytest.mark.parametrize("kind", HYBRIDS)
@pytest.mark.parametrize("own_layers", [False, True])
def test_log_probabilities_of_recurrent_models_equal_llama_cpps(
    kind: str, own_layers: bool, tmp_path: Path
):
    """llama.cpp has value heads as large as key heads only."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    layer_types = kinds if own_layers else None
    _, metadata, tensors = hybrid(kind, value_dim=8, layer_types=layer_types, extra_layers=0)
    check(write(tmp_path / "tiny.gguf", metadata, tensors))


def test_split_models_equal_llama_cpps(tmp_path: Path):
    tensors = tensors_of("qwen3", model_of("qwen3"))
    check(write(tmp_path / "tiny", metadata_of("qwen3"), tensors, parts=3))


TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
SAMPLES = (
    "Hello, world! It's 12345.67 o'clock;\n\n\n  we'll see\tTHAT'S naïve Łódź.  ",
    "  def f(x):\r\n    return x+1  # "
    "\u4f60\u597d\u4e16\u754c \U0001f600\U0001f680 \u0645\u0631\u062d\u0628\u0627",
    "CamelCaseWords XMLHttpRequest iPhone15 don't 3rd\n/path//to\n",
    TEXT[:2000],
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(pre: str) -> dict[str, Any]:
    """Return the metadata of a tokenizer of bytes, trained on TEXT."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT, *SAMPLES], trainer)
    tokens, merges = trained(tokenizer)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def characters(model: str) -> dict[str, Any]:
    """Return the metadata of a tokenizer of characters, of the kind of SentencePiece's or of Gemma
    4's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    special = ["<unk>", "<s>", "</s>", *BYTES]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokens, merges = trained(tokenizer)
    kinds = [2, 3, 3] + [6] * len(BYTES) + [1] * (len(tokens) - len(special))
    order = {"".join(merge.split(" ", 1)): i for i, merge in enumerate(merges)}
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.pre": "default" if model == "llama" else "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(order.get(text, 5000)) for text in tokens],
        "tokenizer.ggml.merges": merges if model == "gemma4" else None,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": model == "llama",
    }


def trained(tokenizer: Tokenizer) -> tuple[list[str], list[str]]:
    """Return a trained tokenizer's tokens and merges, as metadata have them."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(pair) for pair in model["merges"]]


TOKENIZERS = [*((byte_level, pre) for pre in SPLITS), (characters, "llama"), (characters, "gemma4")]


@pytest.mark.parametrize(("make", "kind"), TOKENIZERS)
def test_tokens_equal_llama_cpps(make: Any, kind: str, tmp_path: Path):
    own = {key: value for key, value in make(kind).items() if value is not None}
    metadata = metadata_of("llama") | {"tokenizer.ggml.merges": []} | own
    if "tokenizer.ggml.merges" not in own:
        del metadata["tokenizer.ggml.merges"]
    model = model_of("llama", vocab_size=len(own["tokenizer.ggml.tokens"]))
    file = write(tmp_path / "tiny.gguf", metadata, tensors_of("llama", model))
    theirs = llama_cpp.Llama(str(file), vocab_only=True, verbose=False)
    tokenizer = Tokenizer.from_file(str(gguf_directory(file) / "tokenizer.json"))
    for text in SAMPLES:
        ids = theirs.tokenize(text.encode(), add_bos=True, special=True)
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids) == text or kind == "smollm"
