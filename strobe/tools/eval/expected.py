"""Published figures of pairs (published_figures.json), and checks of a measurement against them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from strobe.engine.build import ResolvedConfig
from strobe.terminal.wording import counted
from strobe.tools.eval.eval_settings import DATA_SETS, EvalSettings
from strobe.tools.report import Figures
from strobe.validation import as_tuple, option, settings

_MIN_PROMPTS = 50  # of a data set; fewer are too noisy to fail a pair
_PAPER_TOKENS = 2048
_USER = "--expect"

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published_figures.json").read_text(encoding="utf-8")
)
"""Figures of each pair, and the facts that identify it whatever its directories are called:
positions and rope_theta distinguish a target's releases of the same size; end_id distinguishes a
chat model, which ends its answers with it, from a base model. A pair without facts is selected only
by name. The paper's figures have the factors of vLLM's test, which allows GSM8K another 0.975."""

Figure = Annotated[float, Field(ge=0, le=10**6)]
_HINT = "give the published figure."


@settings
class Expected:
    """Published figures of one data set; a measurement must reach each times its factor.
    mean_of_answers: acceptance_length is the mean over answers, not over all steps. Raises
    ValueError for an invalid figure."""

    data_set: str
    acceptance_length: Figure | None = option(None, "", _HINT)
    accuracy: Figure | None = option(None, "", _HINT)
    by_position: Annotated[tuple[Figure, ...], BeforeValidator(as_tuple)] = option((), "", _HINT)
    factor: Figure = option(0.95, "", _HINT)
    accuracy_factor: Figure = option(1.0, "", _HINT)
    position_factor: Figure = option(0.85, "", _HINT)
    mean_of_answers: bool = False
    temperature: Figure = 0.0
    source: str = _USER


@dataclass(frozen=True)
class Expectations:
    """Figures to reach, by data set, and sentences that say which are not compared and why."""

    by_data_set: dict[str, Expected]
    notes: tuple[str, ...] = ()


def chosen(settings: EvalSettings) -> list[Expected] | None:
    """Return the figures named or spelled out by `--expect`, None to identify the pair by its
    facts. Raises ValueError for an unknown name or invalid JSON."""
    choice = settings.expect.strip()
    if not choice:
        return None
    if choice == "none":
        return []
    if choice in PUBLISHED:
        return _figures(choice)
    path = Path(choice)
    if not choice.startswith("{") and not path.is_file():
        raise ValueError(
            f"expect is {choice!r}; name one of {', '.join(PUBLISHED)}, none, a JSON file, or give "
            'an object such as {"gsm8k": {"acceptance_length": 6.2}}.'
        )
    try:
        text = choice if choice.startswith("{") else path.read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"expect is {choice!r}, which is not JSON ({error}).") from None
    if not isinstance(value, dict) or not value:
        raise ValueError(f"expect is {choice!r}, but must be an object of data sets.")
    return [_read(name, entry) for name, entry in value.items()]


def _figures(name: str) -> list[Expected]:
    return [Expected(**entry) for entry in PUBLISHED[name]["figures"]]


def _read(name: str, entry: object) -> Expected:
    """Return the user's figures of one data set."""
    allowed = [f.name for f in fields(Expected) if f.name not in ("data_set", "source")]
    if name not in (*DATA_SETS, "custom"):
        raise ValueError(f"expect holds {name!r}; name one of {', '.join(DATA_SETS)} or custom.")
    if not isinstance(entry, dict) or not entry:
        raise ValueError(f"expect's {name!r} is {entry!r}, but must be an object of figures.")
    for key in entry:
        if key not in allowed:
            raise ValueError(f"expect's {name!r} holds {key!r}; it takes {', '.join(allowed)}.")
    try:
        return Expected(data_set=name, **entry)
    except ValueError as error:
        raise ValueError(f"expect's {name} {error}") from None


