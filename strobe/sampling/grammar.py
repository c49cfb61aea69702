"""Structured output: which tokens a grammar allows behind each draft, through llguidance.

The matcher of a request stands behind its committed tokens. For a verify step it walks along the
drafts as far as they are legal, gives the mask of every row on the way, and goes back:

    committed | tail  d1   d2   d3          (d3 illegal)
              | mask0 mask1 mask2  free     what may follow; behind an illegal draft nothing is kept
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from

from strobe.request import Request
from strobe.sampling_params import StructuredOutputs

_KEPT = 128
_LONGEST = 1 << 17
_STACK = 1 << 28
_WHITE = {"whitespace_pattern": "\\n[ \\t]{0,40}| ?"}
"""Between the parts of JSON: a line break and an indent, or a space. A model that is made to write
what it would not can otherwise go on with white space for ever."""


def source_of(wanted: StructuredOutputs) -> str:
    """The grammar in llguidance's form. Raises ValueError for text that is none."""
    parts = [{**_part(wanted), "name": "answer"}]
    if wanted.lead or wanted.instead is not None:
        lead = f"({json.dumps(wanted.lead)})? " if wanted.lead else ""
        other = "" if wanted.instead is None else " | @instead"
        parts.insert(0, {"lark_grammar": f"start: {lead}(@answer{other})"})
    if wanted.instead is not None:
        parts.append({"name": "instead", "lark_grammar": wanted.instead})
    return json.dumps({"grammars": parts})


def _part(wanted: StructuredOutputs) -> dict[str, Any]:
    if wanted.json is not None:
        return {"json_schema": _schema(wanted.json)}
    if wanted.json_object:
        return {"json_schema": {"type": "object", "x-guidance": _WHITE}}
    if wanted.regex is not None:
        return json.loads(LLMatcher.grammar_from_regex(wanted.regex))["grammars"][0]
    if wanted.choice is not None:
        return {"lark_grammar": f"start: {' | '.join(map(json.dumps, wanted.choice))}"}
    return {"lark_grammar": grammar_from("grammar", wanted.grammar or "")}


def _schema(given: Any) -> Any:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"the JSON schema is no JSON ({error})") from None
    if not isinstance(given, Mapping):
        return given
    own = given.get("x-guidance", {})
    return {**given, "x-guidance": {**_WHITE, **own} if isinstance(own, Mapping) else own}


