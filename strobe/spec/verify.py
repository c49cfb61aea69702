"""The target's verdict on a proposal: pure functions of logits, drafts and sampling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from strobe.runner.batch import WantedRows
from strobe.runner.picking import PLAIN, Picking
from strobe.sampling.logprobs import score
from strobe.sampling.sampler import sample
from strobe.step import Proposal, Verdict


def verify(
    logits: Tensor, proposal: Proposal, wanted: WantedRows, picking: Picking = PLAIN
) -> Verdict:
    """logits [R, V] of a batch's wanted rows -> what its S spans keep of the proposal."""
    picks = sample(logits, picking.draws, picking.edits)
    verdict = match_prefix(wanted.by_span(picks), proposal)
    if picking.scored is None:
        return verdict
    rows, top = picking.scored
    return verdict._replace(scores=score(logits[rows], picks[rows], top))


def match_prefix(picks: Tensor, proposal: Proposal) -> Verdict:
    """Keep drafts while they equal the target's own pick at their row, then one pick more.

    picks [S, K + 1]: the target's token at every row, drawn with the request's own noise. For a
    one-hot draft this is exact rejection sampling: a draft d is kept with the target's probability
    of d, and otherwise the token follows the target's distribution given that it is not d
    (Leviathan et al., arXiv 2211.17192, with q one-hot). Temperature 0 is the special case.
    """
    drafts = proposal.tokens
    if not drafts.shape[1]:
        return Verdict(picks, picks.new_zeros(picks.shape[0]))
    matched = drafts == picks[:, :-1]
    if proposal.lengths is not None:
        rank = torch.arange(drafts.shape[1], device=drafts.device)
        matched = matched & (rank < proposal.lengths[:, None])
    return Verdict(picks, leading(matched))


def leading(matched: Tensor) -> Tensor:
    """matched [S, K] bool -> [S] int64, how many of each row are true before the first that is not.
    On a CPU through NumPy, whose small operations cost a third of torch's."""
    if matched.device.type == "cpu":
        return torch.from_numpy(np.logical_and.accumulate(matched.numpy(), 1).sum(1))
    return matched.cumprod(-1).sum(-1)
