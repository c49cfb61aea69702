"""The only room that knows text: encoding, chat templates, and text made token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

Message = Mapping[str, Any]


class Tokenizer:
    """A checkpoint's tokenizer and chat template. Raises ValueError where it cannot be read."""

    def __init__(self, directory: Path):
        from transformers import AutoTokenizer  # slow to import, and only needed here

        try:
            self.hf: Any = AutoTokenizer.from_pretrained(directory)
            self.fast: FastTokenizer = self.hf.backend_tokenizer
        except Exception as error:
            raise ValueError(
                f"{directory} has no tokenizer that can be read ({error}); "
                "download or save the checkpoint again."
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens as the checkpoint adds them."""
        return list(self.hf.encode(text))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self.fast.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **template_options: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant to answer.

        Raises ValueError when there is no template or the template refuses the messages.
        """
        if not messages:
            raise ValueError("The conversation is empty; give it at least one message.")
        template_options.setdefault("add_generation_prompt", True)
        try:
            text = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                chat_template=chat_template,
                tokenize=False,
                **template_options,
            )
        except Exception as error:
            raise ValueError(f"The chat template refuses these messages: {error}.") from error
        return list(self.hf.encode(text, add_special_tokens=False))


class TextDelta(NamedTuple):
    """New text, how many of the tokens given made it, and the stop string met, if any."""

    text: str
    num_tokens: int
    stop: str | None


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
        self._fast = tokenizer.fast
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skip = skip_special_tokens
        self._stop, self._include_stop, self._min_tokens = tuple(stop), include_stop, min_tokens
        self._silent = silent_ids
        self.ids: list[int] = []
        self.text = ""
        self._sent = 0
        self._search_from = 0

    def push(self, ids: Sequence[int], *, last: bool = False) -> TextDelta:
        """Take in tokens. last: nothing follows, so what was held back comes out."""
        stopped = None
        used = 0
        for token in ids:
            self.ids.append(token)
            used += 1
            if last and used == len(ids) and token in self._silent:
                break
            piece = self._stream.step(self._fast, token)
            if piece:
                self.text += piece
                stopped = self._find_stop(len(piece))
            if len(self.ids) <= self._min_tokens:
                self._search_from = len(self.text)
            if stopped is not None:
                break
        if last and stopped is None:
            self._flush()
        hold = 0 if last or stopped is not None else self._held_back()
        end = len(self.text) - hold
        delta, self._sent = self.text[self._sent : end], max(self._sent, end)
        return TextDelta(delta, used, stopped)

    def _flush(self) -> None:
        """Bring out bytes that never became a whole character, as decoding all at once would."""
        ids = self.ids[:-1] if self.ids and self.ids[-1] in self._silent else self.ids
        whole = self._fast.decode(ids, skip_special_tokens=self._skip)
        if whole.startswith(self.text):
            self.text = whole

    def _find_stop(self, added: int) -> str | None:
        if not self._stop or len(self.ids) <= self._min_tokens:
            return None
        found: tuple[int, str] | None = None
        for stop in self._stop:
            begin = max(self._search_from, len(self.text) - added - len(stop) + 1)
            at = self.text.find(stop, begin)
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        return stop

    def _held_back(self) -> int:
        """Characters at the end that begin some stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for count in range(min(longest, len(self.text) - self._sent), 0, -1):
            tail = self.text[-count:]
            if any(stop.startswith(tail) for stop in self._stop):
                return count
        return 0
