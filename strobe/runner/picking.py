"""How each wanted row picks its token: rules on logits, noise and filters, all per request."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from strobe.runner.batch import Batch
from strobe.runner.edits import LogitState
from strobe.runner.upload import upload
from strobe.sampling.grammar import Grammars
from strobe.sampling.noise import PICKS, STREAMS, TESTS, stream_key, uniforms
from strobe.sampling.rules import LogitEdits, RowValues
from strobe.sampling.sampler import SamplingRows
from strobe.step import Plan, Proposal, Verdict


class Drawn(NamedTuple):
    """The draft behind each of R rows: tokens [R], drawn by probs [R, V], which are 0 where none
    was; share [R] in [0, 1): what decides whether it is kept."""

    tokens: Tensor
    probs: Tensor
    share: Tensor


class Picking(NamedTuple):
    """For R wanted rows: draws, None where all are greedy; edits, None where no rule applies;
    scored: the rows [A] whose log probabilities are asked for, and how many of the best to name;
    drawn: the drafts, where some were drawn."""

    draws: SamplingRows | None = None
    edits: LogitEdits | None = None
    scored: tuple[Tensor, int] | None = None
    drawn: Drawn | None = None


PLAIN = Picking()


class How(NamedTuple):
    """What the host knows of how a plan's rows pick: drawn: some are not greedy; filtered: some use
    top-k, top-p or min-p; mixed: some are greedy; by_host: rules, grammars or log probabilities
    are asked for, which the host has a hand in."""

    drawn: bool = False
    filtered: bool = False
    mixed: bool = False
    by_host: bool = False


GREEDY = How()
HEAT = ("temperature", "top_p", "min_p")


class PickingState:
    """Per slot: the noise's key of each stream [3, N + 1]; top_k [N + 1]; temperature, top_p and
    min_p [3, N + 1]."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        grammars: Grammars,
        *,
        kernels: bool = False,
    ):
        self.device, self.grammars, self.kernels = device, grammars, kernels
        num_slots += 1  # the spare one of DecodeState, greedy and without rules
        self.key = torch.zeros(len(STREAMS), num_slots, dtype=torch.int64, device=device)
        self.top_k = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.heat = torch.zeros(3, num_slots, dtype=torch.float32, device=device)
        self.logits = LogitState(num_slots, vocab_size, device)

    def apply(self, plan: Plan) -> None:
        """Take over the plan's admissions."""
        if not plan.admitted:
            return
        found = [(slot, request, request.sampling) for slot, request, _ in plan.admitted]
        whole = [
            (i, max(s.top_k, 0), *[stream_key(r.seed, r.sibling, stream) for stream in STREAMS])
            for i, r, s in found
        ]
        slots, top_k, *keys = upload(whole, self.device).unbind(1)
        heat = [[getattr(s, name) for _, _, s in found] for name in HEAT]
        self.key.index_copy_(1, slots, torch.stack(keys))
        self.top_k.index_copy_(0, slots, top_k)
        self.heat.index_copy_(1, slots, upload(heat, self.device, torch.float32))
        for slot, request, _ in found:
            if request.edited:
                self.logits.admit(slot, request)

    def mend(self, plan: Plan, proposal: Proposal) -> Proposal:
        """The proposal with drafts that no grammar allows replaced by what the grammar forces."""
        tokens = proposal.tokens
        for i, span in enumerate(plan.spans):
            if span.drafts and span.request.structured is not None:
                drafts: list[int] = proposal.tokens[i, : span.drafts].tolist()
                mended = self.grammars.mend(span.request, drafts)
                if mended != drafts:
                    tokens = tokens.clone() if tokens is proposal.tokens else tokens
                    tokens[i, : span.drafts] = torch.tensor(mended, device=self.device)
        if tokens is proposal.tokens:
            return proposal
        return proposal._replace(tokens=tokens, drawn=proposal.tokens)

    def how(self, plan: Plan) -> How:
        """How the plan's wanted rows pick, as far as the host must know."""
        requests = [span.request for span in plan.spans]
        if not any(r.special for r in requests):
            return GREEDY
        params = [request.sampling for request in requests]
        drawn = not all(p.temperature == 0 for p in params)
        return How(
            drawn=drawn,
            # The kernel draws any mixture in one way: one record of a step serves them all.
            filtered=drawn and (self.kernels or any(p.filters for p in params)),
            mixed=drawn and (self.kernels or any(p.temperature == 0 for p in params)),
            by_host=any(r.edited or r.sampling.logprobs is not None for r in requests),
        )

    def of(self, batch: Batch, how: How, plan: Plan) -> Picking:
        """How the batch's wanted rows pick; the plan is only read where the host has a hand in."""
        if how == GREEDY:
            return PLAIN
        position = batch.wanted.of(batch.places.positions) + 1
        draws = self.draws(batch, how, position) if how.drawn else None
        drawn = None
        if draws is not None and batch.proposal.probs is not None:
            drawn = self._drawn(batch, draws, batch.proposal.probs)
        if not how.by_host:
            return Picking(draws, drawn=drawn)
        edits = self.logits.edits(plan, batch, position)
        if edits is not None:
            edits = edits._replace(grammar=self._grammar(plan, batch))
        return Picking(draws, edits, self._scored(plan, batch), drawn)

    def advance(self, plan: Plan, batch: Batch, verdict: Verdict) -> None:
        """Take in what the verdict kept."""
        self.logits.advance(plan, batch, verdict)

    def draws(self, batch: Batch, how: How, position: Tensor, stream: int = PICKS) -> SamplingRows:
        """How the batch's R wanted rows are drawn, whose tokens go to `position` [R]."""
        slots = batch.wanted.slots
        temperature, top_p, min_p = self.heat.index_select(1, slots).unbind()
        return SamplingRows(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            top_k=self.top_k[slots],
            key=self.key[stream].index_select(0, slots),
            position=position,
            filtered=how.filtered,
            mixed=how.mixed,
            kernel=self.kernels,
        )

    def _drawn(self, batch: Batch, draws: SamplingRows, probs: Tensor) -> Drawn:
        """The drafts behind the wanted rows; none behind a span's last row and behind greedy ones,
        which keep the drafts that they match."""
        layout, proposal = batch.layout, batch.proposal
        assert proposal.lengths is not None
        span = batch.wanted.of(layout.span_of_row)
        rank = batch.wanted.of(layout.offset) + 1 - layout.counts[:, 0].index_select(0, span)
        real = (rank < proposal.lengths.index_select(0, span)) & (draws.temperature > 0)
        rank = rank.clamp_max(probs.shape[1] - 1)
        tokens = proposal.tokens if proposal.drawn is None else proposal.drawn
        key = self.key[TESTS].index_select(0, batch.wanted.slots)
        share = uniforms(key, draws.position)
        return Drawn(tokens[span, rank], probs[span, rank] * real[:, None], share)

    def _scored(self, plan: Plan, batch: Batch) -> tuple[Tensor, int] | None:
        """The rows of requests that want log probabilities, and the most that any of them names."""
        tops = {i: span.request.sampling.logprobs for i, span in enumerate(plan.spans)}
        asked = {i: top for i, top in tops.items() if top is not None and batch.wanted.rows[i]}
        if not asked:
            return None
        return batch.wanted.places(list(asked))[0], max(asked.values())

    def _grammar(self, plan: Plan, batch: Batch) -> RowValues | None:
        """The masks of all rows that follow a grammar; the host reads their drafts for them."""
        found: list[np.ndarray] = []
        spans = [i for i, s in enumerate(plan.spans) if s.request.structured is not None and s.rows]
        for i in spans:
            span = plan.spans[i]
            drafts: list[int] = batch.proposal.tokens[i, : span.drafts].tolist()
            found.append(self.grammars.masks(span.request, drafts))
        if not found:
            return None
        values = torch.from_numpy(np.concatenate(found)).to(self.device)
        return RowValues(batch.wanted.places(spans)[0], values)
