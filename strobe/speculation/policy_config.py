"""All that is tuned in the adaptive draft policy, by `benchmarks/policy.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyConfig:
    hold_steps: int = 6  # for which a choice holds; with drafts no more than requests that may
    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)  # of the requests that may draft
    explore_share: float = 0.002  # of the time: what trying each width may cost
    spread_requests: float = 16.0  # requests whose newest blocks, not means, stand for the next

    first_rate: float = 0.82  # of right drafts at a position before anything is known
    table_prior: float = 1.0  # drafts for which what all widths and positions show counts
    request_memory: float = 512.0  # requests' steps after which counts of drafts weigh half,
    step_memory: float = 48.0  # or steps, where those are longer

    block_gain: float = 0.6  # weight of a request's newest block in the mean of its blocks
    rest_memory: float = 48.0  # steps of rest after which that mean weighs half
    prior_memory: float = 24.0  # steps after which what others have brought weighs half
    own_weight: float = 0.75  # of a request's own mean against the prior, at first,
    max_own_weight: float = 0.8  # and at most
    own_gain: float = 0.02  # weight of a block in how far means are trusted

    chain_rate: float = 0.7  # of right drafts of prompt lookup before anything is known
    chain_memory: float = 20.0  # steps after which counts of those weigh half
    chain_rows: int = 8  # over which the cost of a row of theirs is taken

    pace_gain: float = 0.1  # share of a step's error that goes to the pace of all steps,
    table_gain: float = 0.02  # and to the cost of its number of rows
