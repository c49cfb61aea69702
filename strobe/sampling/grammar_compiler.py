"""Grammars of structured output, compiled by llguidance."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from strobe.grammars.heap import trim_heap
from strobe.grammars.source import STACK_BYTES, GrammarError, matcher_of, one_line, source_of
from strobe.grammars.trial import GrammarTrial
from strobe.sampling_params import StructuredOutputs

_KEPT = 32
_TRIM_EVERY = 16
"""Dropped grammars from one return of their memory to the system to the next."""
_QUICK = 0.02
"""Grammars that compile within so many seconds are compiled for each lane anew."""


class GrammarCompiler:
    """Compiles grammars once each and hands out matchers at their beginnings."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]):
        """tokenizer: a tokenizer.json, read when the first grammar comes."""
        self.file, self.vocab_size, self.eos_ids = tokenizer, vocab_size, list(eos_ids)
        self.words = -(-vocab_size // 32)
        self.trial = GrammarTrial(tokenizer, vocab_size, eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[bytes, tuple[float, dict[int, LLMatcher]]] = OrderedDict()
        self._lock, self._dropped = threading.Lock(), 0

    @property
    def tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self.file.exists():
                raise ValueError(
                    f"structured_outputs needs {self.file}, which does not exist; save the "
                    "tokenizer in that form, or leave them out."
                )
            try:
                self._tokenizer = LLTokenizer(
                    str(self.file), n_vocab=self.vocab_size, eos_token=self.eos_ids or None
                )
            except ValueError as error:
                raise ValueError(
                    f"structured_outputs needs {self.file}, which cannot be used: "
                    f"{one_line(str(error))}"
                ) from None
        return self._tokenizer

    def compile(self, wanted: StructuredOutputs, lane: int = 0) -> LLMatcher:
        """A matcher at the grammar's beginning. Raises ValueError for one that does not compile,
        and GrammarsUnavailable.

        May be called from another thread to have the work done before a request is added. Copies of
        one matcher share a lock: those of different lanes are of matchers made apart, unless the
        grammar takes long to compile, and so give their masks side by side.
        """
        with self._lock:
            tokenizer = self.tokenizer
        key = self.trial.check(wanted)
        with self._lock:
            seconds, made = self._compiled.get(key) or (0.0, {})
            if made:
                self._compiled.move_to_end(key)
                lane = lane if seconds < _QUICK else next(iter(made))
                if lane in made:
                    return made[lane].deep_copy()
        start = time.perf_counter()
        matcher = self._matcher(tokenizer, source_of(wanted))
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        with self._lock:
            entry = self._compiled.setdefault(key, (time.perf_counter() - start, made))
            entry[1][lane] = matcher
            old = self._compiled.popitem(last=False) if len(self._compiled) > _KEPT else None
            self._dropped += old is not None
            trim = old is not None and self._dropped % _TRIM_EVERY == 0
        del old
        if trim:
            trim_heap()
        return matcher.deep_copy()

    def _matcher(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        """A matcher built on a thread with a stack that is deep enough."""
        with ThreadPoolExecutor(1) as pool:
            with self._lock:
                usual = threading.stack_size(STACK_BYTES)
                made = pool.submit(matcher_of, tokenizer, source)
                threading.stack_size(usual)
            return made.result()
