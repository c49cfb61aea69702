"""The target's verdict on a proposal: pure functions of logits, drafts and sampling."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from strobe.runner.batch import Batch
from strobe.runner.picking import PLAIN, Drawn, Picking
from strobe.runner.runner import Output
from strobe.runner.state import DecodeState
from strobe.sampling.logprobs import score
from strobe.sampling.rules import apply_rules
from strobe.sampling.sampler import draw, probabilities, sample
from strobe.step import Proposal, Verdict


def verify(
    out: Output, batch: Batch, picking: Picking = PLAIN, simulated: float | None = None
) -> Verdict:
    """What the batch's S spans keep of their drafts, by what the target gave at the wanted rows.

    simulated: instead, so many tokens per step on average, for measurements of speed.
    """
    picks = pick(out, picking)
    verdict = match_prefix(batch.wanted.by_span(picks), batch.proposal)
    if simulated is not None and batch.proposal.lengths is not None:
        accepted = simulate(simulated, batch.places.start[:, 0], batch.proposal.lengths)
        verdict = verdict._replace(accepted=accepted)
    if picking.scored is None:
        return verdict
    assert out.logits is not None
    rows, top = picking.scored
    return verdict._replace(scores=score(out.logits[rows], picks[rows], top))


def settle(
    out: Output, batch: Batch, picking: Picking, state: DecodeState, simulated: float | None = None
) -> Verdict:
    """verify, and have lengths and tails move on; on a GPU in one kernel."""
    if not (state.kernels and batch.layout.padded):
        verdict = verify(out, batch, picking, simulated)
        state.advance(batch, verdict)
        return verdict
    from strobe.kernels.steps import accept

    layout, proposal, start = batch.layout, batch.proposal, batch.places.start
    picks = batch.wanted.by_span(pick(out, picking))
    lengths = layout.drafts if proposal.lengths is None else proposal.lengths
    rest = start, layout.counts, layout.slots, state.cursor, simulated
    return Verdict(picks, accept(picks, proposal.tokens, lengths, *rest))


def pick(out: Output, picking: Picking) -> Tensor:
    """The target's own tokens [R] at the wanted rows."""
    if out.picks is not None:
        return out.picks
    assert out.logits is not None
    if picking.drawn is None or picking.draws is None:
        return sample(out.logits, picking.draws, picking.edits)
    logits = apply_rules(out.logits, picking.edits)
    kept, rest = ratio_test(probabilities(logits, picking.draws), picking.drawn)
    return torch.where(kept, picking.drawn.tokens, draw(rest, logits, picking.draws))


def ratio_test(probs: Tensor, drawn: Drawn) -> tuple[Tensor, Tensor]:
    """The target's probs p [R, V] -> which drafts are kept [R], and what the others' rows draw a
    token by, [R, V].

    A draft d of probs q is kept with probability min(1, p(d) / q(d)); otherwise a token is drawn by
    max(p - q, 0), so that the token follows p either way (Leviathan et al., arXiv 2211.17192; Chen
    et al., arXiv 2302.01318). As a draft is the token of its row just where it is kept, drafts are
    compared with rows' tokens as those that were not drawn are. Where nothing of p - q is left, or
    nothing was drawn, q being 0, a token is drawn by p.
    """
    p, q = (x.gather(1, drawn.tokens[:, None])[:, 0] for x in (probs, drawn.probs))
    rest = (probs - drawn.probs).clamp_min_(0.0)
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)
    return (drawn.share * q < p) & (q > 0), rest


def match_prefix(picks: Tensor, proposal: Proposal) -> Verdict:
    """Keep drafts while they equal the target's own pick at their row, then one pick more.

    picks [S, K + 1]: the target's token at every row, drawn with the request's own noise. For a
    one-hot draft this is exact rejection sampling: a draft d is kept with the target's probability
    of d, and otherwise the token follows the target's distribution given that it is not d
    (Leviathan et al., arXiv 2211.17192, with q one-hot). Temperature 0 is the special case.
    """
    drafts, lengths = proposal.tokens, proposal.lengths
    if not drafts.shape[1]:
        return Verdict(picks, picks.new_zeros(picks.shape[0]))
    accepted = leading(drafts == picks[:, :-1])
    return Verdict(picks, accepted if lengths is None else torch.minimum(accepted, lengths))


def simulate(rate: float, start: Tensor, lengths: Tensor) -> Tensor:
    """start, lengths [S] -> [S] int64, drafts to keep so that steps bring `rate` tokens on average:
    one more or less by a sequence of low discrepancy over positions."""
    whole = int(rate - 1)
    more = (start * 0.6180339887498949).frac() < rate - 1 - whole
    return torch.minimum(more + whole, lengths)


def leading(matched: Tensor) -> Tensor:
    """matched [S, K] bool -> [S] int64, how many of each row are true before the first that is not.
    On a CPU through NumPy, whose small operations cost a third of torch's."""
    if matched.device.type == "cpu":
        return torch.from_numpy(np.logical_and.accumulate(matched.numpy(), 1).sum(1))
    return matched.cumprod(-1).sum(-1)
