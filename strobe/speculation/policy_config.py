"""All tuned numbers of the adaptive draft policy; `benchmarks/policy.py` judges them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyConfig:
    hold_steps: int = 6  # steps for which a choice holds; to draft, at most the number of requests
    shares: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)  # of requests that draft at once
    explore_share: float = 0.002  # of the tokens: credit of the width that loses least,
    spare_share: float = 0.0005  # and of each of the others
    dear_drafts: float = 1.5  # plain steps earn credit if they are best once drafts cost so much

    confirm_share: float = 0.02  # credit of a width that doubles the speed if its drafts were timed
    cost_doubt: float = 10.0  # too long by this factor,
    confirm_steps: int = 4  # until so many of its steps took about as long as expected,
    pace_change: float = 1.5  # and again once all steps take longer or shorter by this factor

    first_rate: float = 0.82  # of right drafts at a position, before anything is known,
    first_weight: float = 3.0  # as if so many drafts had been seen
    request_memory: float = 512.0  # half-life of counts of drafts in steps, over the requests,
    step_memory: float = 48.0  # but not less than this

    block_gain: float = 0.6  # weight of the newest block in the mean of a request's blocks
    spread: float = 16.0  # requests with which next blocks differ half as much as newest blocks
    rest_memory: float = 48.0  # half-life of that mean, in steps without drafting
    prior_memory: float = 24.0  # half-life in steps of the blocks in a prior
    own_weight: float = 0.75  # initial weight of a request's mean against the prior,
    max_own_weight: float = 0.8  # its maximum,
    own_gain: float = 0.02  # and the weight of one block in learning it

    pace_doubt: float = 0.07  # standard deviations: of the pace at the start,
    pace_drift: float = 0.01  # of its change in each step,
    pace_jump: float = 0.5  # of its change once two steps in a row are outliers,
    drafts_doubt: float = 0.3  # of the factor of what drafts add to a step,
    drafts_drift: float = 0.003  # of its change,
    step_noise: float = 0.07  # and of a step's milliseconds,
    context_noise: float = 0.7  # also by what rates over context leave open; all of logarithms
    outlier: float = 2.0  # an error larger than this many of its standard deviations is noise
    table_gain: float = 0.02  # share of a step's error that goes to the cost of its number of rows,
    rate_gain: float = 0.4  # and to the rates over context, if contexts have on average
    rate_context: int = 1024  # so many positions;
    rate_floor: float = 0.1  # each rate may be this share of a step, if it was thought to be less
