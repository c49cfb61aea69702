"""`strobe doctor`: check a pair, run it, try variants of the drafter's config, and report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.backend_choice import WeightFormat
from strobe.engine.build import (
    ResolvedConfig,
    check_before_download,
    plan_models,
    resolve,
)
from strobe.hub.download import missing_weights
from strobe.hub.files import GGUF_LINK
from strobe.hub.locate import locate_models
from strobe.models.checkpoint import Checkpoint
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.target import Target
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.text.tokenizer import Tokenizer
from strobe.tools.bench.bench_prompts import read_conversations
from strobe.tools.doctor.doctor_prompts import PROMPTS
from strobe.tools.doctor.doctor_report import show
from strobe.tools.doctor.findings import Report
from strobe.tools.doctor.format_loss import measure_loss
from strobe.tools.doctor.measure import (
    Acceptance,
    DraftOnly,
    MarginFit,
    count_matching_drafts,
    gain,
    make_engine,
    measure_acceptance,
    variants,
)
from strobe.tools.doctor.pair_checks import (
    attempt,
    check_files,
    check_tokens,
    mask_candidates,
    memory_facts,
)
from strobe.tools.doctor.tokenizers import roundtrip_share
from strobe.tools.report import progress
from strobe.tools.weight_storage import storage_facts, storage_text

Conversations = Sequence[list[dict[str, Any]]]
"""The messages of each prompt."""
MAX_PROMPTS = 32
"""Of a user's file."""
MAX_TOKENS = 64
"""Maximum tokens per answer."""
MIN_STANDARD_ERRORS = 4.0
MIN_RATIO = 1.01
"""A variant is better if it gains this many standard errors and this many times the tokens."""
WEAK = 1.5
"""Tokens per step below which speculation hardly pays."""
MIN_ROUNDTRIP = 0.9
EXPECTED_ROUNDTRIP = 0.98
"""Share of an answer's tokens that decoding and encoding must preserve. Below the first, the
tokenizer is at fault; below the second, it is blamed for weak acceptance."""


def run_doctor(config: EngineConfig, *, data: str = "", as_json: bool = False) -> int:
    """Print the report of a pair; return 1 if it has a fault. data: a file of prompts, as JSON
    lines. Raises ValueError without drafter."""
    config = locate_models(config)
    if config.draft is None:
        raise ValueError("strobe doctor checks a pair, but no drafter is named; add one.")
    with progress(quiet=as_json) as say:
        report = examine(config, say, data)
    print(json.dumps(report.as_dict())) if as_json else show(report)
    return 1 if report.faults else 0


def examine(
    config: EngineConfig,
    say: Callable[[str], None] = lambda text: None,
    data: str = "",
) -> Report:
    """Check and measure the pair in `config` on the prompts of a file, or built-in ones."""
    conversations = conversations_of(data)
    target = Path(config.target)
    draft = Path(config.draft or "")
    report = Report(target=str(target), draft=str(draft))
    say("reading configs, tensors and tokenizer")
    target_config, draft_config, tokenizer, fits = check_files(
        report,
        target,
        draft,
        check_memory=partial(_check_memory, config),
    )
    if target_config is not None and draft_config is not None and tokenizer is not None:
        check_tokens(
            report, tokenizer=tokenizer, target=target_config, draft=draft_config, path=draft
        )
    broken = any("tensors" in finding.about for finding in report.faults)
    if target_config is None or draft_config is None or tokenizer is None or not fits or broken:
        report.note("acceptance", "Not measured, since the pair cannot run as it is.")
        return report
    prompts = partial(_render, tokenizer, conversations)
    longest = max(len(prompt) for thinking in _ways(tokenizer) for prompt in prompts(thinking))
    model_max = _max_positions(target_config, draft_config)
    config = _for_short_runs(config, longest, model_max)
    resolved = attempt(report, "settings", lambda: resolve(config))
    if resolved is None:
        return report
    assert resolved.draft is not None
    report.facts["memory"] = memory_facts(resolved)
    backends = resolved.backends
    report.facts["target's weights"] = _storage(target, resolved.target, backends.weights, resolved)
    report.facts["drafter's weights"] = _storage(
        draft, resolved.draft, backends.draft_weights, resolved
    )
    _measure(report, resolved, tokenizer, prompts, say)
    first = _ways(tokenizer)[0]
    measure_loss(report, resolved.config, prompts(first), MAX_TOKENS, say)
    return report


