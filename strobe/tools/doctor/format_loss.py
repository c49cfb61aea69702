"""What rounding the weights of target or drafter costs in acceptance."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.tools.bench.rates import release
from strobe.tools.doctor.findings import Report
from strobe.tools.doctor.measure import MarginFit, make_engine, measure_acceptance

ROUNDING = ("fp8", "int8", "int4")
"""Values of weight_dtype that round weights."""
NOTABLE = 0.02
"""Share of the tokens per step above which a loss is noted."""


def other_ways(config: EngineConfig) -> dict[str, EngineConfig]:
    """Return the settings without the rounding of the target, of the drafter and of both, as far
    as the settings round them, by what they change."""
    target = config.weight_dtype
    draft = config.draft_weight_dtype or target
    ways: dict[str, EngineConfig] = {}
    if target in ROUNDING:
        kept = config.with_(weight_dtype="auto", draft_weight_dtype=draft)
        ways[f"target not in {target}"] = kept
    if draft in ROUNDING:
        ways[f"drafter not in {draft}"] = config.with_(draft_weight_dtype="auto")
    if len(ways) == 2:
        ways["neither rounded"] = config.with_(weight_dtype="auto", draft_weight_dtype=None)
    return ways


def measure_loss(
    report: Report,
    config: EngineConfig,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    say: Callable[[str], None],
) -> None:
    """Measure tokens per step with the weights as the settings round them, and without, one engine
    after the other; report the differences. Nothing is measured if nothing is rounded."""
    ways = other_ways(config)
    if not ways:
        return
    rows = list[dict[str, Any]]()
    for name, way in {"as set": config, **ways}.items():
        say(f"measuring weights, {name}")
        per_step = _tokens_per_step(way, prompts, max_tokens)
        rows.append({"what": name, "tokens_per_step": round(per_step, 4)})
    base = rows[0]["tokens_per_step"]
    for row in rows[1:]:
        row["lost"] = round(1 - base / row["tokens_per_step"], 4)
    report.formats += rows
    for row in rows[1:3]:
        _judge(report, row, base)


def _tokens_per_step(
    config: EngineConfig, prompts: Sequence[Sequence[int]], max_tokens: int
) -> float:
    """Return the tokens per step of an engine that lives only for this call."""
    resolved = resolve(config)
    assert resolved.draft is not None
    engine = make_engine(resolved, resolved.draft, None, MarginFit(resolved.draft.block_drafts))
    per_step = measure_acceptance(engine, prompts, max_tokens).per_step
    del engine
    gc.collect()
    release(resolved.device)
    return per_step


def _judge(report: Report, row: dict[str, Any], base: float) -> None:
    model, _, name = row["what"].partition(" not in ")
    option = "weight_dtype" if model == "target" else "draft_weight_dtype"
    text = (
        f"With the {model} in {name} a step yields {base:.2f} tokens, and "
        f"{row['tokens_per_step']:.2f} with it unrounded"
    )
    if row["lost"] > NOTABLE:
        report.note("rounding", f"{text}: {row['lost']:.0%} are lost; {option} auto keeps them.")
    else:
        report.ok("rounding", f"{text}.")
