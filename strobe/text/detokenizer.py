"""Incremental detokenization whose result equals decoding all tokens at once, for any tokenizer."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from strobe.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers.decoders import Decoder

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # as ByteFallback parses them
_ANCHOR = "a"  # a token whose text no decoder changes
_PER_TOKEN = {"Join", "Replace", "Metaspace", "WordPiece", "Strip"}
_FIRST_DIFFERS = {"Join", "Metaspace", "WordPiece"}


class TokenTexts:
    """A tokenizer's decoder, classified by its way of turning tokens into text.

    `kind`: what a token's text depends on. "pieces": the token, and whether it is the first one.
    "fallback": the same, but consecutive byte tokens are one piece. "bytes": tokens are bytes of
    one UTF-8 text. "whole": all tokens, so that no text is final before the end.
    `strip`: number of leading spaces that the decoder strips.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._fast = tokenizer.fast
        self._byte_of = tokenizer.byte_of
        self._decoder = tokenizer.fast.decoder
        added = tokenizer.fast.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self.stored = functools.lru_cache(1 << 16)(self._stored_text)
        self.piece = functools.lru_cache(1 << 16)(self._decoded_text)
        stages = _stages(self._decoder)
        self.strip = 0
        names = [stage["type"] for stage in stages]
        if names[-2:] == ["Fuse", "Strip"] and stages[-1]["content"] == " ":
            self.strip = stages[-1]["start"] * (not stages[-1]["stop"])
        names = names[: len(names) - (self.strip > 0)]
        while names and names[-1] == "Fuse":
            names.pop()
        self.first_differs = bool(_FIRST_DIFFERS.intersection(names))
        self.kind = self._kind(names, stages)

    def _kind(self, names: list[str], stages: list[dict[str, Any]]) -> str:
        stages = stages[: len(names)]
        if names == ["ByteLevel"]:
            return "bytes"
        if names[-1:] == ["ByteFallback"]:
            separate = all(stage["type"] == "Replace" and _is_space(stage) for stage in stages[:-1])
            return "fallback" if separate else "whole"
        separate = _PER_TOKEN.issuperset(names) and not any(stage.get("stop") for stage in stages)
        if not separate or (self.strip and self.first_differs) or self.join([_ANCHOR]) != _ANCHOR:
            return "whole"
        return "pieces"

    def _stored_text(self, token: int, skip_special: bool) -> str | None:
        """Return the token's vocabulary entry, or None if it has no text."""
        stored = self._fast.id_to_token(token)
        return None if skip_special and stored in self._special else stored

    def _decoded_text(self, stored: str) -> str:
        """Decode a token that is not the first."""
        return self.join([_ANCHOR, stored])[len(_ANCHOR) :]

    def join(self, stored: Sequence[str]) -> str:
        """Decode these tokens without context."""
        if self._decoder is None:
            return " ".join(stored)
        return self._decoder.decode(list(stored))

    def raw(self, stored: str) -> bytes:
        """Return the bytes of a token of a byte-level vocabulary."""
        if self._byte_of.keys() >= set(stored):
            return bytes(self._byte_of[character] for character in stored)
        return stored.encode()


def _stages(decoder: Decoder | None) -> list[dict[str, Any]]:
    """Return a decoder's stages in order, in tokenizer.json's form."""
    if decoder is None:
        return [{"type": "Join"}]
    try:
        unread = [json.loads(decoder.__getstate__())]
        stages = list[dict[str, Any]]()
    except Exception:  # a decoder written in Python cannot be inspected
        return [{"type": "Unknown"}]
    while unread:
        stage = unread.pop(0)
        if stage["type"] == "Sequence":
            unread = stage["decoders"] + unread
        else:
            stages.append(stage)
    return stages


def _is_space(replace: dict[str, Any]) -> bool:
    """Whether a Replace stage replaces a text by spaces, so that it cannot produce <0xNN>."""
    return "String" in replace["pattern"] and replace["content"].isspace()


texts_of = functools.lru_cache(8)(TokenTexts)