def expectations(
    settings: EvalSettings,
    resolved: ResolvedConfig,
    named: Sequence[Expected] | None,
    prompts: Mapping[str, bool],
) -> Expectations:
    """Return the figures to reach. named: the result of `chosen`; prompts: for each data set,
    whether the run has enough prompts."""
    figures = _known(resolved) if named is None else named
    if named and not any(figure.data_set in prompts for figure in named):
        raise ValueError(
            f"--expect names {', '.join(figure.data_set for figure in named)}, but the run has "
            f"{', '.join(prompts)}; name a data set of the run."
        )
    expected: dict[str, Expected] = {}
    notes: list[str] = []
    for name, is_enough in prompts.items():
        published = [figure for figure in figures if figure.data_set == name]
        sampled = [figure for figure in published if _applies(figure, settings)]
        reason = "" if named is not None else _why_not_comparable(settings, resolved, is_enough)
        if not sampled:
            sampling = f"temperature {settings.temperature:g}, top-p {settings.top_p:g}"
            reason = f"there are none for {sampling}"
        if published and reason:
            notes.append(f"The published figures for {name} are not compared: {reason}.")
        elif published:
            expected[name] = sampled[-1]
    if requested := _requested(settings):
        for name in prompts:  # the user's figures replace the published ones
            figure = expected.get(name, Expected(data_set=name))
            expected[name] = replace(figure, **requested)
    return Expectations(expected, tuple(notes))


def _known(resolved: ResolvedConfig) -> list[Expected]:
    """Return the published figures of the pair, none for an unknown one."""
    target = resolved.target
    draft = resolved.draft
    if draft is None:
        return []
    decoder = target.decoder
    facts: Figures = {
        "architecture": target.architecture,
        "layers": decoder.num_layers,
        "hidden_size": decoder.hidden_size,
        "intermediate_size": decoder.intermediate_size,
        "positions": decoder.max_position,
        "rope_theta": decoder.rope.theta,
        "draft_layers": draft.decoder.num_layers,
        "block_size": draft.block_size,
        "format": draft.format,
    }
    for name, pair in PUBLISHED.items():
        if any(pair["facts"] == facts | {"end_id": end_id} for end_id in target.eos_ids):
            return _figures(name)
    return []


def _applies(figure: Expected, settings: EvalSettings) -> bool:
    """Return whether a figure is for this sampling; the user's are for any."""
    same_sampling = settings.temperature == figure.temperature and settings.top_p == 1
    return figure.source == _USER or same_sampling


def _why_not_comparable(settings: EvalSettings, resolved: ResolvedConfig, is_enough: bool) -> str:
    """Return why published figures do not apply to this run, an empty string if they do."""
    if settings.thinking:
        return "they were measured without thinking"
    if settings.max_tokens < _PAPER_TOKENS:
        return f"they were measured with max_tokens {_PAPER_TOKENS}"
    if resolved.draft is not None and resolved.limits.num_drafts < resolved.draft.block_drafts:
        return f"they were measured with {counted(resolved.draft.block_drafts, 'draft')} per step"
    return "" if is_enough else f"at least {_MIN_PROMPTS} prompts are needed"


def _requested(settings: EvalSettings) -> Figures:
    """Return the fields that --expect-acceptance-length and --expect-accuracy set."""
    requested: Figures = {}
    if settings.expect_acceptance_length is not None:
        requested |= {
            "acceptance_length": settings.expect_acceptance_length,
            "factor": 1.0,
            "mean_of_answers": False,
            "source": "--expect-acceptance-length",
        }
    if settings.expect_accuracy is not None:
        requested |= {
            "accuracy": settings.expect_accuracy,
            "accuracy_factor": 1.0,
            "source": "--expect-accuracy",
        }
    return requested


def enough(prompts: int, total: int) -> bool:
    """Return whether this number of a data set's prompts may fail a pair."""
    return prompts >= min(_MIN_PROMPTS, total)


def compare(figure: Expected, row: Figures) -> list[Figures]:
    """Compare the measured figures with the expected ones; a missing one is not met."""
    acceptance = row["acceptance"] or {}
    what = "mean_of_answers" if figure.mean_of_answers else "acceptance_length"
    checks = [_compared(what, figure.acceptance_length, figure.factor, acceptance.get(what))]
    rates: list[float] = acceptance.get("rate_by_position", [])
    for i, rate in enumerate(figure.by_position):
        measured = rates[i] if i < len(rates) else None
        checks.append(
            _compared(f"rate at position {i + 1}", rate, figure.position_factor, measured)
        )
    accuracy = row["accuracy"]
    if accuracy["graded"] or figure.source.startswith(_USER):
        checks.append(
            _compared("accuracy", figure.accuracy, figure.accuracy_factor, accuracy["accuracy"])
        )
    return [{**check, "source": figure.source} for check in checks if check]


def _compared(
    what: str, published: float | None, factor: float, measured: float | None
) -> Figures | None:
    """Compare one figure with the published one times a factor; None without a published one."""
    if published is None:
        return None
    floor = round(published * factor, 4)
    return {
        "what": what,
        "published": published,
        "factor": round(factor, 4),
        "floor": floor,
        "measured": measured,
        "met": measured is not None and measured >= floor,
    }
