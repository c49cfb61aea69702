"""Which unused widths of the drafter's block are tried, and when. Imports no torch.

A width earns credit, a share of the tokens generated meanwhile, and is tried for one step once its
credit covers the loss expected from that. So all tries together lose a bounded share of the tokens.
What a try brings beyond expectation is credited, too: drafts that are right again are soon tried
again.
"""

from __future__ import annotations

import numpy as np

from strobe.speculation.acceptance import Floats, Ints
from strobe.speculation.policy_config import PolicyConfig


class Exploration:
    """The credit of each width. Widths are indices; -1 stands for no drafts, which earns none."""

    def __init__(self, num_widths: int, config: PolicyConfig):
        self.num_widths = num_widths
        self.config = config
        self.credit = np.zeros(num_widths + 1)
        """Tokens, by width; the last is of no drafts."""
        self._shares = np.full(num_widths, config.explore_share)
        self._confirmed = np.zeros(num_widths)
        self._confirmed_pace = 1.0
        """Steps of each width that took about as long as expected since the pace changed, and the
        pace then."""
        self._tries: list[tuple[int, float]] = []
        """Width, and drafts expected to be right, of steps whose results are not known."""

    def earn(self, tokens: float) -> None:
        """Give the widths their shares of a step's tokens."""
        self.credit[:-1] += self._shares * tokens

    def spend(self, width: int) -> None:
        """Take the credit of a width that is used."""
        self.credit[width] = 0.0

    def begin_try(self, width: int, expected: float) -> None:
        """Note that a step tries a width. expected: its drafts that should be right."""
        if width >= 0:
            self._tries.append((width, expected))

    def end_try(self, width: int, num_right: int) -> None:
        """Credit what a step of this width brought beyond expectation, if it was a try."""
        for i, (tried, expected) in enumerate(self._tries):
            if tried == width:
                self.credit[width] += max(num_right - expected, 0.0)
                del self._tries[: i + 1]
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
        self._shares = np.full(self.num_widths, config.spare_share)
        self._shares[least_loss.argmax()] = config.explore_share
        cheap_ms = ms[0] + np.maximum(ms - ms[0], 0.0) / config.cost_doubt
        gain = self._best(widths, tokens / cheap_ms / rate - 1).clip(0.0, 1.0)
        unconfirmed = self._confirmed < config.confirm_steps
        self._shares = np.maximum(self._shares, config.confirm_share * gain * unconfirmed)

    def _best(self, widths: Ints, values: Floats) -> Floats:
        """Return the largest value of each width."""
        return np.array([values[widths == width].max() for width in range(self.num_widths)])
