"""Prompts whose answer is the text between a prefix and a suffix."""

from __future__ import annotations

from strobe.server.openai.protocol.errors import FieldError
from strobe.server.serving import Serving

TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)
"""Tokens before the prefix, before the suffix and after both, by families of models."""


def infill_ids(serving: Serving, prefix: list[int], suffix: str) -> list[int]:
    """Return the prompt for a prefix and a suffix. Raises FieldError if the model has no tokens for
    that."""
    known = serving.added_tokens
    for names in TOKENS:
        if known.keys() >= set(names):
            start, hole, end = (known[name] for name in names)
            text = serving.tokenizer.encode(suffix, add_special_tokens=False)
            return [start, *prefix, hole, *text, end]
    raise FieldError(
        "suffix is set, but this model has no tokens that mark a text to fill in; leave it out.",
        "suffix",
        "unsupported_parameter",
    )
