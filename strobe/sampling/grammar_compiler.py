"""Grammars of structured output, compiled by llguidance."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer

from strobe.grammars.source import (
    STACK_BYTES,
    GrammarError,
    grammar_source,
    make_matcher,
    one_line,
    unenforced,
)
from strobe.grammars.trial import GrammarTrial
from strobe.host.host_memory import trim_heap
from strobe.sampling_params import StructuredOutputs

logger = logging.getLogger(__name__)

_MAX_CACHED = 32
_TRIM_EVERY = 16
"""Evicted grammars between two calls of `trim_heap`."""
_QUICK_SECONDS = 0.02
"""Grammars that compile within this time are compiled once per lane, others once."""


class GrammarCompiler:
    """Compiles and caches grammars; returns copies of their matchers."""

    def __init__(self, tokenizer: Path, vocab_size: int, eos_ids: Sequence[int]):
        """tokenizer: path of tokenizer.json, which the first grammar loads."""
        self.eos_ids = list(eos_ids)
        self.tokenizer_path = tokenizer
        self.vocab_size = vocab_size
        self.words = -(-vocab_size // 32)
        self.trial = GrammarTrial(tokenizer, vocab_size, eos_ids)
        self.compiled: OrderedDict[bytes, tuple[float, dict[int, LLMatcher]]] = OrderedDict()
        self._lock = threading.Lock()
        self._dropped = 0

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        if not self.tokenizer_path.exists():
            raise ValueError(
                f"structured_outputs needs {self.tokenizer_path}, which does not exist; save the "
                "tokenizer in that form, or leave them out."
            )
        try:
            path = str(self.tokenizer_path)
            eos_ids = self.eos_ids or None
            return LLTokenizer(path, n_vocab=self.vocab_size, eos_token=eos_ids)
        except ValueError as error:
            raise ValueError(
                f"structured_outputs needs {self.tokenizer_path}, which cannot be used: "
                f"{one_line(str(error))}"
            ) from None

    def compile(self, structured: StructuredOutputs, lane: int = 0) -> LLMatcher:
        """Return a matcher at the grammar's start. Raises ValueError for a grammar that does not
        compile, and GrammarsUnavailable.

        Any thread may call it, to compile before a request is added. Copies of one matcher share a
        lock, so each lane has a matcher of its own to compute masks in parallel, unless the grammar
        takes long to compile.
        """
        with self._lock:
            tokenizer = self.tokenizer
        key = self.trial.check(structured)
        with self._lock:
            seconds, by_lane = self.compiled.get(key) or (0.0, {})
            if by_lane:
                self.compiled.move_to_end(key)
                lane = lane if seconds < _QUICK_SECONDS else next(iter(by_lane))
                if lane in by_lane:
                    return by_lane[lane].deep_copy()
        start = time.perf_counter()
        matcher = self._compile(tokenizer, grammar_source(structured))
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        if not by_lane and (names := unenforced(structured)):
            logger.warning("keywords of a JSON schema that are not enforced: %s", ", ".join(names))
        with self._lock:
            entry = self.compiled.setdefault(key, (time.perf_counter() - start, by_lane))
            entry[1][lane] = matcher
            old = self.compiled.popitem(last=False) if len(self.compiled) > _MAX_CACHED else None
            self._dropped += old is not None
            trim = old is not None and self._dropped % _TRIM_EVERY == 0
        del old
        if trim:
            trim_heap()
        return matcher.deep_copy()

    def _compile(self, tokenizer: LLTokenizer, source: str) -> LLMatcher:
        """Build a matcher on a thread with a stack of STACK_BYTES."""
        with ThreadPoolExecutor(1) as pool:
            with self._lock:
                stack_size = threading.stack_size(STACK_BYTES)
                future = pool.submit(make_matcher, tokenizer, source)
                threading.stack_size(stack_size)
            return future.result()
