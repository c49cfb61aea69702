"""The walk over candidates of drafts, which several heads share."""

from __future__ import annotations

import torch
from torch import Tensor

from strobe.models.heads.head import Backbone, BlockRows, Drafts
from strobe.models.ops.torch_ops import TorchOps
from strobe.sampling.candidates import Candidates
from strobe.sampling.sampler import MAX_MARGIN

MAX_CANDIDATES = 32
"""Candidates of one draft: a warp holds one in each lane."""


def candidates(model: Backbone, block: BlockRows, rows: Tensor, count: int) -> Candidates:
    """Return the candidates [S * D, C] of normed rows [S * D, H]: the most probable tokens, or if
    drafts are sampled, the leaders of the race."""
    if block.lead is None:
        return model.best(rows, count)
    return block.lead(model.outputs(model.raw_part(rows)), count)


def walk(ops: TorchOps, edges: Tensor, ids: Tensor, block: BlockRows) -> Drafts:
    """Choose draft after draft among candidates ids [S, D, C] by edges [S, D, C, C], their scores
    after each candidate of the draft before."""
    if not block.margins:
        return Drafts(ops.walk(edges, ids, None, block.noise))
    margins = torch.empty(ids.shape[:2], dtype=torch.float32, device=ids.device)
    tokens = ops.walk(edges, ids, margins, block.noise)
    return Drafts(tokens, margins.nan_to_num_(0.0).clamp_(0.0, MAX_MARGIN))
