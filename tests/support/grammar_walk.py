"""A walk along drafts and the resulting masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strobe.sampling.grammar import GrammarState


class Walked(NamedTuple):
    """drafts: see GrammarWalk; masks [n, K + 1, words] int32; errors: see GrammarState.fill."""

    drafts: list[list[int]]
    masks: np.ndarray
    errors: dict[int, str]


def walk(state: GrammarState, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> Walked:
    """Walk and fill the masks; rows that no grammar limits are -1."""
    width = 1 + max(map(len, drafts), default=0)
    masks = np.full((len(drafts), width, state.compiler.words), -1, dtype=np.int32)
    step = state.walk(slots, drafts)
    return Walked(step.drafts, masks, state.fill(step, masks))
