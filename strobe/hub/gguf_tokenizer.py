"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from strobe.hub.gguf_file import metadata_value

END_TOKENS = frozenset(
    {
        "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>",
        "<|return|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>",
        "<end_of_utterance>", "<EOT>", "_<EOT>",
    }
)  # fmt: skip
"""Tokens that end an answer even if the metadata does not say so, as in llama.cpp."""
CONTROL = 3
"""The type of an added token that decoding skips."""
SPACE = "\u2581"
"""What stands for a space in tokens of characters."""
USER_DEFINED = 4
"""The type of any other added token."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {
    "gpt-2": _GPT2,
    "smollm": _GPT2,
    "llama-bpe": _WORDS % "{1,3}",
    "dbrx": _WORDS % "{1,3}",
    "qwen2": _WORDS % "",
    "gpt-4o": "|".join(
        [
            _UPPER + "*" + _LOWER + "+" + _CONTRACTIONS,
            _UPPER + "+" + _LOWER + "*" + _CONTRACTIONS,
            r"\p{N}{1,3}",
            _OTHERS,
        ]
    ),
    "tekken": "|".join(
        [_UPPER + "*" + _LOWER + "+", _UPPER + "+" + _LOWER + "*", r"\p{N}", _OTHERS]
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""Patterns that split text before byte-pair encoding, by tokenizer.ggml.pre."""


def end_tokens(metadata: Mapping[str, Any], path: Path) -> list[int]:
    """Return the ids of the tokens that end an answer: of a text, of a turn and of a message, as
    the metadata says, and those known by their names, one of which a chat template may use."""
    ends = {metadata_value(metadata, "tokenizer.ggml.eos_token_id", path)}
    for key in ("eot", "eom"):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        ends |= set() if number is None else {number}
    tokens = metadata["tokenizer.ggml.tokens"]
    names = END_TOKENS
    if "<|call|>" in tokens:  # gpt-oss, where <|end|> ends a message of several
        names = END_TOKENS - {"<|end|>"}
    return sorted(ends | {i for i, text in enumerate(tokens) if text in names})


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(number, int) and number < len(tokens):
            config[f"{name}_token"] = tokens[number]
    template = metadata.get("tokenizer.chat_template")
    return config | ({} if template is None else {"chat_template": template})


def make_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return the tokenizer: byte-pair encoding of bytes, or of characters as in SentencePiece.
    Raises ValueError for other kinds."""
    model = metadata_value(metadata, "tokenizer.ggml.model", path)
    if model not in MODELS:
        raise ValueError(
            f"{path} has a tokenizer of the kind {model!r}, but only "
            f"{', '.join(map(repr, MODELS))} are supported; use the checkpoint in safetensors."
        )
    tokenizer = MODELS[model](metadata, path)
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata_value(metadata, "tokenizer.ggml.token_type", path)
    for text, kind in zip(tokens, kinds, strict=True):
        kind = CONTROL if text in END_TOKENS else kind
        token = AddedToken(text, normalized=False, special=kind == CONTROL)
        if kind == CONTROL:
            tokenizer.add_special_tokens([token])
        elif kind == USER_DEFINED:
            tokenizer.add_tokens([token])
    if metadata.get("tokenizer.ggml.add_bos_token", model in WITH_BOS):
        number = metadata_value(metadata, "tokenizer.ggml.bos_token_id", path)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[number]} $A", special_tokens=[(tokens[number], number)]
        )
    return tokenizer


def _of_bytes(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return byte-level byte-pair encoding, after a split by a pattern. Raises ValueError for an
    unknown one."""
    split = metadata_value(metadata, "tokenizer.ggml.pre", path)
    if split not in SPLITS:
        raise ValueError(
            f"{path} has a tokenizer of the kind 'gpt2', {split!r}, but only 'gpt2' with "
            f"{', '.join(map(repr, SPLITS))} is supported; use the checkpoint in safetensors."
        )
    pairs = _pairs(metadata, path)
    ignores_merges = split in ("llama-bpe", "tekken", "gpt-4o")
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), pairs, ignore_merges=ignores_merges))
    if split in ("qwen2", "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    steps.append(pre_tokenizers.Split(Regex(SPLITS[split]), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _of_pieces(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return SentencePiece's byte-pair encoding, whose scores order the merges."""
    tokens = metadata["tokenizer.ggml.tokens"]
    scores = metadata_value(metadata, "tokenizer.ggml.scores", path)
    vocabulary = _vocabulary(metadata)
    merges: list[tuple[float, tuple[str, str]]] = []
    for text, score in zip(tokens, scores, strict=True):
        halves = [(text[:i], text[i:]) for i in range(1, len(text))]
        known = [pair for pair in halves if pair[0] in vocabulary and pair[1] in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(score, pair) for pair in known]
    merges.sort(key=lambda merge: -merge[0])
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    return _of_characters(metadata, [pair for _, pair in merges], has_prefix=has_prefix)


def _of_merges(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """Return Gemma 4's byte-pair encoding of characters, with merges of its own."""
    return _of_characters(metadata, _pairs(metadata, path), has_prefix=False)


def _of_characters(
    metadata: Mapping[str, Any], pairs: list[tuple[str, str]], *, has_prefix: bool
) -> Tokenizer:
    """Return byte-pair encoding of characters, whose unknown ones are bytes. has_prefix: whether
    texts begin with a space."""
    tokens = metadata["tokenizer.ggml.tokens"]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        _vocabulary(metadata),
        pairs,
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = spaces
    if has_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _vocabulary(metadata: Mapping[str, Any]) -> dict[str, int]:
    return {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}


def _pairs(metadata: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    """Return the merges, in order."""
    merges = metadata_value(metadata, "tokenizer.ggml.merges", path)
    halves = [merge.split(" ", 1) for merge in merges]
    return [(first, second) for first, second in halves]


MODELS: dict[str, Callable[[Mapping[str, Any], Path], Tokenizer]] = {
    "gpt2": _of_bytes,
    "llama": _of_pieces,
    "gemma4": _of_merges,
}
"""What makes the tokenizer, by tokenizer.ggml.model."""
WITH_BOS = ("llama", "gemma4")
"""Kinds whose texts begin with a token of their own, unless the metadata say otherwise."""
