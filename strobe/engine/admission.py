"""Checks of new requests against the engine's limits."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from strobe.engine.build import ResolvedConfig
from strobe.sampling_params import DRAFTER_METHODS, SamplingParams, Speculation, StructuredOutputs


def check_prompt(prompt_ids: Sequence[int], resolved: ResolvedConfig) -> None:
    """Raises ValueError for a prompt that is empty, too long or outside the vocabulary."""
    if not prompt_ids:
        raise ValueError("The prompt is empty; give it at least one token.")
    limit = resolved.limits.max_model_len
    if len(prompt_ids) >= limit:
        raise ValueError(
            f"The prompt has {len(prompt_ids)} tokens, but max_model_len is {limit} with the "
            f"answer; shorten it to {limit - 1} tokens or raise max_model_len."
        )
    _check_ids("The prompt", prompt_ids, resolved)


def check_sampling(sampling: SamplingParams, resolved: ResolvedConfig) -> None:
    """Raises ValueError for token ids and counts beyond the vocabulary."""
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids"):
        _check_ids(name, list(getattr(sampling, name) or ()), resolved)
    structured = StructuredOutputs.of(sampling.structured_outputs)
    if structured is not None:
        _check_ids("structured_outputs.think_end", structured.think_end, resolved)
        think_start = [] if structured.think_start is None else [structured.think_start]
        _check_ids("structured_outputs.think_start", think_start, resolved)
    size = resolved.target.decoder.vocab_size
    for name in ("logprobs", "prompt_logprobs"):
        top = getattr(sampling, name) or 0
        if top > size:
            raise ValueError(
                f"{name} is {top}, but the vocabulary has {size} tokens; ask for at most that."
            )


def _check_ids(name: str, ids: Sequence[int], resolved: ResolvedConfig) -> None:
    size = resolved.target.decoder.vocab_size
    if ids and not 0 <= min(ids) <= max(ids) < size:
        invalid = next(i for i in ids if not 0 <= i < size)
        raise ValueError(
            f"{name} holds token id {invalid}, but the vocabulary has ids 0 to {size - 1}."
        )


def choose_method(
    speculation: Speculation, resolved: ResolvedConfig, methods: Collection[str]
) -> tuple[str, int, str | None]:
    """Return a request's drafting method, its drafts per step, and why it has none. methods: those
    that the engine can run. Raises ValueError for what it cannot."""
    if resolved.config.shadow:
        return "none", 0, _shadow_reason(speculation)
    max_drafts = resolved.limits.num_drafts
    method = speculation.method or resolved.method
    if speculation.num_drafts is not None and speculation.num_drafts > max_drafts:
        raise ValueError(
            f"speculation.num_drafts is {speculation.num_drafts}, but this engine verifies at most "
            f"{max_drafts} drafts per step; ask for 0 to {max_drafts}."
        )
    if method == "none" or speculation.num_drafts == 0:
        if speculation.method == "none" or speculation.num_drafts == 0:
            return "none", 0, "the request turned speculation off"
        if resolved.draft is None:
            return "none", 0, "no drafter is loaded"
        return "none", 0, "the engine's method is none"
    if not max_drafts or method not in methods:
        needs_drafter = method in DRAFTER_METHODS
        hint = "start the engine with a drafter" if needs_drafter else "give num_drafts"
        raise ValueError(
            f"speculation.method is {method!r}, but this engine cannot draft so; {hint}."
        )
    return method, max_drafts if speculation.num_drafts is None else speculation.num_drafts, None


def _shadow_reason(speculation: Speculation) -> str:
    """Return why a request does not draft in shadow mode, with the fields that have no effect."""
    if speculation.method == "none" or speculation.num_drafts == 0:
        return "the request turned speculation off"
    reason = "the engine runs in shadow mode, where all answers come from plain decoding"
    ignored = [name for name in ("method", "num_drafts", "always") if getattr(speculation, name)]
    if not ignored:
        return reason
    return f"{reason}; {', '.join(f'speculation.{name}' for name in ignored)} had no effect"
