"""Recorded drafting: the correct drafts at each place of real answers, and the drafts' margins.

A benchmark replays traces on models of any shape with random weights: the draft policy sees real
margins and acceptance, while each step takes the time of these shapes.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from strobe.tools.report import Figures

MIXES = ("all", "easy", "hard", "drifting")
_KEYS = ("widths", "lengths", "right", "note")


@dataclass(frozen=True, eq=False)
class Traces:
    """A answers, concatenated, with P places in total; N widths of the drafter's block.

    widths: drafts per block, ascending. lengths [A] int64: places of each answer; a place is a
    token from which a block is drafted. right [P, N] uint8: the number of leading drafts that are
    right. margins: for each width, [P, D] float16. note: origin of the traces.
    """

    widths: tuple[int, ...]
    lengths: NDArray[np.int64]
    right: NDArray[np.uint8]
    margins: tuple[NDArray[np.float16], ...]
    note: Figures

    @property
    def starts(self) -> NDArray[np.int64]:
        """First place of each answer, [A]."""
        return np.cumsum(self.lengths) - self.lengths

    def acceptance_length(self, width: int, answer: int | None = None) -> float:
        """Return the mean tokens per verify step of all answers, or of one, if every block has this
        width and is verified whole."""
        right = self.right[:, self.widths.index(width)]
        places = steps = 0
        chosen = range(len(self.lengths)) if answer is None else [answer]
        for start, length in zip(self.starts[chosen], self.lengths[chosen], strict=True):
            position = 0
            while position < length:
                position += 1 + int(right[start + position])
                steps += 1
            places += int(length)
        return places / steps

    def arranged(self, mix: str) -> Traces:
        """Return a mix of the answers: all; easy, the third with the longest acceptance; hard, the
        third with the shortest; or drifting, the first halves of easy answers joined to the second
        halves of hard ones. Raises ValueError for an unknown name."""
        if mix not in MIXES:
            raise ValueError(f"mix is {mix!r}; name one of {', '.join(MIXES)}.")
        if mix == "all":
            return self
        accepted = [self.acceptance_length(self.widths[-1], i) for i in range(len(self.lengths))]
        order = np.argsort(accepted, kind="stable")
        third = max(len(accepted) // 3, 1)
        starts = self.starts
        halves = self.lengths // 2
        easy = np.sort(order[-third:])
        hard = np.sort(order[:third])
        if mix == "easy":
            return self._of([[range(starts[i], starts[i] + self.lengths[i])] for i in easy])
        if mix == "hard":
            return self._of([[range(starts[i], starts[i] + self.lengths[i])] for i in hard])
        return self._of([
            [range(starts[i], starts[i] + halves[i]),
             range(starts[j] + halves[j], starts[j] + self.lengths[j])]
            for i, j in zip(easy, hard, strict=True)
        ])  # fmt: skip

    def _of(self, answers: Sequence[Sequence[range]]) -> Traces:
        """Return traces of answers that consist of these ranges of places."""
        lengths = np.array([sum(map(len, parts)) for parts in answers])
        places = np.concatenate([np.arange(p.start, p.stop) for parts in answers for p in parts])
        margins = tuple(rows[places] for rows in self.margins)
        return replace(self, lengths=lengths, right=self.right[places], margins=margins)

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {
            "widths": np.array(self.widths),
            "lengths": self.lengths,
            "right": self.right,
            "note": np.array(json.dumps(self.note)),
        }
        for width, margins in zip(self.widths, self.margins, strict=True):
            arrays[f"margins_{width}"] = margins
        np.savez_compressed(path, **arrays)


def load(path: Path) -> Traces:
    """Read a file of traces. Raises ValueError if it holds none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            widths, lengths, right, note = [file[name] for name in _KEYS]
            margins = tuple(file[f"margins_{n}"] for n in widths)
        traces = Traces(
            widths=tuple(map(int, widths)),
            lengths=lengths,
            right=right,
            margins=margins,
            note=json.loads(str(note)),
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"{path} holds no traces ({error}); name a file that strobe bench record has written."
        ) from None
    size = int(lengths.sum()) if len(lengths) else 0
    shapes = [rows.shape for rows in margins]
    fits = right.shape == (size, len(widths)) and shapes == [(size, n) for n in widths]
    finite = all(np.isfinite(rows).all() for rows in margins)
    if not size or not fits or not finite or (right > traces.widths).any() or lengths.min() < 1:
        raise ValueError(
            f"{path} holds traces whose parts do not match; record them again with strobe bench "
            "record."
        )
    return traces


def independent(chance: float, widths: Sequence[int], *, seed: int = 0) -> Traces:
    """Generate 64 answers of 512 tokens in which each draft is right with the same probability,
    whatever its place and margin."""
    rng = np.random.default_rng(seed)
    lengths = np.full(64, 512)
    size = int(lengths.sum())
    max_drafts = widths[-1]
    wrong = rng.random((size, max_drafts)) >= chance
    run = np.where(wrong.any(1), wrong.argmax(1), max_drafts)
    right = np.minimum(run[:, None], np.array(widths)).astype(np.uint8)
    margins = tuple(rng.exponential(3.0, (size, n)).astype(np.float16) for n in widths)
    return Traces(
        widths=tuple(widths), lengths=lengths, right=right, margins=margins, note={"chance": chance}
    )
