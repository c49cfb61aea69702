"""Rules of llguidance's grammars: JSON, and answers that are otherwise free."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

ANY_TOKENS = "start: <[*]>*"
"""A grammar that allows every answer."""


class Tag(NamedTuple):
    """A part of an answer in which constrained text follows `begin` and precedes `end`. trigger:
    the beginning of `begin` after which the tag must follow. content: a JSON schema, or a kind
    of grammar and its text, as `source.lark` takes them."""

    trigger: str
    begin: str
    content: Mapping[str, Any] | tuple[str, str]
    end: str


def text_without(texts: Sequence[str]) -> str:
    """Return a grammar for any text that contains none of the texts."""
    banned = "|".join(map(_escape, texts))
    return f"start: TEXT\nTEXT: /(?s:.*)/ & ~BANNED\nBANNED: /(?s:.*)({banned})(?s:.*)/"


def text_with_tags(
    tags: Sequence[Tag], added_tokens: Mapping[str, int], lark: Callable[[str, str], str]
) -> str:
    """Return a grammar for any text in which each trigger begins a tag. added_tokens: ids of the
    tokens that markers may be. lark: converts contents that are grammars."""
    triggers = list(dict.fromkeys(tag.trigger for tag in tags))
    rules = [f"start: ({' | '.join(f'tag{i}' for i in range(len(triggers)))})* TEXT"]
    for i, trigger in enumerate(triggers):
        bodies = [
            " ".join((
                *_pieces(tag.begin.removeprefix(trigger), added_tokens),
                _content(tag.content, lark),
                *_pieces(tag.end, added_tokens),
            ))
            for tag in tags
            if tag.trigger == trigger
        ]  # fmt: skip
        pieces = _pieces(trigger, added_tokens)
        if trigger in added_tokens:
            rules.append(f"tag{i}: TEXT {pieces[0]} ({' | '.join(bodies)})")
        else:
            rules.append(f"tag{i}: trigger{i} ({' | '.join(bodies)})")
            rules.append(f"trigger{i}[lazy]: TEXT {json.dumps(trigger)}")
    return "\n".join([*rules, "TEXT: /(?s:.*)/"])


def _content(content: Mapping[str, Any] | tuple[str, str], lark: Callable[[str, str], str]) -> str:
    """Return a rule for a tag's content. Line ends part nested Lark from what follows."""
    if isinstance(content, tuple):
        return f"%lark {{\n{lark(*content)}\n}}"
    return f"%json {json.dumps(content)}"


def _pieces(text: str, added_tokens: Mapping[str, int]) -> list[str]:
    """Return a rule for each token and each other piece of a text. Tokens are named by id, because
    for llguidance the text of an added token never matches the token."""
    pattern = "|".join(map(re.escape, sorted(added_tokens, key=len, reverse=True)))
    pieces = re.split(f"({pattern})", text) if pattern else [text]
    return [
        f"<[{added_tokens[piece]}]>" if piece in added_tokens else json.dumps(piece)
        for piece in pieces
        if piece
    ]


def _escape(text: str) -> str:
    """Return a regular expression for exactly this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
