"""Incremental text equals decoding all tokens at once, for every kind of decoder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from strobe import LLM, SamplingParams
from strobe.text.detokenizer import Detokenizer, TokenTexts
from strobe.text.tokenizer import Tokenizer
from tests.support.text_pair import Pair

REPLACE, FALLBACK, FUSE = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
CASES: dict[str, tuple[Any, str]] = {
    "byte-level": (decoders.ByteLevel(), "bytes"),
    "Gemma": (decoders.Sequence([REPLACE, FALLBACK, FUSE]), "fallback"),
    "Llama": (
        decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 1, 0)]),
        "fallback",
    ),
    "three spaces stripped": (
        decoders.Sequence([REPLACE, FALLBACK, FUSE, decoders.Strip(" ", 3, 0)]),
        "fallback",
    ),
    "bytes alone": (decoders.Sequence([FALLBACK]), "fallback"),
    "Metaspace": (decoders.Metaspace(), "pieces"),
    "Metaspace without a prefix": (decoders.Metaspace(prepend_scheme="never"), "pieces"),
    "Metaspace, fused": (decoders.Sequence([decoders.Metaspace(), FUSE]), "pieces"),
    "WordPiece": (decoders.WordPiece(), "pieces"),
    "WordPiece as written": (decoders.WordPiece(cleanup=False), "pieces"),
    "each token stripped": (decoders.Sequence([REPLACE, decoders.Strip(" ", 1, 0)]), "pieces"),
    "joined": (decoders.Fuse(), "pieces"),
    "none": (None, "pieces"),
    "BPE with suffixes": (decoders.BPEDecoder(), "whole"),
    "CTC": (decoders.CTC(), "whole"),
    "replaced across tokens": (
        decoders.Sequence([FUSE, decoders.Replace("ab", "x")]),
        "whole",
    ),
    "bytes after any replacement": (
        decoders.Sequence([decoders.Replace("[", "<"), FALLBACK, FUSE]),
        "whole",
    ),
    "Metaspace, stripped": (
        decoders.Sequence([decoders.Metaspace(), FUSE, decoders.Strip(" ", 1, 0)]),
        "whole",
    ),
}
WORDS = [
    *["a", "b", "ab", "▁", "▁▁", "▁a", "▁b▁", "##b", "##", "b</w>", "</w>a", "</w>", "", " ", "  "],
    *[".", "n't", "'s", "do", "not", "|", "<pad>", "日本", "é", "\ufffd", "Ġé", "\n", "[0x41>"],
    *["<0x+5>", "<0xé>", "<0xzz>", "<0x4>", "x<0x41>"],
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LETTERS = [letter for _, letter in sorted(bytes_to_unicode().items())]
VOCAB = {text: i for i, text in enumerate(dict.fromkeys([*WORDS, *BYTES, *LETTERS]))}
SPECIAL, ADDED = len(VOCAB), len(VOCAB) + 1
UNKNOWN = len(VOCAB) + 100


def byte_tokens(text: str) -> list[int]:
    return [VOCAB[BYTES[byte]] for byte in text.encode()]


def letter_tokens(text: str) -> list[int]:
    return [VOCAB[LETTERS[byte]] for byte in text.encode()]


singles = st.sampled_from([*map(VOCAB.__getitem__, WORDS), SPECIAL, ADDED, UNKNOWN])
chunks = st.one_of(
    singles.map(lambda token: [token]),
    st.integers(0, 255).map(lambda byte: [VOCAB[BYTES[byte]]]),
    st.integers(0, 255).map(lambda byte: [VOCAB[LETTERS[byte]]]),
    st.sampled_from("é日🚀a ").map(byte_tokens),
    st.sampled_from("é日🚀a ").map(letter_tokens),
)
answers = st.lists(chunks, min_size=1, max_size=12).map(lambda parts: [*chain(*parts)])


def write(directory: Path, decoder: Any) -> Tokenizer:
    fast = tokenizers.Tokenizer(models.WordLevel(VOCAB, unk_token="a"))
    fast.add_special_tokens(["<s>"])
    fast.add_tokens([tokenizers.AddedToken("▁added", special=False)])
    if decoder is not None:
        fast.decoder = decoder
    fast.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def tokenizers_by_decoder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return a tokenizer with each decoder."""
    return {
        name: write(tmp_path_factory.mktemp("tokenizer"), decoder)
        for name, (decoder, _) in CASES.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_text_kind_follows_from_the_decoder(tokenizers_by_decoder: dict[str, Tokenizer], name: str):
    assert TokenTexts(tokenizers_by_decoder[name]).kind == CASES[name][1]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=50)
@given(ids=answers, cuts=st.sets(st.integers(1, 40)), skip=st.booleans())
def test_text_equals_decoding_at_once(
    tokenizers_by_decoder: dict[str, Tokenizer],
    name: str,
    ids: list[int],
    cuts: set[int],
    skip: bool,
):
    tokenizer = tokenizers_by_decoder[name]
    full_text = tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    places = [0, *sorted(cut for cut in cuts if cut < len(ids)), len(ids)]
    shown, pieces = "", list[str]()
    for begin, end in pairwise(places):
        delta = detokenizer.push(ids[begin:end], last=end == len(ids))
        shown += delta.text
        pieces += delta.pieces
        assert full_text.startswith(shown), "the streamed text differs from the answer"
    assert shown == detokenizer.text == "".join(pieces) == full_text
    assert len(pieces) == len(ids)


