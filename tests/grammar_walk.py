"""GrammarState.walk with the masks that it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from strobe.sampling.grammar import GrammarState


class Walked(NamedTuple):
    """drafts, errors: see GrammarState.walk; masks [n, K + 1, words] int32."""

    drafts: list[list[int]]
    masks: np.ndarray
    errors: dict[int, str]


def walk(state: GrammarState, slots: Sequence[int], drafts: Sequence[Sequence[int]]) -> Walked:
    """Rows that the walk leaves alone have -1."""
    width = 1 + max(map(len, drafts), default=0)
    masks = np.full((len(drafts), width, state.compiler.words), -1, dtype=np.int32)
    found, errors = state.walk(slots, drafts, masks)
    return Walked(found, masks, errors)