def _check_memory(config: EngineConfig, target: TargetConfig, draft: DraftConfig) -> None:
    """Raise ValueError if weights are still to be downloaded, and the pair does not fit in memory
    even with short prompts."""
    if any(missing_weights(Path(path)) for path in (config.target, config.draft or "")):
        config = _for_short_runs(config, longest=0, model_max=_max_positions(target, draft))
        check_before_download(plan_models(config))


def _max_positions(target: TargetConfig, draft: DraftConfig) -> int:
    return min(target.decoder.max_position, draft.decoder.max_position)


def _storage(
    path: Path,
    config: TargetConfig | DraftConfig,
    weights: WeightFormat,
    resolved: ResolvedConfig,
) -> dict[str, str]:
    """Return how each kind of a model's weights is stored and held; nothing of a GGUF file."""
    if (path / GGUF_LINK).exists():
        return {}
    kinds = storage_facts(Checkpoint(path), config, weights, resolved.dtype)
    return {name: storage_text(facts) for name, facts in kinds.items()}


def _for_short_runs(config: EngineConfig, longest: int, model_max: int) -> EngineConfig:
    """Adapt the settings to short runs, without graphs, which every variant would capture again.
    longest: tokens of the longest prompt; model_max: positions of the models."""
    count = len(PROMPTS)
    small = replace(config, max_num_seqs=count, cuda_graphs=False, method=DRAFTER_METHOD, overlap=1)
    room = max(min(1024, model_max), longest + 2 * MAX_TOKENS)
    return small if config.max_model_len is not None else replace(small, max_model_len=room)


def _measure(
    report: Report,
    resolved: ResolvedConfig,
    tokenizer: Tokenizer,
    prompts: Callable[[bool | None], list[list[int]]],
    say: Callable[[str], None],
) -> None:
    """Measure acceptance with thinking off and on, then the variants, and judge the results."""
    draft = resolved.draft
    assert draft is not None
    say("loading")
    margin_fit = MarginFit(draft.block_drafts)
    engine = make_engine(resolved, draft, None, margin_fit)
    module = engine.runner.model
    assert isinstance(module, Target)
    runs: dict[bool | None, Acceptance] = {}
    for thinking in _ways(tokenizer):
        say(f"measuring{_thinking_text(thinking)}")
        runs[thinking] = measure_acceptance(engine, prompts(thinking), MAX_TOKENS)
        report.measured.append({"thinking": thinking, **_figures(runs[thinking])})
    report.margins = margin_fit.by_position()
    roundtrip = roundtrip_share(tokenizer, next(iter(runs.values())).answers)
    del engine
    best = _try_variants(
        report,
        resolved=resolved,
        module=module,
        tokenizer=tokenizer,
        prompts=prompts(next(iter(runs))),
        say=say,
    )
    _judge(report, runs, best, roundtrip)