class Follower:
    """One request's place in its grammar."""

    def __init__(self, matcher: LLMatcher, after: Sequence[int] = (), opener: int | None = None):
        """after: token ids behind which the grammar begins; empty: it begins at once. opener: the
        first token of answers that wait for `after`; None: all do."""
        self.matcher, self.after, self.opener = matcher, tuple(after), opener
        self.free = bool(after) and opener is None
        self.done = 0

    def masks(self, output: Sequence[int], drafts: Sequence[int], words: int) -> np.ndarray:
        """[1 + len(drafts), words] int32: what may follow the output, and each draft behind it.

        Raises ValueError where the grammar cannot go on.
        """
        self._catch_up(output)
        masks = np.full((1 + len(drafts), words), -1, dtype=np.int32)
        known, free, taken = list(output), self.free, 0
        for row in range(1 + len(drafts)):
            if not free:
                self.matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, words * 4)
                if self.matcher.is_error():
                    raise ValueError(self._failure())
                if self.opener is not None and not known:
                    masks[row, self.opener >> 5] |= np.uint32(1 << (self.opener & 31)).view(
                        np.int32
                    )
            if row == len(drafts):
                break
            known.append(drafts[row])
            if not free and self.matcher.is_stopped() and not self._opens(known):
                if not _has(masks[row], drafts[row]):  # behind the end comes only the end
                    break
                continue
            legal, free, consumed = self._walk(known, free)
            taken += consumed
            if not legal:
                break
        if taken:
            self.matcher.rollback(taken)
        return masks

    def mend(self, output: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """The drafts with what the grammar forces in place of the first that it does not allow,
        and of later ones: where only one continuation is left, such as a schema's next key, it is
        a better draft than any. Raises ValueError where the grammar cannot go on."""
        self._catch_up(output)
        mended, known, free, taken = list(drafts), list(output), self.free, 0
        row = 0
        while row < len(mended):
            known.append(mended[row])
            legal, ends, consumed = self._walk(known, free)
            if not legal:
                forced = [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()
                if not forced:
                    break
                mended[row:] = [*forced, *mended[row + len(forced) :]][: len(mended) - row]
                known[-1] = mended[row]
                legal, ends, consumed = self._walk(known, free)
                if not legal:
                    break
            free, taken, row = ends, taken + consumed, row + 1
        if taken:
            self.matcher.rollback(taken)
        return mended

    def _walk(self, known: Sequence[int], free: bool) -> tuple[bool, bool, int]:
        """Follow the newest of the tokens: whether it is allowed, whether the answer is free behind
        it, and tokens that the matcher took."""
        if self._opens(known):
            return True, True, 0
        if free:
            return True, not self._begins(known), 0
        took = not self.matcher.is_stopped() and self.matcher.try_consume_tokens([known[-1]]) == 1
        return took, False, int(took)

    def _catch_up(self, output: Sequence[int]) -> None:
        """Take in the tokens committed since the last step."""
        while self.done < len(output):
            self.done += 1
            newest = output[max(0, self.done - len(self.after) - 1) : self.done]
            if self._opens(newest):
                self.free = True
            elif self.free:
                self.free = not self._begins(newest)
            elif not self.matcher.consume_token(output[self.done - 1]):
                raise ValueError(self._failure())

    def _opens(self, tokens: Sequence[int]) -> bool:
        """Whether the newest token is the answer's first and begins thinking."""
        return len(tokens) == 1 and tokens[0] == self.opener

    def _begins(self, tokens: Sequence[int]) -> bool:
        return tuple(tokens[-len(self.after) :]) == self.after

    def _failure(self) -> str:
        reason = _line(self.matcher.get_error())
        return f"structured_outputs: the grammar cannot be followed further: {reason}"


class Grammars:
    """Compiles grammars and follows them, one matcher per request."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]):
        """tokenizer: a tokenizer.json, read when the first grammar comes."""
        self.file, self.vocab_size, self.eos_ids = tokenizer, vocab_size, list(eos_ids)
        self.words = -(-vocab_size // 32)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._followers: WeakKeyDictionary[Request, Follower] = WeakKeyDictionary()

    @property
    def tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self.file.exists():
                raise ValueError(
                    f"structured_outputs need {self.file}, which does not exist; save the "
                    "tokenizer in that form, or leave them out."
                )
            try:
                self._tokenizer = LLTokenizer(
                    str(self.file), n_vocab=self.vocab_size, eos_token=self.eos_ids or None
                )
            except ValueError as error:
                raise ValueError(
                    f"structured_outputs need {self.file}, which cannot be used: "
                    f"{_line(str(error))}"
                ) from None
        return self._tokenizer

    def compile(self, wanted: StructuredOutputs) -> LLMatcher:
        """A matcher at the grammar's beginning. Raises ValueError for one that does not compile.

        May be called from another thread to have the work done before a request is added.
        """
        try:
            source = source_of(wanted)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs: the grammar does not compile: {_line(str(error))}"
            ) from None
        if len(source) > _LONGEST:
            raise ValueError(
                f"structured_outputs come to {len(source)} characters, but at most {_LONGEST} are "
                "compiled; shorten them."
            )
        with self._lock:
            matcher = self._compiled.get(source)
            if matcher is not None:
                self._compiled.move_to_end(source)
                return matcher.deep_copy()
            tokenizer = self.tokenizer
        matcher = self._matcher(tokenizer, source)
        if matcher.is_error():
            raise ValueError(
                f"structured_outputs: the grammar does not compile: {_line(matcher.get_error())}"
            )
        with self._lock:
            self._compiled[source] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _matcher(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        """llguidance walks rules that lead to one another by recursion, and a few thousand of them
        on a usual stack of 8 MiB would end the process."""
        with ThreadPoolExecutor(1) as pool:
            with self._lock:
                usual = threading.stack_size(_STACK)
                made = pool.submit(LLMatcher, tokenizer, source, log_level=0)
                threading.stack_size(usual)
            return made.result()

    def follow(self, request: Request) -> None:
        """Begin with a request. Raises ValueError for a grammar that does not compile."""
        if request.structured is not None:
            matcher = self.compile(request.structured)
            self._followers[request] = Follower(
                matcher, request.structured.after, request.structured.opener
            )

    def mend(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """A request's drafts, mended; a grammar that cannot go on leaves them as they are, and
        `masks` says so."""
        try:
            return self._followers[request].mend(request.output_ids, drafts)
        except ValueError:
            return list(drafts)

    def masks(self, request: Request, drafts: Sequence[int]) -> np.ndarray:
        """[1 + len(drafts), words] int32 for the rows of a request's span. A grammar that cannot go
        on is the request's error; its rows are then free."""
        try:
            return self._followers[request].masks(request.output_ids, drafts, self.words)
        except ValueError as error:
            request.error = str(error)
            return np.full((1 + len(drafts), self.words), -1, dtype=np.int32)


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token >> 5] >> (token & 31) & 1)


def _line(text: str) -> str:
    """What a library says, on one line that is not too long: it may quote the whole grammar."""
    line = " ".join(text.split()).rstrip(".")
    return f"{line}." if len(line) <= 300 else f"{line[:300]}..."
