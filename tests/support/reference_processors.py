"""The logits processors in plain Python, one row at a time: vLLM's formulas in vLLM's order (bias
and allowed ids, penalties, bans, a grammar's mask)."""

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
    """Apply penalties: repetition over prompt and output, the others over the output only."""
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
    """Keep the tokens that a grammar allows; if none remains, all of them with equal logits."""
    changed = [x if token in allowed else -math.inf for token, x in enumerate(row)]
    if max(changed) > -math.inf:
        return changed
    return [0.0 if token in allowed else -math.inf for token in range(len(row))]


def processed(
    row: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Collection[int] = (),
) -> list[float]:
    """Process one row of a request's logits, without its grammar; ends: banned by min_tokens."""
    changed = biased(row, sampling.logit_bias or {}, sampling.allowed_token_ids)
    changed = penalized(
        changed,
        prompt,
        output,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        repetition=sampling.repetition_penalty,
    )
    return without(changed, ends) if len(output) < sampling.min_tokens else changed
