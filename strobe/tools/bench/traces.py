"""Recorded drafting: at each place of real answers, what a pair's drafter would have brought there.

A benchmark replays it over models of any shape with random weights: the policy sees margins and
acceptance as in life, while a step costs what the shapes cost.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from strobe.tools.bench.report import Figures

MIXES = ("all", "easy", "hard", "drifting")
_KEYS = ("widths", "lengths", "right", "note")


@dataclass(frozen=True, eq=False)
class Traces:
    """A answers, one behind the other, of P places in all; N widths of the drafter's block.

    widths: drafts of each, ascending. lengths [A] int64: places of each answer; at place t the
    newest token is the answer's token t. right [P, N] uint8: how many drafts in a row were right,
    of a block that begins there. margins: of each width [P, D] float16. note: where it comes from.
    """

    widths: tuple[int, ...]
    lengths: Any
    right: Any
    margins: tuple[Any, ...]
    note: Figures

    @property
    def starts(self) -> Any:
        """[A]: the first place of each answer."""
        return np.cumsum(self.lengths) - self.lengths

    def acceptance_length(self, width: int, answer: int | None = None) -> float:
        """Tokens a verify step, where every block is that wide and verified whole; of all answers,
        or of one."""
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
        """easy: the third of the answers that accepts most drafts; hard: the third that accepts
        fewest; drifting: answers whose first half is an easy one's and whose second a hard one's.
        Raises ValueError for another name."""
        if mix not in MIXES:
            raise ValueError(f"mix is {mix!r}; name one of {', '.join(MIXES)}.")
        if mix == "all":
            return self
        each = [self.acceptance_length(self.widths[-1], i) for i in range(len(self.lengths))]
        order, third = np.argsort(each, kind="stable"), max(len(each) // 3, 1)
        starts, halves = self.starts, self.lengths // 2
        easy, hard = np.sort(order[-third:]), np.sort(order[:third])
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
        """The answers made of these places."""
        lengths = np.array([sum(map(len, parts)) for parts in answers])
        places = np.concatenate([np.arange(p.start, p.stop) for parts in answers for p in parts])
        margins = tuple(rows[places] for rows in self.margins)
        return replace(self, lengths=lengths, right=self.right[places], margins=margins)

    def save(self, path: Path) -> None:
        margins = {f"margins_{n}": rows for n, rows in zip(self.widths, self.margins, strict=True)}
        np.savez_compressed(
            path,
            widths=np.array(self.widths),
            lengths=self.lengths,
            right=self.right,
            note=np.array(json.dumps(self.note)),
            **margins,
        )


def load(path: Path) -> Traces:
    """Raises ValueError for a file that holds no traces."""
    try:
        with np.load(path, allow_pickle=False) as file:
            widths, lengths, right, note = [file[name] for name in _KEYS]
            margins = tuple(file[f"margins_{n}"] for n in widths)
        traces = Traces(tuple(map(int, widths)), lengths, right, margins, json.loads(str(note)))
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
            f"{path} holds traces whose parts do not fit each other; record them anew with strobe "
            "bench record."
        )
    return traces


def independent(chance: float, widths: Sequence[int], *, seed: int = 0) -> Traces:
    """Each draft is right with the same chance, whatever its place and margin: 64 answers of 512
    tokens."""
    rng, lengths = np.random.default_rng(seed), np.full(64, 512)
    size, max_drafts = int(lengths.sum()), widths[-1]
    wrong = rng.random((size, max_drafts)) >= chance
    run = np.where(wrong.any(1), wrong.argmax(1), max_drafts)
    right = np.minimum(run[:, None], np.array(widths)).astype(np.uint8)
    margins = tuple(rng.exponential(3.0, (size, n)).astype(np.float16) for n in widths)
    return Traces(tuple(widths), lengths, right, margins, {"chance": chance})
