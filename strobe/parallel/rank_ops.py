"""The operations of layers on one of several ranks.

Legend: R and T rows, H hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.dflash_drafter import DFlash
from strobe.models.families.experts import SparseMLP
from strobe.models.linear import AnyLinear, Linear
from strobe.models.model_config import TargetConfig
from strobe.models.modules import RMSNorm
from strobe.models.ops.torch_ops import Activation, ExpertsLayer, ForwardRows, Residual, TorchOps
from strobe.models.target import Target
from strobe.parallel.group import Group
from strobe.sampling.sampler import MAX_MARGIN, NO_TOKEN


def partial_linears(model: nn.Module, group: Group) -> frozenset[AnyLinear]:
    """Return the layers of whose outputs each rank computes a part of the sum, as modules and as
    the experts that ops are called with. Only the first rank keeps biases of layers whose inputs
    are split."""
    linears = [m for m in model.modules() if isinstance(m, Linear) and m.split is not None]
    for linear in linears:
        if linear.split == "inputs" and linear.bias is not None and group.rank:
            linear.bias.zero_()
    experts = [m.layer.down for m in model.modules() if isinstance(m, SparseMLP)]
    return frozenset[AnyLinear]([*linears, *experts])


class RankOps(TorchOps):
    """Operations of one model that add up or join the ranks' results. The second base of a subclass
    computes a rank's part.

    partial: layers of whose outputs the ranks compute parts of the sums. vocab_rows, head_rows:
    rows of all parts of the embedding and of the head.
    """

    group: Group
    partial: frozenset[AnyLinear]
    vocab_rows: int
    head_rows: int

    @property
    def first_row(self) -> int:
        """The first id of the rank's part of the embedding."""
        return self.group.rank * -(-self.vocab_rows // self.group.size)

    @property
    def first_id(self) -> int:
        """The first id of the rank's part of the head."""
        return self.group.rank * -(-self.head_rows // self.group.size)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        places = ids - self.first_row
        own = (places >= 0) & (places < weight.shape[0])
        x = super().embed(places.clamp(0, weight.shape[0] - 1), weight)
        return self.group.sum(x.masked_fill_(~own[:, None], 0))

    def linear(self, x: Tensor, linear: AnyLinear, activation: Activation | None = None) -> Tensor:
        return self.summed(super().linear(x, linear, activation), linear)

    def summed(self, y: Tensor, linear: AnyLinear) -> Tensor:
        """Return the sum of the ranks' y of a split layer; of another, y."""
        return self.group.sum(y) if linear in self.partial else y

    def add_linear(
        self, x: Residual, y: Tensor, linear: AnyLinear, next_norm: RMSNorm | None = None
    ) -> None:
        if linear in self.partial:
            x.value = x.value + self.linear(y, linear)
        else:
            super().add_linear(x, y, linear, next_norm)

    def experts(
        self, x: Tensor, logits: Tensor, layer: ExpertsLayer, onto: Tensor | None, rows: ForwardRows
    ) -> Tensor:
        if layer.down not in self.partial:
            return super().experts(x, logits, layer, onto=onto, rows=rows)
        y = self.group.sum(super().experts(x, logits, layer, onto=None, rows=rows))
        return y if onto is None else onto + y

    def logits(self, rows: Tensor, head: AnyLinear) -> Tensor:
        logits = super().logits(rows, head)
        missing = -(-self.head_rows // self.group.size) - logits.shape[1]
        return F.pad(logits, (0, missing)) if missing else logits

    def whole(self, logits: Tensor) -> Tensor:
        if logits.shape[1] >= self.head_rows:
            return logits
        return self.group.join(logits)[:, : self.head_rows]

    def argmax(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> Tensor:
        return self.best_two(x, norm, head)[0]

    def best_two(self, x: Tensor, norm: RMSNorm, head: AnyLinear) -> tuple[Tensor, Tensor]:
        return self.best_two_of(self.head(x, norm, head))

    def best_two_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Each rank sends its largest logit, the id and the margin over its second largest."""
        if logits.shape[1] >= self.head_rows:
            return super().best_two_of(logits)
        logits = logits[:, : self.head_rows - self.first_id]  # without the last part's padding
        ids, margins = super().best_two_of(logits)
        ids = ids.clamp(min=0) + self.first_id
        values = logits.float().amax(1)
        sent = torch.stack([values, ids.float(), margins], 1)  # ids below 2^24 are exact
        values, ids, margins = self.group.join(sent).unflatten(1, (-1, 3)).unbind(2)
        first = values.argmax(1, keepdim=True)  # of equal ones the lowest id's
        best = values.gather(1, first)
        second = values.scatter(1, first, float("-inf")).amax(1, keepdim=True)
        margins = torch.minimum(margins.gather(1, first), best - second)
        ids = ids.gather(1, first).long().masked_fill_(best.isnan(), NO_TOKEN)
        return ids[:, 0], margins[:, 0].nan_to_num_(0.0).clamp_(0.0, MAX_MARGIN)

    def best_of(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Each rank sends its largest logits and their ids."""
        if logits.shape[1] >= self.head_rows:
            return super().best_of(logits, count)
        logits = logits[:, : self.head_rows - self.first_id]  # without the last part's padding
        values, ids = super().best_of(logits, min(count, logits.shape[1]))
        missing = (0, count - values.shape[1])
        values = F.pad(values, missing, value=float("-inf"))
        ids = F.pad((ids + self.first_id).float(), missing)  # ids below 2^24 are exact
        joined = self.group.join(torch.cat([values, ids], 1)).unflatten(1, (-1, 2, count))
        values, ids = joined.transpose(1, 2).flatten(2).unbind(1)
        values, places = super().best_of(values, count)  # of equal ones the lowest ids come first
        return values, ids.gather(1, places).long()


def make_rank_ops(
    kind: type[RankOps], ops: TorchOps, model: Target | DFlash, group: Group, *, layers_split: bool
) -> RankOps:
    """Make the operations that compute a rank's part of a model as `ops` do. layers_split: whether
    its layers are split, not only embedding and head."""
    config = model.config
    rank_ops = object.__new__(kind)
    rank_ops.__dict__ |= ops.__dict__
    rank_ops.group = group
    rank_ops.partial = partial_linears(model, group) if layers_split else frozenset()
    rank_ops.vocab_rows = config.decoder.vocab_size
    rank_ops.head_rows = rank_ops.vocab_rows
    if not isinstance(config, TargetConfig):
        rank_ops.head_rows = config.head_rows
    return rank_ops
