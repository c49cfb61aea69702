"""Which unused widths of the drafter's block are tried, and when. Imports no torch.

A width earns credit, a share of the tokens generated meanwhile, and is tried for one step once its
credit covers the loss expected from that. So all tries together lose a bounded share of the tokens.
What a try brings beyond expectation is credited, too: drafts that are right again are soon tried
again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from strobe.speculation.acceptance import Floats, Ints
from strobe.speculation.policy_config import PolicyConfig

_MAX_IN_FLIGHT = 4  # plans until a step's result is known; a step that failed has none


class Try(NamedTuple):
    """A step that tries a width: the requests that draft in it, by slot, its drafts that should be
    right, and the number of its plan."""

    width: int
    slots: frozenset[int]
    expected: float
    number: int


class Exploration:
    """The credit of each width. Widths are indices; -1 stands for no drafts."""

    def __init__(self, num_widths: int, config: PolicyConfig):
        self.num_widths = num_widths
        self.config = config
        self.credit = np.zeros(num_widths + 1)
        """Tokens, by width; the last is of no drafts."""
        self._shares = np.append(np.full(num_widths, config.explore_share), 0.0)
        self._confirmed = np.zeros(num_widths + 1)
        self._confirmed_pace = 1.0
        """Steps of each width that took about as long as expected since the pace changed, and the
        pace then."""
        self._num_plans = 0
        self._tries = list[Try]()
        """Those whose results are not known."""

    def earn(self, tokens: float) -> None:
        """Give the widths their shares of the tokens of a step that is planned."""
        self._num_plans += 1
        self.credit += self._shares * tokens

    def spend(self, width: int) -> None:
        """Take the credit of a width that is used."""
        self.credit[width] = 0.0

    def begin_try(self, width: int, slots: Iterable[int], expected: float) -> None:
        """Note that the newest plan tries a width. slots: of the requests that draft; expected:
        the drafts that should be right."""
        step = Try(width=width, slots=frozenset(slots), expected=expected, number=self._num_plans)
        self._tries.append(step)

    def end_try(self, width: int, slots: Iterable[int], num_right: int) -> None:
        """Credit what a step with drafts brought beyond expectation, if it was a try."""
        first = self._num_plans - _MAX_IN_FLIGHT
        self._tries = [tried for tried in self._tries if tried.number >= first]
        drafting = frozenset(slots)
        for tried in self._tries:
            if tried[:2] == (width, drafting):
                self.credit[width] += max(num_right - tried.expected, 0.0)
                self._tries.remove(tried)
                break

    def confirm(self, width: int | None, pace: float) -> None:
        """Note that a step of this width cost about what was expected. Forget such steps once the
        machine has changed: drafts may have become cheaper, or dearer, than other steps."""
        ratio = pace / self._confirmed_pace
        if max(ratio, 1 / ratio) > self.config.pace_change:
            self._confirmed[:] = 0
            self._confirmed_pace = pace
        if width is not None:
            self._confirmed[width] += 1

    def set_shares(self, widths: Ints, tokens: Floats, ms: Floats) -> None:
        """Set the shares that widths earn, by the width, the expected tokens and the milliseconds
        of each option, of which the first drafts nothing. The width whose steps lose least tells
        about the drafter at the lowest price, so it earns most. A width whose cost is known from
        the start alone earns more: by what it would bring if its drafts had been timed too long."""
        config = self.config
        rate = (tokens / ms).max()
        least_loss = self._best(widths, tokens - rate * ms)
        shares = np.full(self.num_widths + 1, config.spare_share)
        shares[least_loss.argmax()] = config.explore_share
        added = np.maximum(ms - ms[0], 0.0)
        cheap_rates = tokens / (ms[0] + added / config.cost_doubt)
        dear_rates = tokens / (ms[0] + added * config.dear_drafts)
        gain = np.append(
            self._best(widths, cheap_rates) / rate, dear_rates[0] / dear_rates[1:].max()
        )
        gain = (gain - 1).clip(0.0, 1.0)
        shares[-1] = config.spare_share * (gain[-1] > 0.0)
        unconfirmed = self._confirmed < config.confirm_steps
        self._shares = np.maximum(shares, config.confirm_share * gain * unconfirmed)

    def _best(self, widths: Ints, values: Floats) -> Floats:
        """Return the largest value of each width."""
        return np.array([values[widths == width].max() for width in range(self.num_widths)])