class TextStream:
    """The text of one answer's tokens: `step` returns text that no later token can change,
    `pending` the text after it if the answer ended here."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._texts = texts_of(tokenizer)
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = self._texts.strip
        self._begun = False
        self._run = bytearray()  # the byte tokens at the end of the answer
        self._all: list[str] = []

    def step(self, token: int) -> str:
        """Add a token and return the text that became final."""
        texts = self._texts
        if (stored := texts.stored(token, self._skip)) is None:
            return ""
        if texts.kind == "whole":
            self._all.append(stored)
            return ""
        if texts.kind == "bytes":
            return self._stripped(self._utf8.decode(texts.raw(stored)))
        if texts.kind == "fallback" and (byte := _BYTE.fullmatch(stored)):
            self._run.append(int(byte[1], 16))
            return ""
        run = self.end()
        first = not self._begun and texts.first_differs
        self._begun = True
        return run + self._stripped(texts.join([stored]) if first else texts.piece(stored))

    def pending(self) -> str:
        """Return the complete characters after the final text if the answer ended here."""
        if self._all:
            return self._texts.join(self._all).rstrip("\ufffd")
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[self._leading(text) :]

    def end(self) -> str:
        """End the answer and return the rest of its text."""
        if self._all:
            text = self._texts.join(self._all)
            self._all = []
            return text
        try:
            text = self._run.decode()
        except UnicodeDecodeError:  # ByteFallback replaces every byte of the run
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return self._stripped(text + self._utf8.decode(b"", True))

    def _leading(self, text: str) -> int:
        """Return the number of spaces to strip at the start of a text."""
        start = text[: self._strip]
        return len(start) - len(start.lstrip(" "))

    def _stripped(self, text: str) -> str:
        count = self._leading(text)
        self._strip = self._strip - count if count == len(text) else 0
        return text[count:]


class TextDelta(NamedTuple):
    """New text, the stop string that was completed, if any, and each token's share of the raw text,
    including parts of a stop string, up to the token that completed it."""

    text: str
    stop: str | None
    pieces: list[str]


class Detokenizer:
    """One answer's text as its tokens arrive, cut exactly at a stop string.

    `text` is all of it. Deltas hold back text that may be the start of a stop string until that is
    certain.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
        silent_ids: frozenset[int] = frozenset(),
    ):
        """min_tokens: stop strings count only after this many tokens. silent_ids: tokens that end
        the answer and have no text."""
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._silent = silent_ids
        self.ids: list[int] = []
        self.text = ""
        self._sent = 0
        self._search_from = 0

    def push(self, ids: Sequence[int], *, last: bool = False) -> TextDelta:
        """Add tokens and return the new text. last: no token follows, so nothing is held back."""
        stopped = None
        pieces: list[str] = []
        for token in ids:
            self.ids.append(token)
            if last and len(pieces) + 1 == len(ids) and token in self._silent:
                pieces.append("")
                break
            pieces.append(self._stream.step(token))
            self.text += pieces[-1]
            if self._stop:
                stopped = self._find_stop(pieces)
            if stopped is not None:
                break
        if last and stopped is None:
            rest = self._stream.end()
            self.text += rest
            if pieces:
                pieces[-1] += rest
        hold = 0 if last or stopped is not None else self._num_held_back()
        end = len(self.text) - hold
        delta = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return TextDelta(delta, stopped, pieces)

    def _find_stop(self, pieces: list[str]) -> str | None:
        """Cut the text at the first stop string that the newest token completed and return it. Text
        that is not final yet counts, since a stop string ends the answer."""
        pending = self._stream.pending()
        text = self.text + pending
        if len(self.ids) <= self._min_tokens:
            self._search_from = len(text)
            return None
        before = len(self.text) - len(pieces[-1])
        matches: list[tuple[int, str]] = []
        for stop in self._stop:
            if (start := text.find(stop, max(self._search_from, before - len(stop) + 1, 0))) >= 0:
                matches.append((start, stop))
        if not matches:
            return None
        pieces[-1] += pending
        start, stop = min(matches, key=lambda match: match[0])
        self.text = text[: start + len(stop) if self._include_stop else start]
        return stop

    def _num_held_back(self) -> int:
        """Return the number of characters at the end that may be the start of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self.text) - self._sent), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0