@pytest.mark.parametrize("name", [name for name, (_, kind) in CASES.items() if kind != "whole"])
@settings(max_examples=50)
@given(ids=answers, skip=st.booleans())
def test_only_incomplete_characters_are_held_back(
    tokenizers_by_decoder: dict[str, Tokenizer], name: str, ids: list[int], skip: bool
):
    tokenizer = tokenizers_by_decoder[name]
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    run: list[int] = []
    for count, token in enumerate(ids, start=1):
        detokenizer.push([token])
        silent = token == UNKNOWN or (skip and token == SPECIAL)
        is_byte = (tokenizer.fast.id_to_token(token) or "") in {*BYTES, "<0x+5>"}
        run = [*run, token] if is_byte or silent else []
        fallback = CASES[name][1] == "fallback"
        now = tokenizer.decode(ids[: count - len(run) * fallback], skip_special_tokens=skip)
        assert detokenizer.text.rstrip("\ufffd") == now.rstrip("\ufffd")


def stopped_by_prefixes(
    tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str], min_tokens: int
) -> tuple[str, int, bool]:
    """Return (text, num_tokens, stopped), decoding every prefix from scratch."""
    texts = [tokenizer.decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids) + 1)]
    for count in range(min_tokens + 1, len(ids) + 1):
        starts = [texts[count].find(stop, len(texts[min_tokens])) for stop in stops]
        if max(starts) >= 0:
            return texts[count][: min(i for i in starts if i >= 0)], count, True
    return tokenizer.decode(ids), len(ids), False


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=50)
@given(
    ids=answers.filter(lambda ids: VOCAB["\ufffd"] not in ids),
    stops=st.lists(st.text("ab 日é🚀", min_size=1, max_size=2), min_size=1, max_size=3),
    min_tokens=st.integers(0, 5),
)
def test_stop_strings_cut_at_the_exact_token(
    tokenizers_by_decoder: dict[str, Tokenizer],
    name: str,
    ids: list[int],
    stops: list[str],
    min_tokens: int,
):
    min_tokens = min(min_tokens, len(ids))
    detokenizer = Detokenizer(tokenizers_by_decoder[name], stop=stops, min_tokens=min_tokens)
    shown, used, stop = "", 0, None
    for count, token in enumerate(ids, start=1):
        text, stop, pieces = detokenizer.push([token], last=count == len(ids))
        shown, used = shown + text, used + len(pieces)
        if stop is not None:
            break
    expected = stopped_by_prefixes(tokenizers_by_decoder[name], ids, stops, min_tokens)
    assert (detokenizer.text, used, stop is not None) == expected
    assert shown == detokenizer.text


def test_invalid_byte_ends_a_run_of_bytes(tokenizers_by_decoder: dict[str, Tokenizer]):
    ids = [VOCAB["a"], *byte_tokens("é"), VOCAB["<0xFF>"], VOCAB["b"]]
    detokenizer = Detokenizer(tokenizers_by_decoder["Llama"])
    texts = [detokenizer.push([token]).text for token in ids]
    assert texts == ["a", "", "", "", "\ufffd\ufffd\ufffdb"]


def test_invalid_bytes_at_the_end_are_emitted(tokenizers_by_decoder: dict[str, Tokenizer]):
    ids = [VOCAB["<0x3A>"], VOCAB["<0xE4>"], VOCAB["<0xFF>"]]
    detokenizer = Detokenizer(tokenizers_by_decoder["Llama"])
    for token in ids:
        detokenizer.push([token])
    assert detokenizer.push([], last=True).text == "\ufffd" * 3


def test_cost_per_token_does_not_grow(
    tokenizers_by_decoder: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
):
    lengths: list[int] = []
    join = TokenTexts.join

    def counted(texts: TokenTexts, written: Sequence[str]) -> str:
        lengths.append(len(written))
        return join(texts, written)

    monkeypatch.setattr(TokenTexts, "join", counted)
    for name in ("byte-level", "Gemma", "Llama", "Metaspace", "WordPiece"):
        detokenizer = Detokenizer(tokenizers_by_decoder[name], stop=["never"])
        for token in [*VOCAB.values()] * 4:
            detokenizer.push([token])
    assert max(lengths) == 2
    assert len(lengths) < 5 * len(VOCAB)


def test_batch_survives_any_bytes(pair: Pair, tmp_path: Path):
    target = pair.copied(tmp_path).target
    shutil.rmtree(tmp_path / "draft")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink()
    tokenizer = write(target, CASES["Llama"][0])
    llm = LLM(target, max_model_len=64, max_num_seqs=4)
    allowed = [*byte_tokens("é日:"), VOCAB["b"], VOCAB["<0xFF>"]]
    params = [
        SamplingParams(temperature=2.0, seed=seed, max_tokens=30, allowed_token_ids=allowed)
        for seed in range(8)
    ]
    outputs = llm.generate(["a"] * len(params), params, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    assert [answer.text for answer in answers] == [tokenizer.decode(a.token_ids) for a in answers]
    assert any("\ufffd" in answer.text for answer in answers)
