"""Text made token by token: at the end it equals decoding all tokens at once, for any tokenizer."""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from strobe.text.tokenizer import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")  # as ByteFallback reads them
_ANCHOR = "a"  # a token whose text no decoder changes
_PER_TOKEN = {"Join", "Replace", "Metaspace", "WordPiece", "Strip"}
_FIRST_DIFFERS = {"Join", "Metaspace", "WordPiece"}


class TokenTexts:
    """How a tokenizer's decoder makes text of tokens.

    `kind` says what a token's text depends on. "pieces": on the token, and on whether it is the
    first. "fallback": the same, but tokens that are bytes in a row are one piece. "bytes": tokens
    are bytes of one UTF-8 text. "whole": on all tokens, so that no text is final before the end.
    `strip`: how many spaces the decoder takes off the start of the text.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._fast, self._byte_of = tokenizer.fast, tokenizer.byte_of
        self._decoder: Any = tokenizer.fast.decoder
        added = tokenizer.fast.get_added_tokens_decoder().values()
        self._special = {token.content for token in added if token.special}
        self.written = functools.lru_cache(1 << 16)(self._stored_text)
        self.piece = functools.lru_cache(1 << 16)(self._decoded_text)
        stages, self.strip = _stages(self._decoder), 0
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
            apart = all(stage["type"] == "Replace" and _is_space(stage) for stage in stages[:-1])
            return "fallback" if apart else "whole"
        apart = _PER_TOKEN.issuperset(names) and not any(stage.get("stop") for stage in stages)
        if not apart or (self.strip and self.first_differs) or self.join([_ANCHOR]) != _ANCHOR:
            return "whole"
        return "pieces"

    def _stored_text(self, token: int, skip_special: bool) -> str | None:
        """The token as the vocabulary writes it, None if it leaves no text."""
        written = self._fast.id_to_token(token)
        return None if skip_special and written in self._special else written

    def _decoded_text(self, written: str) -> str:
        """The text of a token that is not the first."""
        return self.join([_ANCHOR, written])[len(_ANCHOR) :]

    def join(self, written: Sequence[str]) -> str:
        """The text of these tokens alone."""
        if self._decoder is None:
            return " ".join(written)
        return self._decoder.decode(list(written))

    def raw(self, written: str) -> bytes:
        """The bytes of a token of a byte-level vocabulary."""
        if self._byte_of.keys() >= set(written):
            return bytes(self._byte_of[character] for character in written)
        return written.encode()


def _stages(decoder: Any) -> list[dict[str, Any]]:
    """A decoder's stages in order, as tokenizer.json has them."""
    if decoder is None:
        return [{"type": "Join"}]
    try:
        unread, stages = [json.loads(decoder.__getstate__())], list[dict[str, Any]]()
    except Exception:  # one written in Python, of which nothing is known
        return [{"type": "Unknown"}]
    while unread:
        stage = unread.pop(0)
        if stage["type"] == "Sequence":
            unread = stage["decoders"] + unread
        else:
            stages.append(stage)
    return stages


def _is_space(replace: dict[str, Any]) -> bool:
    """Whether a Replace puts spaces in place of a text, so that it can make no <0xNN>."""
    return "String" in replace["pattern"] and replace["content"].isspace()


texts_of = functools.lru_cache(8)(TokenTexts)


class TextStream:
    """The text of one answer's tokens: `step` returns what no later token can change, `pending` is
    what follows it if nothing else comes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True):
        self._texts, self._skip = texts_of(tokenizer), skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip, self._begun = self._texts.strip, False
        self._run = bytearray()  # the byte tokens that the answer ends with
        self._all: list[str] = []

    def step(self, token: int) -> str:
        """Take in a token and return the text that became final."""
        texts = self._texts
        if (written := texts.written(token, self._skip)) is None:
            return ""
        if texts.kind == "whole":
            self._all.append(written)
            return ""
        if texts.kind == "bytes":
            return self._stripped(self._utf8.decode(texts.raw(written)))
        if texts.kind == "fallback" and (byte := _BYTE.fullmatch(written)):
            self._run.append(int(byte[1], 16))
            return ""
        run = self.end()
        first = not self._begun and texts.first_differs
        self._begun = True
        return run + self._stripped(texts.join([written]) if first else texts.piece(written))

    def pending(self) -> str:
        """The whole characters that follow the final text if nothing else comes."""
        if self._all:
            return self._texts.join(self._all).rstrip("\ufffd")
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[self._leading(text) :]

    def end(self) -> str:
        """Return the text that is not final yet as if nothing followed."""
        if self._all:
            text, self._all = self._texts.join(self._all), []
            return text
        try:
            text = self._run.decode()
        except UnicodeDecodeError:  # then every byte of them counts as broken
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return self._stripped(text + self._utf8.decode(b"", True))

    def _leading(self, text: str) -> int:
        """How many spaces at a text's start the decoder strips."""
        start = text[: self._strip]
        return len(start) - len(start.lstrip(" "))

    def _stripped(self, text: str) -> str:
        count = self._leading(text)
        self._strip = self._strip - count if count == len(text) else 0
        return text[count:]


class TextDelta(NamedTuple):
    """New text, the stop string met, if any, and of each token given that made it its share of the
    raw text, a stop string's part included."""

    text: str
    stop: str | None
    pieces: list[str]


class Detokenizer:
    """One answer's text as its tokens arrive, cut exactly at a stop string.

    `text` is all of it; text that may yet turn out to begin a stop string is held back from the
    deltas until it is certain.
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
        """min_tokens: stop strings are looked for in later tokens only. silent_ids: tokens that
        end the answer and leave no text."""
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop, self._include_stop, self._min_tokens = tuple(stop), include_stop, min_tokens
        self._silent = silent_ids
        self.ids: list[int] = []
        self.text = ""
        self._sent = 0
        self._search_from = 0

    def push(self, ids: Sequence[int], *, last: bool = False) -> TextDelta:
        """Take in tokens. last: nothing follows, so what was held back comes out."""
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
        delta, self._sent = self.text[self._sent : end], max(self._sent, end)
        return TextDelta(delta, stopped, pieces)

    def _find_stop(self, pieces: list[str]) -> str | None:
        """Cut the text at the first stop string that the newest token completed, also in text that
        is not final yet: the answer ends here."""
        pending = self._stream.pending()
        text = self.text + pending
        if len(self.ids) <= self._min_tokens:
            self._search_from = len(text)
            return None
        before = len(self.text) - len(pieces[-1])
        found: list[tuple[int, str]] = []
        for stop in self._stop:
            if (at := text.find(stop, max(self._search_from, before - len(stop) + 1, 0))) >= 0:
                found.append((at, stop))
        if not found:
            return None
        pieces[-1] += pending
        at, stop = min(found, key=lambda one: one[0])
        self.text = text[: at + len(stop) if self._include_stop else at]
        return stop

    def _num_held_back(self) -> int:
        """Characters at the end that begin some stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self.text) - self._sent), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stop):
                return count
        return 0
