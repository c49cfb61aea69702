"""Prompts whose answer is the text between a prefix and a suffix."""

from __future__ import annotations

from functools import partial

from strobe.server.openai.protocol.infill_request import Gap
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving

CODE_LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")
TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    CODE_LLAMA,
)
"""Tokens before the prefix, before the suffix and after both, by families of models."""

FILE_TOKENS = (("<|repo_name|>", "<|file_sep|>"), ("<repo_name>", "<file_sep>"))
"""Tokens before a repository's name and before each of its files, by families."""

ENDS = ("<|endoftext|>", "<|fim_pad|>", *sum(FILE_TOKENS, ()), "▁<EOT>")
"""Tokens that end an answer between prefix and suffix, besides the model's end tokens."""


def end_ids(serving: Serving) -> tuple[int, ...]:
    """Return the model's tokens of ENDS."""
    return tuple([serving.added_tokens[name] for name in ENDS if name in serving.added_tokens])


def infill_ids(serving: Serving, prefix: list[int], gap: Gap) -> list[int]:
    """Return the prompt for the gap after a prefix. Raises FieldError if the model has no tokens
    for that."""
    known = serving.added_tokens
    encode = partial(serving.tokenizer.encode, add_special_tokens=False)
    names = next((names for names in TOKENS if known.keys() >= set(names)), None)
    if names is None:
        raise FieldError(
            f"{gap.field} asks for a text to fill in, but this model has no tokens that mark one; "
            "use a model that has, such as Qwen2.5-Coder.",
            gap.field,
            "unsupported_parameter",
        )
    begin, hole, end = (known[name] for name in names)
    # CodeLlama's tokenizer adds a space to a text's beginning, but not after a line break.
    lead = "\n" if names == CODE_LLAMA else ""
    suffix = encode(lead + gap.suffix)[len(encode(lead)) :]
    files = _file_ids(serving, gap.files)
    return [*files, begin, *prefix, hole, *suffix, end, *encode(gap.start)]


def _file_ids(serving: Serving, files: tuple[tuple[str, str], ...]) -> list[int]:
    """Return the tokens of other files of the repository, each with its name and text: as the
    model knows them, or as plain text."""
    known = serving.added_tokens
    encode = partial(serving.tokenizer.encode, add_special_tokens=False)
    texts = [encode(f"{name}\n{text}\n") for name, text in files]
    for repository, separator in FILE_TOKENS:
        if files and repository in known and separator in known:
            ids = [known[repository], *encode("repository\n")]
            for text in (*texts, encode("file\n")):
                ids += [known[separator], *text]
            return ids
    return [token for text in texts for token in text]
