"""A checkpoint as one rank sees it: each tensor is the rank's part of it.

Only the part is read from the file, unless it is stored in GGUF's quantized formats.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from strobe.models.checkpoint import Checkpoint
from strobe.models.quantization.grouped import GroupWeight
from strobe.models.weight_mapping import Blocks, WeightPart

BY_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.\w+$")
"""Tensors whose last part may be smaller."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")

Pieces = list[tuple[int, int]]
"""First index and length of the parts of a dimension, in order."""


class ShardedCheckpoint(Checkpoint):
    """The modules' shapes tell which dimension of a tensor is split. A tensor that stacks several
    layers has a part of each. whole_experts: leave out other ranks' experts, if each has tensors of
    its own."""

    def __init__(self, directory: Path, rank: int, size: int, *, whole_experts: bool = False):
        super().__init__(directory)
        self.rank = rank
        self.size = size
        if whole_experts:
            matches = {name: _EXPERT.search(name) for name in self.shapes}
            numbers = {name: int(match[1]) for name, match in matches.items() if match}
            part = -(-(max(numbers.values(), default=0) + 1) // size)
            for name, number in numbers.items():
                if number // part != rank:
                    del self.shapes[name]
        self._pieces: dict[str, dict[int, Pieces]] = {}

    def fit(
        self,
        name: str,
        shape: tuple[int, ...],
        stacked: tuple[int, ...],
        blocks: Blocks | None = None,
    ) -> None:
        stored = self.shapes[name]
        if len(stored) != len(shape):
            super().fit(name, shape, stacked)
        pieces = dict[int, Pieces]()
        for dim, (whole, part) in enumerate(zip(stored, shape, strict=True)):
            if blocks is not None:
                pieces[dim] = self._blocks(name, blocks, dim, whole)
            elif whole != part:
                stacks = stacked if sum(stacked) == part else ()  # of outputs, not of experts
                pieces[dim] = self._parts(name, whole, part, stacks)
            if pieces.get(dim) and sum(length for _, length in pieces[dim]) != part:
                raise self._misfit(name, whole)
        self._pieces[name] = pieces

    def _misfit(self, name: str, whole: int) -> ValueError:
        return ValueError(
            f"{self.source}: tensor {name} has {whole} rows, columns or blocks, which "
            f"{self.size} ranks cannot share; ask for another tensor_parallel_size."
        )

    def _parts(self, name: str, whole: int, part: int, stacked: tuple[int, ...]) -> Pieces:
        """Return this rank's pieces of a dimension of size `whole`, `part` in all."""
        if BY_VOCABULARY.search(name):
            width = -(-whole // self.size)
            if part != min(width, whole - self.rank * width):
                raise self._misfit(name, whole)
            return [(self.rank * width, part)]
        lengths = stacked or (part,)
        copies = self._copies(lengths, whole)
        if copies is None:
            raise self._misfit(name, whole)
        pieces = Pieces()
        first = 0
        for length, count in zip(lengths, copies, strict=True):
            pieces.append((first + self.rank // count * length, length))
            first += length * self.size // count
        return pieces

    def _copies(self, lengths: Sequence[int], whole: int) -> list[int] | None:
        """Return the number of ranks that share a part of each stacked layer, of which this rank
        has so many outputs; None if they do not make up `whole`. Ranks may share keys and values
        but not the queries before them."""
        rest = len(lengths) - 1
        for count in (count for count in range(1, self.size + 1) if self.size % count == 0):
            for copies in ([count] * (rest + 1), [1] + [count] * rest):
                wholes = [n * self.size // c for n, c in zip(lengths, copies, strict=True)]
                if sum(wholes) == whole:
                    return copies
        return None

    def _blocks(self, name: str, grid: Blocks, dim: int, whole: int) -> Pieces:
        """Return the blocks, `whole` in all, of the pieces of a weight's dimension. Raises
        ValueError if a piece begins or ends within one of several blocks."""
        pieces = self._pieces[grid.weight].get(dim)
        if pieces is None or whole == 1:
            return [(0, whole)]
        block = grid.size[dim - len(self.shapes[name])]
        blocks = Pieces()
        for start, length in pieces:
            first = start // block
            last = (start + length - 1) // block
            if length % block and block % length:  # on one rank or another
                raise self._misfit(name, whole)
            blocks.append((first, last - first + 1))
        return blocks

    def read(self, name: str) -> Tensor:
        value = super().read(name)
        for dim, pieces in self._pieces.get(name, {}).items():
            parts = [value.narrow(dim, first, length) for first, length in pieces]
            value = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
        return value

    def read_codes(self, name: str) -> GroupWeight:
        weight = super().read_codes(name)
        pieces = self._pieces.get(name, {})
        if rows := pieces.get(0):
            ranges = [torch.arange(first, first + length) for first, length in rows]
            weight = weight.take(torch.cat(ranges))
        if columns := pieces.get(1):
            ((first, length),) = columns
            weight = weight.columns(first, first + length).copied()
        return weight

    def fill(self, out: Tensor, part: WeightPart) -> None:
        if part.as_codes or not any(name in self._pieces for name in part.sources):
            return super().fill(out, part)
        part.fill(out, *map(self.read, part.sources))
        for name in part.sources:
            self.release(name)
