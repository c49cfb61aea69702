"""The teacher-forced reference: logits of every row of a sequence, computed at once by code that
shares nothing with the engine's steps."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from strobe.engine.build import ResolvedConfig, build
from strobe.engine.engine import Engine
from strobe.models.target import Target
from strobe.request import TokenLogprob
from strobe.sampling_params import MAX_LOGPROBS, SamplingParams
from strobe.tools.verify.rounding import common_length

Logits = NDArray[np.float32]


class Reference(Protocol):
    """name: what computes it; independent: whether it shares no code with the engine."""

    name: str
    independent: bool

    def logits(self, tokens: Sequence[int], first: int) -> Logits:
        """Return the logits [len(tokens) - first, V] of the rows before tokens[first:]."""
        ...


class TransformersReference:
    """The checkpoint in transformers, with eager attention. Keys and values of a prompt that begins
    like the last one are reused, where transformers can cut its cache."""

    name = "transformers"
    independent = True

    def __init__(self, resolved: ResolvedConfig):
        """Raises ValueError if transformers cannot load the checkpoint."""
        from transformers import AutoModelForCausalLM

        try:
            with _no_progress_bars():
                self.model: Any = AutoModelForCausalLM.from_pretrained(
                    resolved.config.target,
                    dtype=resolved.dtype,
                    attn_implementation="eager",
                    local_files_only=True,
                )
            self.model = self.model.to(resolved.device).eval()
        except Exception as error:  # of many kinds: no such class, no memory, a missing package
            text = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"transformers does not load the checkpoint: {text[0]}") from error
        self.vocab_size = resolved.target.decoder.vocab_size
        self.device = resolved.device
        self._reuses = True
        self._cache: Any = None
        self._cached: tuple[int, ...] = ()

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], first: int) -> Logits:
        known = tuple(tokens[:-1])
        rows = len(tokens) - first
        cache, start = self._cut_cache(known[: first - 1])
        ids = torch.tensor([known[start:]], device=self.device)
        output = self.model(
            input_ids=ids, past_key_values=cache, use_cache=self._reuses, logits_to_keep=rows
        )
        if self._reuses and _can_be_cut(output.past_key_values):
            self._cache = output.past_key_values
            self._cached = known
        else:
            self._reuses = False
        return output.logits[0, -rows:, : self.vocab_size].float().cpu().numpy()

    def _cut_cache(self, prompt: Sequence[int]) -> tuple[Any, int]:
        """Return the last sequence's cache, cut to the tokens that it shares with `prompt`, and
        their number. It is removed here, so that a failed forward leaves none."""
        cache = self._cache
        shared = common_length(prompt, self._cached)
        self._cache = None
        if cache is None or not shared:
            return None, 0
        cache.crop(shared - len(self._cached))
        return cache, shared


def _can_be_cut(cache: Any) -> bool:
    """Return whether each layer of a cache keeps all tokens' keys and values, and nothing else."""
    layers = getattr(cache, "layers", None)
    return layers is not None and all(type(layer).__name__ == "DynamicLayer" for layer in layers)


@contextmanager
def _no_progress_bars() -> Generator[None]:
    """Turn transformers' progress bars off for the block."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


class StrobeReference:
    """The target in plain torch, one whole sequence at a time, without caches and graphs. It shares
    the engine's weights and layers."""

    name = "strobe, plain torch, whole sequences"
    independent = False

    def __init__(self, resolved: ResolvedConfig, target: Target):
        config = resolved.config.without_draft().with_(
            attention_backend="reference",
            kernels="torch",
            compile=False,
            cuda_graphs=False,
            enable_prefix_caching=False,
            max_num_seqs=1,
            overlap=1,
        )
        limits = replace(resolved.limits, max_num_seqs=1, num_drafts=0, drafter_block_size=0)
        backends = resolved.backends
        if backends.compiled:
            backends = backends._replace(attention="reference", compiled=False)
        plain = replace(
            resolved, config=config, draft=None, method="none", limits=limits, backends=backends
        )
        # Other operations must not become those of the engine's own target.
        self.engine = Engine(plain, components=build(plain, copy(target)))
        self.vocab_size = resolved.target.decoder.vocab_size

    def logits(self, tokens: Sequence[int], first: int) -> Logits:
        top = min(MAX_LOGPROBS, self.vocab_size)
        params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=top)
        self.engine.add(list(tokens), params)
        scored: list[TokenLogprob | None] = []
        while self.engine.has_work:
            for event in self.engine.step():
                if event.start is not None:
                    scored = list(event.start.prompt_logprobs)
        out = np.full((len(tokens) - first, self.vocab_size), -np.inf, dtype=np.float32)
        for row, entry in zip(out, scored[first:], strict=True):
            assert entry is not None
            row[[token for token, _ in entry.top]] = [value for _, value in entry.top]
            row[entry.token] = entry.logprob
        return out


def make_reference(wanted: str, engine: Engine) -> tuple[Reference, str | None]:
    """Return the reference, and why it is not transformers. Raises ValueError if `wanted` cannot
    be had."""
    resolved = engine.resolved
    reason = _unlike(resolved)
    if wanted != "strobe" and reason is None:
        try:
            return TransformersReference(resolved), None
        except ValueError as error:
            reason = str(error)
    if wanted == "transformers":
        raise ValueError(f"reference is transformers, but {reason}; take strobe.")
    if resolved.split.size > 1:
        raise ValueError(
            f"reference cannot be strobe over {resolved.split.size} ranks; use one rank."
        )
    target = engine.runner.model
    assert isinstance(target, Target)
    return StrobeReference(resolved, target), reason if wanted != "strobe" else None


def _unlike(resolved: ResolvedConfig) -> str | None:
    """Return why transformers would compute another model, if it would."""
    config = resolved.config
    if config.load_format != "auto":
        return f"load_format is {config.load_format}, so the weights are random"
    if config.weight_dtype not in ("auto", str(resolved.dtype).removeprefix("torch.")):
        return f"weight_dtype is {config.weight_dtype}, which changes the weights"
    if config.kv_cache_dtype != "auto":
        return f"kv_cache_dtype is {config.kv_cache_dtype}, which changes keys and values"
    return None
