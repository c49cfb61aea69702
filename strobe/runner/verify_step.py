"""Verifies a step's drafts on the device: the target's forward, its tokens, which drafts are
accepted, and the target's features for the drafters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from torch import Tensor

from strobe.attention.backend import Batch
from strobe.runner.decode_state import DecodeState
from strobe.runner.graphs import Eager, Graphs
from strobe.runner.layout import Layout
from strobe.runner.model_runner import ForwardOutputs, ModelRunner
from strobe.runner.step_ops.torch_step_ops import SimulatedAcceptance
from strobe.sampling.logprobs import Scores
from strobe.sampling.sampling_state import Sampled, SamplingMode, SamplingState
from strobe.step import Span

ComputeMasks: TypeAlias = Callable[[], tuple[Tensor, dict[int, str]]]
"""Computes grammar masks [S * W, words], and by span the reason that its grammar cannot be followed
further."""


class ContextRows(NamedTuple):
    """The inputs of drafters' context K/V, for all rows: the target's captured features
    [T, n * H], positions [T] and K/V slots [T] in each page group."""

    features: Tensor
    positions: Tensor
    kv_slots: Sequence[Tensor]


class Verified(NamedTuple):
    """sampled: tokens and scores of the rows with logits. num_accepted [S]: accepted drafts, so
    that one token more counts. prompt_scores: of prompt tokens, in the spans' order. context: if
    no observer has read it."""

    sampled: Sampled
    num_accepted: Tensor
    prompt_scores: Scores | None
    context: ContextRows | None = None


class FeatureObserver(Protocol):
    """Drafters that read the target's features."""

    def observe(self, batch: Batch, hidden: Tensor | None) -> None:
        """Receive the captured features [T, n * H] of all rows after a target forward."""
        ...


class VerifyStep:
    """The device's part of a step after drafting, captured in graphs where the runner has buckets.

    Without grammars it is one function. With grammars it is two, so that the host computes their
    masks while the target runs:

        without grammars   [ forward | sample, accept, observe ]
        with grammars      [ forward ] masks [ sample, accept, observe ]
    """

    def __init__(
        self,
        runner: ModelRunner,
        state: DecodeState,
        sampling: SamplingState,
        graphs: Graphs | Eager,
        *,
        observer: FeatureObserver | None,
        simulated_acceptance: SimulatedAcceptance | None = None,
    ):
        """observer: gets all rows and the target's features, for the drafters; None: they are
        returned.
        simulated_acceptance: the number of drafts to accept, regardless of the target."""
        self.runner = runner
        self.state = state
        self.sampling = sampling
        self.graphs = graphs
        self.observer = observer
        self.simulated_acceptance = simulated_acceptance

    def run(
        self,
        spans: Sequence[Span],
        layout: Layout,
        mode: SamplingMode,
        drafts: Tensor | None,
        compute_masks: ComputeMasks | None = None,
    ) -> tuple[Verified, dict[int, str]]:
        """Run the target over the spans' layout and verify the drafts [S, K]. compute_masks: of
        grammars; called while the target runs. Returns also the grammars' errors."""
        bounds = self.runner.bounds(spans)
        if compute_masks is not None:
            return self._run_with_grammar(
                layout, mode=mode, bounds=bounds, drafts=drafts, compute_masks=compute_masks
            )
        body = functools.partial(self._forward_and_verify, layout=layout, mode=mode, bounds=bounds)
        verified = self._graphs_of(layout).run((mode, layout.shape), body, layout.packed, drafts)
        return verified, {}

    def _run_with_grammar(
        self,
        layout: Layout,
        mode: SamplingMode,
        bounds: Sequence[int],
        drafts: Tensor | None,
        compute_masks: ComputeMasks,
    ) -> tuple[Verified, dict[int, str]]:
        graphs = self._graphs_of(layout)
        forward = functools.partial(self._forward_and_copy, layout=layout, bounds=bounds)
        outputs = graphs.run(("forward", layout.shape), forward, layout.packed, drafts)
        masks, errors = compute_masks()
        verify = functools.partial(self._verify, layout=layout, mode=mode, outputs=outputs)
        return graphs.run((mode, layout.shape), verify, layout.packed, masks), errors

    def _graphs_of(self, layout: Layout) -> Graphs | Eager:
        return self.graphs if self.runner.is_captured(layout) else Eager()

    def _forward(
        self, packed: Tensor, drafts: Tensor | None, layout: Layout, bounds: Sequence[int]
    ) -> ForwardOutputs:
        layout = layout.with_packed(packed)
        placed = self.state.place(layout, drafts)
        residual, features = self.runner.forward(self.state.make_batch(layout, placed, bounds))
        return ForwardOutputs(placed, residual, features)

    def _forward_and_copy(
        self, packed: Tensor, drafts: Tensor | None, *, layout: Layout, bounds: Sequence[int]
    ) -> ForwardOutputs:
        return self.runner.copy_out(self._forward(packed, drafts, layout, bounds))

    def _forward_and_verify(
        self,
        packed: Tensor,
        drafts: Tensor | None,
        *,
        layout: Layout,
        mode: SamplingMode,
        bounds: Sequence[int],
    ) -> Verified:
        outputs = self._forward(packed, drafts, layout, bounds)
        return self._verify(packed, None, layout=layout, mode=mode, outputs=outputs)

    def _verify(
        self,
        packed: Tensor,
        masks: Tensor | None,
        *,
        layout: Layout,
        mode: SamplingMode,
        outputs: ForwardOutputs,
    ) -> Verified:
        layout = layout.with_packed(packed)
        batch = self.state.make_batch(layout, outputs.placed)
        sampled = self.runner.sample(outputs.residual, layout, batch, mode, masks)
        tokens = sampled.tokens.view(-1, layout.shape.max_logits)
        # Lengths and newest tokens advance by the accepted drafts.
        num_accepted = self.state.accept(layout, batch, tokens, self.simulated_acceptance)
        if mode.processed:
            self.sampling.count_tokens(layout.slots, tokens, num_accepted, layout.active)
        prompt_scores = self.runner.score_prompt(outputs.residual, layout)
        context = None
        if self.observer is not None:
            self.observer.observe(batch, outputs.features)  # the drafters' K/V, on the same pages
        elif outputs.features is not None:
            context = ContextRows(outputs.features, batch.positions, batch.kv_slots)
        return Verified(
            sampled=sampled,
            num_accepted=num_accepted,
            prompt_scores=prompt_scores,
            context=context,
        )
