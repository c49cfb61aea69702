"""Published figures of pairs, and checks of a measurement against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from strobe.engine.build import ResolvedConfig
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.tools.eval.eval_settings import DATA_SETS, EvalSettings
from strobe.tools.report import Figures

_MIN_PROMPTS = 50  # of a data set; fewer are too noisy to fail a pair
_PAPER_TOKENS = 2048


class Facts(NamedTuple):
    """Identifies a pair whatever its directories are called; the drafter is in z-lab's format.
    positions and rope_theta distinguish a target's releases of the same size; end_id distinguishes
    a chat model, which ends its answers with it, from a base model."""

    architecture: str
    layers: int
    hidden_size: int
    intermediate_size: int
    positions: int
    rope_theta: float
    end_id: int
    draft_layers: int
    block_size: int

    def hold(self, target: TargetConfig, draft: DraftConfig) -> bool:
        target_decoder = target.decoder
        facts = Facts(
            architecture=target.architecture,
            layers=target_decoder.num_layers,
            hidden_size=target_decoder.hidden_size,
            intermediate_size=target_decoder.intermediate_size,
            positions=target_decoder.max_position,
            rope_theta=target_decoder.rope.theta,
            end_id=self.end_id,
            draft_layers=draft.decoder.num_layers,
            block_size=draft.block_size,
        )
        return facts == self and self.end_id in target.eos_ids and draft.format == "z-lab"


@dataclass(frozen=True)
class Expected:
    """Published figures of one data set; a measurement must reach each times its factor.
    mean_of_answers: acceptance_length is the mean over answers, not over all steps."""

    data_set: str
    acceptance_length: float | None = None
    accuracy: float | None = None
    by_position: tuple[float, ...] = ()
    factor: float = 0.95
    accuracy_factor: float = 1.0
    position_factor: float = 0.85
    mean_of_answers: bool = False
    temperature: float = 0.0
    source: str = "--expect"


@dataclass(frozen=True)
class Pair:
    """A published pair; without facts, only --expect can select it, by name."""

    name: str
    facts: Facts | None
    figures: tuple[Expected, ...]


def _paper(greedy: Mapping[str, float], sampled: Mapping[str, float]) -> tuple[Expected, ...]:
    """Table 1 of the paper: mean acceptance lengths at temperatures 0 and 1, with the factors of
    vLLM's test of the pair, which allows GSM8K another 0.975."""
    return tuple(
        Expected(
            data_set=name,
            acceptance_length=length,
            factor=0.95 * (0.975 if name == "gsm8k" else 1),
            mean_of_answers=True,
            temperature=temperature,
            source="DFlash paper (arXiv 2602.06036), table 1",
        )
        for temperature, lengths in ((0.0, greedy), (1.0, sampled))
        for name, length in lengths.items()
    )


def _served(source: str, lengths: Mapping[str, float]) -> tuple[Expected, ...]:
    """Acceptance lengths that the paper measured on a server, over all steps."""
    return tuple(
        Expected(data_set=name, acceptance_length=length, source=source)
        for name, length in lengths.items()
    )


