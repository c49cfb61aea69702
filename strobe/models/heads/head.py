"""The protocol of a drafter's head, and what it is given.

Legend: S blocks, D drafts of each, R rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from strobe.host.transfer import download


class Drafts(NamedTuple):
    """tokens [S or more, D] int64; margins, same shape, float32: each draft's logit minus the
    second largest one, None if unknown."""

    tokens: Tensor | None = None
    margins: Tensor | None = None

    def first(self, count: int) -> Drafts:
        """The first drafts of every block."""
        return Drafts(*[part if part is None else part[:, :count] for part in self])

    def download(self) -> Drafts:
        """Queue copies to host memory, complete once the stream reaches them."""
        return Drafts(*[part if part is None else download(part) for part in self])


class BlockRows(NamedTuple):
    """The rows of S blocks that predict.

    hidden [S, D, H]: their residual stream; anchor [S]: each block's newest token. greedy: drafts
    are argmax tokens; margins: their margins are wanted. choose(logits [S, n, V], first): choose
    the drafts from the `first` one on, by argmax or as the request's own tokens are sampled; the
    logits may be one rank's columns.
    """

    hidden: Tensor
    anchor: Tensor
    greedy: bool
    margins: bool
    choose: Callable[[Tensor, int], Drafts]


class Backbone(Protocol):
    """A drafter's layers with the output layer. Each function takes a residual stream [R, H]."""

    def head(self, x: Tensor) -> Tensor:
        """Return logits [R, V]; -inf for tokens outside a reduced vocabulary."""
        ...

    def head_part(self, x: Tensor) -> Tensor:
        """Return this rank's columns of the logits, which is all that `choose` needs."""
        ...

    def argmax(self, x: Tensor) -> Tensor:
        """Return the most probable tokens [R], without logits in memory."""
        ...

    def best_two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable tokens [R] and the margins of their logits over the second
        largest [R] float32."""
        ...


class Head(nn.Module):
    """Turns the rows of blocks into drafts."""

    def forward(self, model: Backbone, block: BlockRows) -> Drafts:
        raise NotImplementedError
