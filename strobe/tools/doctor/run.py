"""`strobe doctor`: look at a pair, run it, try what it may have been meant to be, and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import ResolvedConfig, resolve
from strobe.hub.locate import locate_models
from strobe.models.load import check_draft_tensors, check_target_tensors
from strobe.models.target import Target
from strobe.text.tokenizer import Tokenizer
from strobe.tools.doctor.findings import Report
from strobe.tools.doctor.measure import (
    Acceptance,
    DraftOnly,
    Fitting,
    accepted,
    engine_of,
    gain,
    matched,
    variants,
)
from strobe.tools.doctor.pair_checks import (
    attempt,
    check_files,
    check_tokens,
    mask_candidates,
    memory_bill,
)
from strobe.tools.doctor.prompts import PROMPTS
from strobe.tools.doctor.report import progress, show
from strobe.tools.doctor.tokenizers import returning

TOKENS = 64
"""Of each answer, at most."""
SURE, WORTH = 4.0, 1.01
"""A variant is better where it keeps more drafts by so many standard errors, and so many times."""
WEAK = 1.5
"""Tokens per step below which speculation hardly pays."""
COME_BACK, ALMOST = 0.9, 0.98
"""The least share of an answer's tokens that reading and encoding it again must give back; below
the second it is what weak acceptance is laid to."""


def run_doctor(config: EngineConfig, *, as_json: bool = False) -> int:
    """Print the report of a pair; 1 where something is wrong with it. Raises ValueError where no
    pair is named."""
    config = locate_models(config)
    if config.draft is None:
        raise ValueError("strobe doctor looks at a pair, but no drafter is named; add one.")
    with progress(quiet=as_json) as say:
        report = examine(config, say)
    print(json.dumps(report.as_dict())) if as_json else show(report)
    return 1 if report.faults else 0


def examine(config: EngineConfig, say: Callable[[str], None] = lambda text: None) -> Report:
    """Everything there is to say of the pair in `config`."""
    target, draft = Path(config.target), Path(config.draft or "")
    report = Report(str(target), str(draft))
    say("reading configs, tensors and tokenizer")
    target_config, draft_config, tokenizer, fits = check_files(report, target, draft)
    if target_config is not None and draft_config is not None and tokenizer is not None:
        check_tokens(report, tokenizer, target_config, draft_config, draft)
    broken = any("tensors" in finding.about for finding in report.faults)
    if target_config is None or draft_config is None or tokenizer is None or not fits or broken:
        report.note("acceptance", "Not measured, since the pair cannot run as it is.")
        return report
    resolved = attempt(report, "settings", lambda: resolve(_sized(config)))
    if resolved is None:
        return report
    modules = check_target_tensors(target, target_config), check_draft_tensors(draft, draft_config)
    report.facts["memory"] = memory_bill(resolved, *modules)
    _measure(report, resolved, tokenizer, say)
    return report


def _sized(config: EngineConfig) -> EngineConfig:
    """Settings that a short run needs; graphs would be captured for each variant anew."""
    count = len(PROMPTS)
    small = replace(config, max_num_seqs=count, cuda_graphs=False, method="dflash", overlap=1)
    return small if config.max_model_len is not None else replace(small, max_model_len=1024)


def _measure(
    report: Report, resolved: ResolvedConfig, tokenizer: Tokenizer, say: Callable[[str], None]
) -> None:
    """Acceptance with thinking off and on, then of the variants, and what that points to."""
    draft = resolved.draft
    assert draft is not None
    say("loading")
    fitting = Fitting(draft.block_drafts)
    engine = engine_of(resolved, draft, None, fitting)
    module = engine.runner.model
    assert isinstance(module, Target)
    runs: dict[bool | None, Acceptance] = {}
    for thinking in _ways(tokenizer):
        say(f"measuring{_named(thinking)}")
        runs[thinking] = accepted(engine, _prompts(tokenizer, thinking), TOKENS)
        report.measured.append({"thinking": thinking, **_figures(runs[thinking])})
    report.margins = fitting.by_place()
    back = returning(tokenizer, next(iter(runs.values())).answers)
    del engine
    best = _try(report, resolved, module, tokenizer, _prompts(tokenizer, next(iter(runs))), say)
    _judge(report, runs, best, back)


def _try(
    report: Report,
    resolved: ResolvedConfig,
    module: Target,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Run every variant over the same answers, a block from each of their tokens; the best one,
    where it is better beyond doubt than the pair as it is."""
    draft = resolved.draft
    assert draft is not None
    say("measuring from every token")
    base = matched(engine_of(resolved, draft, module, DraftOnly()), prompts, TOKENS)
    masks = mask_candidates(tokenizer, resolved.target.decoder.vocab_size)
    report.variants.append({"kind": "as it is", "what": "as config.json has it", **_kept(base)})
    for kind, description, config in variants(draft, resolved.target, masks):
        say(f"trying {description}")
        run = attempt(
            report,
            kind,
            lambda c=config: matched(engine_of(resolved, c, module, DraftOnly()), prompts, TOKENS),
        )
        if run is not None:
            variant = {
                "kind": kind,
                "what": description,
                **_kept(run),
                "gain": round(gain(base, run), 2),
            }
            report.variants.append(variant)
    threshold = (1 + mean(base)) * WORTH
    better = [v for v in report.variants[1:] if v["gain"] >= SURE and v["tokens"] >= threshold]
    return max(better, key=lambda v: v["tokens"], default=None)