_VLLM = "vLLM's acceptance test of the pair"
PAIRS = (
    Pair(
        "qwen3-4b-dflash-b16",
        Facts(
            architecture="Qwen3ForCausalLM",
            layers=36,
            hidden_size=2560,
            intermediate_size=9728,
            positions=40960,
            rope_theta=1e6,
            end_id=151645,
            draft_layers=5,
            block_size=16,
        ),
        _paper(
            {"gsm8k": 6.53, "math500": 7.84, "humaneval": 6.64, "mbpp": 6.09, "mt-bench": 4.35},
            {"gsm8k": 6.00, "math500": 6.67, "humaneval": 6.04, "mbpp": 5.66, "mt-bench": 4.07},
        ),
    ),
    Pair(
        "qwen3-8b-dflash-b16",
        Facts(
            architecture="Qwen3ForCausalLM",
            layers=36,
            hidden_size=4096,
            intermediate_size=12288,
            positions=40960,
            rope_theta=1e6,
            end_id=151645,
            draft_layers=5,
            block_size=16,
        ),
        (
            *_paper(
                {"gsm8k": 6.54, "math500": 7.87, "humaneval": 6.50, "mbpp": 5.95, "mt-bench": 4.24},
                {"gsm8k": 5.98, "math500": 6.40, "humaneval": 5.52, "mbpp": 5.21, "mt-bench": 3.80},
            ),
            Expected(
                data_set="gsm8k-5shot",
                acceptance_length=3.5,
                accuracy=0.80,
                factor=1.0,
                source=_VLLM,
            ),
        ),
    ),
    Pair(
        "llama-3.1-8b-dflash-b10",
        Facts(
            architecture="LlamaForCausalLM",
            layers=32,
            hidden_size=4096,
            intermediate_size=14336,
            positions=131072,
            rope_theta=5e5,
            end_id=128009,
            draft_layers=5,
            block_size=10,
        ),
        _served(
            "DFlash paper, table 5 (SGLang)", {"gsm8k": 4.32, "humaneval": 4.91, "alpaca": 3.73}
        ),
    ),
    Pair(
        "qwen3-coder-30b-a3b-dflash-b16",
        Facts(
            architecture="Qwen3MoeForCausalLM",
            layers=48,
            hidden_size=2048,
            intermediate_size=5472,
            positions=262144,
            rope_theta=1e7,
            end_id=151645,
            draft_layers=8,
            block_size=16,
        ),
        _served("DFlash paper, table 3 (SGLang)", {"humaneval": 8.09, "mbpp": 7.23}),
    ),
    Pair(
        "qwen3-8b-dflash-speculators",
        None,
        (
            Expected(
                data_set="gsm8k-5shot",
                acceptance_length=3.45,
                accuracy=0.885,
                by_position=(0.795, 0.611, 0.429, 0.282),
                factor=0.85,
                accuracy_factor=0.97,
                source=_VLLM,
            ),
        ),
    ),
    Pair(
        "demo",
        Facts(
            architecture="Qwen3ForCausalLM",
            layers=16,
            hidden_size=192,
            intermediate_size=512,
            positions=2048,
            rope_theta=1e4,
            end_id=2,
            draft_layers=3,
            block_size=16,
        ),
        (
            Expected(
                data_set="demo",
                acceptance_length=14.0,
                accuracy=0.979,
                accuracy_factor=0.97,
                source="the demo models' card",
            ),
            Expected(
                data_set="demo",
                acceptance_length=13.6,
                temperature=1.0,
                source="the demo models' card",
            ),
        ),
    ),
)


@dataclass(frozen=True)
class Expectations:
    """Figures to reach, by data set, and sentences that say which are not compared and why."""

    by_data_set: dict[str, Expected]
    notes: tuple[str, ...] = ()


def chosen(settings: EvalSettings) -> Pair | None:
    """Return the pair named or spelled out by `--expect`, None to identify it by its facts. Raises
    ValueError for an unknown name or invalid JSON."""
    choice = settings.expect.strip()
    if choice in ("", "none"):
        return Pair("none", None, ()) if choice else None
    for pair in PAIRS:
        if pair.name == choice:
            return pair
    path = Path(choice)
    if not choice.startswith("{") and not path.is_file():
        names = ", ".join(pair.name for pair in PAIRS)
        raise ValueError(
            f"expect is {choice!r}; name one of {names}, none, a JSON file, or give an object such "
            'as {"gsm8k": {"acceptance_length": 6.2}}.'
        )
    try:
        text = choice if choice.startswith("{") else path.read_text(encoding="utf-8")
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"expect is {choice!r}, which is not JSON ({error}).") from None
    if not isinstance(value, dict) or not value:
        raise ValueError(f"expect is {choice!r}, but must be an object of data sets.")
    return Pair("--expect", None, tuple(_read(name, entry) for name, entry in value.items()))


def _read(name: str, entry: object) -> Expected:
    allowed = [f.name for f in fields(Expected) if f.name not in ("data_set", "source")]
    if name not in (*DATA_SETS, "custom"):
        raise ValueError(f"expect holds {name!r}; name one of {', '.join(DATA_SETS)} or custom.")
    if not isinstance(entry, dict) or not entry:
        raise ValueError(f"expect's {name!r} is {entry!r}, but must be an object of figures.")
    for key, value in entry.items():
        if key not in allowed:
            raise ValueError(f"expect's {name!r} holds {key!r}; it takes {', '.join(allowed)}.")
        for item in value if isinstance(value, list) else [value]:
            number = isinstance(item, int | float) and not isinstance(item, bool)
            if key != "mean_of_answers" and not (number and 0 <= item <= 10**6):
                raise ValueError(
                    f"expect's {name} {key} is {item!r}, but must lie from 0 to 1e+06; give the "
                    "published figure."
                )
    by_position = tuple(entry.get("by_position", ()))
    return replace(Expected(data_set=name), **{**entry, "by_position": by_position})


