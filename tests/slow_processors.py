"""The logits processors written out in plain Python, for one row at a time: vLLM's formulas, in its
order (bias and allowed ids, penalties, bans, a grammar's mask)."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from strobe.sampling_params import SamplingParams


def biased(
    row: Sequence[float], bias: Mapping[int, float], allowed: Collection[int] | None
) -> list[float]:
    return [
        x + bias.get(token, 0.0) if allowed is None or token in allowed else -math.inf
        for token, x in enumerate(row)
    ]


def penalized(
    row: Sequence[float],
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence: float,
    frequency: float,
    repetition: float,
) -> list[float]:
    """repetition over prompt and output, the others over the output alone."""
    changed = list(row)
    for token in range(len(row)):
        if token in prompt or token in output:
            changed[token] *= repetition if changed[token] <= 0 else 1 / repetition
        changed[token] -= frequency * output.count(token)
        changed[token] -= presence * (token in output)
    return changed


def without(row: Sequence[float], banned: Collection[int]) -> list[float]:
    return [-math.inf if token in banned else x for token, x in enumerate(row)]


def within(row: Sequence[float], allowed: Collection[int]) -> list[float]:
    """Only what a grammar allows; where that leaves nothing, all of it, equally likely."""
    changed = [x if token in allowed else -math.inf for token, x in enumerate(row)]
    if max(changed) > -math.inf:
        return changed
    return [0.0 if token in allowed else -math.inf for token in range(len(row))]


def processed(
    row: Sequence[float],
    asked: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Collection[int] = (),
) -> list[float]:
    """One row of a request's logits, all but its grammar; ends: what min_tokens holds back."""
    changed = biased(row, asked.logit_bias or {}, asked.allowed_token_ids)
    changed = penalized(
        changed,
        prompt,
        output,
        presence=asked.presence_penalty,
        frequency=asked.frequency_penalty,
        repetition=asked.repetition_penalty,
    )
    return without(changed, ends) if len(output) < asked.min_tokens else changed