def _try_variants(
    report: Report,
    resolved: ResolvedConfig,
    module: Target,
    tokenizer: Tokenizer,
    prompts: list[list[int]],
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    """Run every variant on the same answers, drafting a block from each token; return the best one
    if it is clearly better than the config as it is."""
    draft = resolved.draft
    assert draft is not None
    run = partial(_count_matches, resolved=resolved, module=module, prompts=prompts)
    say("measuring from every token")
    base = run(draft)
    masks = mask_candidates(tokenizer, resolved.target.decoder.vocab_size)
    report.variants.append({"kind": "as it is", "what": "as config.json has it", **_tokens(base)})
    for kind, description, config in variants(draft, resolved.target, masks):
        say(f"trying {description}")
        matches = attempt(report, kind, partial(run, config))
        if matches is not None:
            variant = {
                "kind": kind,
                "what": description,
                **_tokens(matches),
                "gain": round(gain(base, matches), 2),
            }
            report.variants.append(variant)
    min_tokens = (1 + mean(base)) * MIN_RATIO
    better = [
        variant
        for variant in report.variants[1:]
        if variant["gain"] >= MIN_STANDARD_ERRORS and variant["tokens"] >= min_tokens
    ]
    return max(better, key=lambda variant: variant["tokens"], default=None)


def _count_matches(
    config: DraftConfig, *, resolved: ResolvedConfig, module: Target, prompts: list[list[int]]
) -> list[int]:
    """Run a variant; see `count_matching_drafts`."""
    engine = make_engine(resolved, config, module, DraftOnly())
    return count_matching_drafts(engine, prompts, MAX_TOKENS)


def _tokens(matches: list[int]) -> dict[str, float]:
    return {"tokens": round(1 + mean(matches), 3)}


def _judge(
    report: Report,
    runs: dict[bool | None, Acceptance],
    best: dict[str, Any] | None,
    roundtrip: float,
) -> None:
    """Report a wrong tokenizer, a better variant or a weak drafter, and thinking that costs
    acceptance. roundtrip: the share of tokens that decoding and encoding preserves."""
    first = next(iter(runs.values())).per_step
    base = report.variants[0]["tokens"]
    if roundtrip < MIN_ROUNDTRIP or (roundtrip < EXPECTED_ROUNDTRIP and first < WEAK):
        report.fault(
            "tokenizer",
            f"A step yields {first:.2f} tokens, and decoding and encoding the answers preserves "
            f"only {roundtrip:.0%} of their tokens: the target was probably trained with a "
            "different tokenizer; use the one published with it.",
        )
    elif best is not None:
        report.fault(
            str(best["kind"]),
            f"With {best['what']} a block yields {best['tokens']:.2f} tokens, but {base:.2f} as "
            "config.json has it; the drafter was probably trained that way, so correct its "
            "config.json.",
        )
    elif first < WEAK:
        report.fault(
            "acceptance",
            f"A step yields {first:.2f} tokens, and no variant is better; use a drafter that was "
            "trained on this target's own answers.",
        )
    else:
        report.ok("acceptance", f"A step yields {first:.2f} tokens, and no variant is better.")
    if len(runs) == 2 and runs[True].per_step < 0.7 * runs[False].per_step:
        report.note(
            "thinking",
            f"With thinking a step yields {runs[True].per_step:.2f} tokens, without it "
            f"{runs[False].per_step:.2f}: the drafter was trained on answers without thinking; "
            "switch it off where speed counts.",
        )


def _figures(acceptance: Acceptance) -> dict[str, Any]:
    rates = [round(rate, 4) for rate in acceptance.rates]
    return {
        "steps": acceptance.steps,
        "tokens_per_step": round(acceptance.per_step, 4),
        "rate_per_position": rates,
    }


def _ways(tokenizer: Tokenizer) -> list[bool | None]:
    """Return thinking off and on if the chat template supports it, else None alone."""
    return [False, True] if "enable_thinking" in (tokenizer.hf.chat_template or "") else [None]


def _thinking_text(thinking: bool | None) -> str:
    return "" if thinking is None else f", thinking {'on' if thinking else 'off'}"


def conversations_of(data: str) -> Conversations:
    """Return the first conversations of a file of JSON lines; the built-in ones without a file."""
    if not data:
        return [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    lines = islice(read_conversations(Path(data)), MAX_PROMPTS)
    conversations = [messages for _, messages in lines]
    if not conversations:
        raise ValueError(f"{data} holds no prompt; give JSON lines with prompt or messages.")
    return conversations


def _render(
    tokenizer: Tokenizer, conversations: Conversations, thinking: bool | None
) -> list[list[int]]:
    """Return prompts as token ids, rendered with the chat template if there is one."""
    if not tokenizer.hf.chat_template:
        return [tokenizer.encode(str(messages[-1]["content"])) for messages in conversations]
    options = {} if thinking is None else {"enable_thinking": thinking}
    return [tokenizer.render_chat(messages, **options) for messages in conversations]