def expectations(
    settings: EvalSettings, resolved: ResolvedConfig, pair: Pair | None, prompts: Mapping[str, bool]
) -> Expectations:
    """Return the figures to reach. pair: the result of `chosen`; prompts: for each data set,
    whether the run has enough prompts."""
    expected: dict[str, Expected] = {}
    notes: list[str] = []
    is_named = pair is not None
    pair = pair or _known(resolved)
    published: dict[str, Expected] = {}
    for figure in pair.figures if pair is not None else ():
        if figure.data_set in prompts:
            if pair is not None and (pair.name == "--expect" or _same_sampling(figure, settings)):
                published[figure.data_set] = figure
            else:
                published.setdefault(figure.data_set, replace(figure, source=""))
    if is_named and pair is not None and pair.figures and not published:
        raise ValueError(
            f"--expect names {', '.join(figure.data_set for figure in pair.figures)}, but the "
            f"run has {', '.join(prompts)}; name a data set of the run."
        )
    for name, figure in published.items():
        reason = (
            None
            if is_named and figure.source
            else _why_not_comparable(figure, settings, resolved, prompts[name])
        )
        if reason is None:
            expected[name] = figure
        else:
            notes.append(f"The published figures for {name} are not compared: {reason}.")
    length = settings.expect_acceptance_length
    share = settings.expect_accuracy
    if length is not None or share is not None:
        for name in prompts:  # the user's figures replace the published ones
            figure = expected.get(name, Expected(data_set=name))
            if length is not None:
                figure = replace(
                    figure, acceptance_length=length, factor=1.0, mean_of_answers=False
                )
                figure = replace(figure, source="--expect-acceptance-length")
            if share is not None:
                figure = replace(
                    figure, accuracy=share, accuracy_factor=1.0, source="--expect-accuracy"
                )
            expected[name] = figure
    return Expectations(expected, tuple(notes))


def _known(resolved: ResolvedConfig) -> Pair | None:
    target = resolved.target
    draft = resolved.draft
    if draft is None:
        return None
    matching = (pair for pair in PAIRS if pair.facts is not None and pair.facts.hold(target, draft))
    return next(matching, None)


def _same_sampling(figure: Expected, settings: EvalSettings) -> bool:
    return settings.temperature == figure.temperature and settings.top_p == 1


def _why_not_comparable(
    figure: Expected, settings: EvalSettings, resolved: ResolvedConfig, enough: bool
) -> str | None:
    """Return why a published figure does not apply to this run, None if it does."""
    if not figure.source:
        return f"there are none for temperature {settings.temperature:g}, top-p {settings.top_p:g}"
    if settings.thinking:
        return "they were measured without thinking"
    if settings.max_tokens < _PAPER_TOKENS:
        return f"they were measured with max_tokens {_PAPER_TOKENS}"
    if resolved.draft is not None and resolved.limits.num_drafts < resolved.draft.block_drafts:
        return f"they were measured with {resolved.draft.block_drafts} drafts per step"
    return None if enough else f"at least {_MIN_PROMPTS} prompts are needed"


def enough(prompts: int, total: int) -> bool:
    """Return whether this number of a data set's prompts may fail a pair."""
    return prompts >= min(_MIN_PROMPTS, total)


def compare(figure: Expected, row: Figures) -> list[Figures]:
    """Compare the measured figures with the expected ones; a missing one is not met."""
    checks: list[Figures] = []
    acceptance = row["acceptance"] or {}
    if figure.acceptance_length is not None:
        what = "mean_of_answers" if figure.mean_of_answers else "acceptance_length"
        checks.append(
            _compared(what, figure.acceptance_length, figure.factor, acceptance.get(what))
        )
    rates = acceptance.get("rate_by_position", [])
    for i, rate in enumerate(figure.by_position):
        measured = rates[i] if i < len(rates) else None
        checks.append(
            _compared(f"rate at position {i + 1}", rate, figure.position_factor, measured)
        )
    is_requested = figure.source.startswith("--expect")
    if figure.accuracy is not None and (is_requested or row["accuracy"]["graded"]):
        measured = row["accuracy"]["accuracy"]
        checks.append(_compared("accuracy", figure.accuracy, figure.accuracy_factor, measured))
    return [{**check, "source": figure.source} for check in checks]


def _compared(what: str, published: float, factor: float, measured: float | None) -> Figures:
    """Compare one figure with the published one times a factor."""
    floor = round(published * factor, 4)
    return {
        "what": what,
        "published": published,
        "factor": round(factor, 4),
        "floor": floor,
        "measured": measured,
        "met": measured is not None and measured >= floor,
    }
