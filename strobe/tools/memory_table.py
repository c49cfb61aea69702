"""The memory that an engine for a checkpoint would take on this machine, before its weights are
there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import plan_engine, weight_sizes
from strobe.models.model_config import DraftConfig, TargetConfig


def memory_facts(
    config: EngineConfig, target: TargetConfig, draft: DraftConfig | None = None
) -> dict[str, Any]:
    """Return the memory bill of an engine with these settings, of its first rank if there are
    several, or the sentence that refuses it. config: with the paths of target and draft."""
    try:
        plan = plan_engine(config, target, draft)
        plan = replace(plan, weights=weight_sizes(plan))
        num_pages = plan.num_pages(sum(plan.weights.values()))
    except ValueError as error:
        return {"refused": str(error)}
    return plan.memory_bill(num_pages).facts()
