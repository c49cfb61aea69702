"""How likely drafts of prompt lookup are to be right: by how many tokens they were found by, and by
place. Imports no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from strobe.speculation.draft_policy import DraftChain

FIRST, PRIOR = 0.7, 4.0  # a draft's chance before anything is known, and the drafts it counts for
HALVED = 64  # steps after which what was observed weighs half, so that the bad are tried again


class Lookup:
    """Shares of drafts that were right where those before them were, drawn to `FIRST`."""

    def __init__(self, most: int):
        """most: drafts of a chain."""
        self._counts: dict[int, tuple[Any, int]] = {}
        """By tokens matched: drafts right and drafts looked at [2, most], as of a step."""
        self._none = np.zeros((2, most))

    def chances(self, chain: DraftChain, step: int) -> Any:
        """[tokens of the chain], that a draft counts: all up to it are right."""
        right, seen = self._at(chain.match_length, step)[:, : len(chain.tokens)]
        return np.cumprod((right + PRIOR * FIRST) / (seen + PRIOR))

    def observe(self, match: int, verified: int, accepted: int, step: int) -> None:
        """What became of a chain. Behind the first wrong draft nobody knows."""
        counts = self._at(match, step)
        counts[0, :accepted] += 1
        counts[1, : min(accepted + 1, verified)] += 1
        self._counts[match] = counts, step

    def _at(self, match: int, step: int) -> Any:
        counts, when = self._counts.get(match, (self._none, step))
        return counts * 0.5 ** ((step - when) / HALVED)