def _kept(run: list[int]) -> dict[str, float]:
    return {"tokens": round(1 + mean(run), 3)}


def _judge(
    report: Report, runs: dict[bool | None, Acceptance], best: dict[str, Any] | None, back: float
) -> None:
    """What the measurements say: another tokenizer, a variant that is better, a weak drafter,
    thinking that hurts. back: the share of tokens that come back."""
    first, base = next(iter(runs.values())).per_step, report.variants[0]["tokens"]
    if back < COME_BACK or (back < ALMOST and first < WEAK):
        report.fault(
            "tokenizer",
            f"A step brings {first:.2f} tokens, and only {back:.0%} of the answers' tokens come "
            "back when the text is encoded again: the tokenizer is hardly the one that the target "
            "was trained with; use the one that it was published with.",
        )
    elif best is not None:
        report.fault(
            str(best["kind"]),
            f"With {best['what']} a block brings {best['tokens']:.2f} tokens, as config.json has "
            f"it {base:.2f}; the drafter was most likely trained that way, so correct its "
            "config.json.",
        )
    elif first < WEAK:
        report.fault(
            "acceptance",
            f"A step brings {first:.2f} tokens, and nothing that was tried is better; use a "
            "drafter that was trained on answers of this very target.",
        )
    else:
        report.ok("acceptance", f"A step brings {first:.2f} tokens, and no variant is better.")
    if len(runs) == 2 and runs[True].per_step < 0.7 * runs[False].per_step:
        report.note(
            "thinking",
            f"With thinking a step brings {runs[True].per_step:.2f} tokens, without it "
            f"{runs[False].per_step:.2f}: the drafter was trained on answers without; switch "
            "thinking off where speed counts.",
        )


def _figures(acceptance: Acceptance) -> dict[str, Any]:
    rates = [round(rate, 4) for rate in acceptance.rates]
    return {
        "steps": acceptance.steps,
        "tokens_per_step": round(acceptance.per_step, 4),
        "rate_per_position": rates,
    }


def _ways(tokenizer: Tokenizer) -> list[bool | None]:
    """Thinking off and on where the chat template knows it; None where it does not."""
    return [False, True] if "enable_thinking" in (tokenizer.hf.chat_template or "") else [None]


def _named(thinking: bool | None) -> str:
    return "" if thinking is None else f", thinking {'on' if thinking else 'off'}"


def _prompts(tokenizer: Tokenizer, thinking: bool | None) -> list[list[int]]:
    """The prompts as token ids, through the chat template where there is one."""
    if not tokenizer.hf.chat_template:
        return [tokenizer.encode(prompt) for prompt in PROMPTS]
    options = {} if thinking is None else {"enable_thinking": thinking}
    return [
        tokenizer.render_chat([{"role": "user", "content": prompt}], **options)
        for prompt in PROMPTS
    ]
