"""The bytes that an engine for a checkpoint would take on this machine, before its weights are
there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import plan_engine
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.quantization.sizes import weight_bytes
from strobe.models.target import Target


def memory_facts(
    target: TargetConfig,
    module: Target,
    draft: DraftConfig | None = None,
    drafter: DFlash | None = None,
) -> dict[str, Any]:
    """Return the parts of an engine with default settings in bytes, and the tokens that its KV
    cache holds; or the sentence that refuses it. module, drafter: on the meta device."""
    try:
        plan = plan_engine(EngineConfig(), target, draft)
        backends = plan.backends
        weights = {"target": weight_bytes(module, plan.dtype, **backends.weights._asdict())}
        if drafter is not None:
            held = backends.draft_weights._asdict()
            weights["draft"] = weight_bytes(drafter, plan.dtype, **held)
        num_pages = plan.num_pages(sum(weights.values()))
    except ValueError as error:
        return {"refused": str(error)}
    bill = replace(plan, weights=weights).memory_bill(num_pages)
    return {
        "device": str(plan.device),
        **bill,
        "together": sum(bill.values()),
        "tokens in the KV cache": (num_pages[0] - 1) * plan.limits.page_size,
    }
