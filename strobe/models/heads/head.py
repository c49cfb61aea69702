"""The protocol of a drafter's head, and its inputs.

Legend: S blocks, D drafts of each, C candidates of each draft, R rows, H hidden size, V vocabulary,
V' rows of the drafter's output layer, which may be fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from strobe.host.transfer import download
from strobe.models.layers import DecoderLayer
from strobe.models.model_config import DecoderConfig
from strobe.models.ops.torch_ops import TorchOps
from strobe.sampling.candidates import Candidates, HeadOutputs
from strobe.sampling.walk import WalkNoise


class Drafts(NamedTuple):
    """tokens [S or more, D] int64; margins, same shape, float32: each draft's logit minus the
    second largest one, or as much evidence of a head of its own; None if unknown."""

    tokens: Tensor | None = None
    margins: Tensor | None = None

    def first(self, count: int) -> Drafts:
        """The first drafts of every block."""
        return Drafts(*[part if part is None else part[:, :count] for part in self])

    def download(self) -> Drafts:
        """Queue copies to host memory, complete once the stream reaches them."""
        return Drafts(*[part if part is None else download(part) for part in self])


def concat(parts: Sequence[Drafts]) -> Drafts:
    """Concatenate the drafts of the same blocks, which all have margins or none."""
    tokens = [part.tokens for part in parts if part.tokens is not None]
    margins = [part.margins for part in parts if part.margins is not None]
    return Drafts(torch.cat(tokens, 1), torch.cat(margins, 1) if margins else None)


class BlockRows(NamedTuple):
    """The rows of S blocks that predict.

    hidden [S, D, H]: their residual stream; anchor [S]: each block's newest token; anchor_hidden
    [S, H]: its row's residual stream, if that row predicts nothing and the head reads it. greedy:
    drafts are argmax tokens; margins: their margins are wanted. choose(logits [S, n, V], first):
    choose the drafts from the `first` one on, by argmax or as the request's own tokens are sampled;
    the logits may be one rank's columns. noise: the same choice among candidates; None for argmax.
    lead(outputs of all rows, count): the candidates for such a choice; None for argmax.
    """

    hidden: Tensor
    anchor: Tensor
    anchor_hidden: Tensor | None
    greedy: bool
    margins: bool
    choose: Callable[[Tensor, int], Drafts]
    noise: WalkNoise | None
    lead: Callable[[HeadOutputs, int], Candidates] | None


class Backbone(Protocol):
    """A drafter's layers with the output layer. Most functions take a residual stream [R, H]."""

    ops: TorchOps

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

    def best(self, rows: Tensor, count: int) -> Candidates:
        """Return the largest outputs of the output layer for normed rows, descending."""
        ...

    def outputs(self, raw: Tensor) -> HeadOutputs:
        """Outputs of the output layer, or this rank's columns of them -> the same, with their
        meaning."""
        ...

    def normed(self, x: Tensor) -> Tensor:
        """Return the rows that the output layer reads [R, H]."""
        ...

    def raw_logits(self, rows: Tensor) -> Tensor:
        """Return the output layer's outputs for normed rows [R, V']."""
        ...

    def raw_part(self, rows: Tensor) -> Tensor:
        """As `raw_logits`, this rank's columns."""
        ...

    def finish_logits(self, raw: Tensor) -> Tensor:
        """Outputs of the output layer [R, n] -> logits: scaled and capped."""
        ...

    def spread(self, logits: Tensor) -> Tensor:
        """Logits of the output layer's rows [R, V'] -> of all tokens [R, V]."""
        ...

    def tokens_of(self, rows: Tensor) -> Tensor:
        """Return the token ids of rows of the output layer."""
        ...

    @property
    def multiplier(self) -> float:
        """The factor of the output layer's outputs."""
        ...

    @property
    def logit_softcap(self) -> float | None:
        """The cap of the scaled outputs."""
        ...


class Head(nn.Module):
    """Turns the rows of blocks into drafts. logit_scale: factor of the output layer's outputs.
    reads_anchor: whether it needs the anchor's row, too, where that predicts nothing."""

    logit_scale = 1.0
    reads_anchor = False

    def make_layer(self, decoder: DecoderConfig, layer: int) -> DecoderLayer:
        """Make a layer of the drafter."""
        return DecoderLayer(decoder, layer)

    def forward(self, model: Backbone, block: BlockRows) -> Drafts:
        raise NotImplementedError
