"""Shadow mode: answers come from plain decoding, while drafters are scored on the same steps.

    Scheduler.plan     ShadowLedger: answers to score, and where each drafter drafts
    Engine.launch      propose before the target runs, observe after it
    Scheduler.commit   ShadowLedger.resolve: compare drafts with the answer's tokens

A failure here ends the scoring and no answer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from strobe.engine.build import Components, ResolvedConfig
from strobe.hub.locate import LOOKUP
from strobe.models.heads.head import Drafts
from strobe.runner.verify_step import Verified
from strobe.speculation.proposer import Proposer
from strobe.speculation.shadow.drafting import ShadowDrafting
from strobe.speculation.shadow.ledger import DraftRows, ScoredDrafter, ShadowLedger
from strobe.speculation.shadow.speed_up import ShadowCosts
from strobe.step import Plan, StepResult

logger = logging.getLogger(__name__)

LOOKUP_DRAFTS = 8
"""Drafts per step of prompt lookup, as without a drafter."""


class ShadowMode:
    """The drafters of shadow mode in one engine."""

    def __init__(self, resolved: ResolvedConfig, components: Components):
        self.resolved = resolved
        self.proposers = components.proposers
        self.grammars = components.grammars
        self.drafting = ShadowDrafting(components.proposers, resolved.device)
        lookup = components.proposers[LOOKUP]
        assert not isinstance(lookup, Proposer)
        config = resolved.config
        self.num_drafts = {shadow.name: shadow.num_drafts for shadow in resolved.shadows}
        drafters = [ScoredDrafter(name, count) for name, count in self.num_drafts.items()]
        lookup_drafts = config.num_drafts or min(LOOKUP_DRAFTS, resolved.limits.num_drafts)
        drafters.append(ScoredDrafter(LOOKUP, lookup_drafts, lookup))
        self.ledger = ShadowLedger(
            drafters,
            share=config.shadow_share,
            max_model_len=resolved.limits.max_model_len,
            walk=self._walk,
        )
        self.drafters = tuple(drafters)
        self.costs: ShadowCosts | None = None
        """Costs of the engine's steps, if they were measured."""

    def start(self) -> None:
        """Draw answers from now on."""
        self.ledger.is_on = self.ledger.fault is None

    def propose(self, plan: Plan) -> None:
        """Let each drafter draft where the plan says."""
        if plan.shadow is None or not plan.shadow.proposals:
            return
        try:
            with self.drafting.stopwatch.running():
                drafts = self.drafting.propose(plan.spans, plan.shadow, self.num_drafts)
                proposed: dict[str, DraftRows] = {}
                for name, _ in plan.shadow.proposals:
                    tokens = Drafts(drafts[name].tokens).download().tokens
                    assert tokens is not None
                    proposed[name] = tokens
            self.ledger.receive(plan, proposed)
        except Exception as error:
            self._stop(error)

    def observe(self, plan: Plan, verified: Verified) -> None:
        """Let the drafters read the target's features of the answers that are scored."""
        try:
            self.drafting.observe(plan, verified.context)
        except Exception as error:
            self._stop(error)

    def read(self) -> None:
        """Read what was drafted in a step that is done."""
        try:
            self.ledger.read()
        except Exception as error:
            self._stop(error)

    def observe_step(self, result: StepResult) -> None:
        """Count the seconds of a step that is done."""
        spent = self.drafting.stopwatch.take()
        self.ledger.observe_step(result.seconds or 0.0, result.rows, spent)

    def _walk(self, slot: int, drafts: Sequence[int]) -> Sequence[int]:
        """Return drafts with the tokens that a slot's grammar forces, as verification has them."""
        return self.grammars.walk([slot], [drafts]).drafts[0]

    def _stop(self, error: Exception) -> None:
        logger.exception("Shadow mode has failed; answers go on without it.")
        self.ledger.stop(f"{type(error).__name__}: {error}")
