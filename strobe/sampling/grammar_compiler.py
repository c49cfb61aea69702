"""Grammars of structured output, compiled by llguidance."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from strobe.sampling_params import StructuredOutputs

_KEPT = 128
_LONGEST = 1 << 17
_STACK = 1 << 28
_WORK = 50_000
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, step_lexer_fuel=_WORK)
"""Of llguidance's work on a mask: some 0.1 s before the first token, and less behind others."""
_QUICK = 0.02
"""Grammars that compile within so many seconds are compiled for each lane anew."""

_SAID = {
    "NoExtensionBias": "the model's tokens can write nothing that it allows",
    "lexer error: too many expressions": f"it takes more work at a token than the limit, {_WORK:,} "
    "expressions; shorten what repeats, such as x{1000}",
}

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


class GrammarCompiler:
    """Compiles grammars once each and hands out matchers at their beginnings."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]):
        """tokenizer: a tokenizer.json, read when the first grammar comes."""
        self.file, self.vocab_size, self.eos_ids = tokenizer, vocab_size, list(eos_ids)
        self.words = -(-vocab_size // 32)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, tuple[float, dict[int, LLMatcher]]] = OrderedDict()
        self._lock = threading.Lock()

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
                    f"{one_line(str(error))}"
                ) from None
        return self._tokenizer

    def compile(self, wanted: StructuredOutputs, lane: int = 0) -> LLMatcher:
        """A matcher at the grammar's beginning. Raises ValueError for one that does not compile.

        May be called from another thread to have the work done before a request is added. Copies of
        one matcher share a lock: those of different lanes are of matchers made apart, unless the
        grammar takes long to compile, and so give their masks side by side.
        """
        try:
            source = source_of(wanted)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                f"structured_outputs: the grammar does not compile: {one_line(str(error))}"
            ) from None
        if len(source) > _LONGEST:
            raise ValueError(
                f"structured_outputs come to {len(source)} characters, but at most {_LONGEST} are "
                "compiled; shorten them."
            )
        with self._lock:
            seconds, made = self._compiled.get(source) or (0.0, {})
            if made:
                self._compiled.move_to_end(source)
                lane = lane if seconds < _QUICK else next(iter(made))
                if lane in made:
                    return made[lane].deep_copy()
            tokenizer = self.tokenizer
        start = time.perf_counter()
        matcher = self._matcher(tokenizer, source)
        if matcher.is_error() or (not made and (matcher := _tried(matcher)).is_error()):
            raise ValueError(
                f"structured_outputs: the grammar does not compile: {one_line(matcher.get_error())}"
            )
        with self._lock:
            entry = self._compiled.setdefault(source, (time.perf_counter() - start, made))
            entry[1][lane] = matcher
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def _matcher(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        """llguidance walks rules that lead to one another by recursion, and a few thousand of them
        on a usual stack of 8 MiB would end the process."""
        with ThreadPoolExecutor(1) as pool:
            with self._lock:
                usual = threading.stack_size(_STACK)
                made = pool.submit(LLMatcher, tokenizer, source, log_level=0, limits=_LIMITS)
                threading.stack_size(usual)
            return made.result()


def _tried(matcher: LLMatcher) -> LLMatcher:
    """The matcher, or a copy that failed on its way to the second token: what takes too much work
    shows there."""
    trial = matcher.deep_copy()
    for _ in range(2):
        allowed = np.frombuffer(trial.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(allowed, bitorder="little")
        if not trial.is_error() and not trial.is_stopped():
            trial.try_consume_tokens([int(bits.argmax())])
    return trial if trial.is_error() else matcher


def one_line(text: str) -> str:
    """What llguidance says, on one line that is not too long: it may quote the whole grammar, and
    what it was at."""
    line = " ".join(text.partition("<state>")[0].split()).rstrip(".")
    for known, said in _SAID.items():
        line = said if line.startswith(known) else line
    return f"{line}." if len(line) <= 300 else f"{line[:300]}..."
