"""The data sets: their sources, prompts and graders.

The prompts come from the DFlash paper's evaluation (z-lab's benchmark), so that its figures are
comparable. mbpp-tests also shows the tests, since only they name the function.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from strobe.demo_models import Example, read_heldout
from strobe.tools.eval import graders, latex, programs
from strobe.tools.eval.demo_tasks import check
from strobe.tools.eval.eval_settings import EvalSettings
from strobe.tools.eval.sources import Placed, Row, fetch, read_rows

Grade = Callable[[str], bool]

_REASON = "Please reason step by step, and put your final answer within \\boxed{}."
_SHOTS = 5


@dataclass(frozen=True)
class Sample:
    """The user's turns of a conversation; each follows the model's answer to the one before.

    before: messages before the first turn. raw: the turn is a text to continue, not a chat. grade:
    whether the last answer is right; None if unknown. runs_code: `grade` runs the model's code.
    latex: `grade` compares LaTeX.
    """

    turns: tuple[str, ...]
    grade: Grade | None = None
    runs_code: bool = False
    latex: bool = False
    before: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    raw: bool = False
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class DataSet:
    """Named samples. ungraded: why accuracy is not measured, empty if it is."""

    name: str
    samples: tuple[Sample, ...]
    source: str
    total: int
    ungraded: str = ""


@dataclass(frozen=True)
class Published:
    """A data set on the hub: patterns of its files in order of preference, and a function that
    turns a row into a sample."""

    repo: str
    files: tuple[str, ...]
    sample: Callable[[Row, float], Sample]
    ungraded: str = ""


def load(name: str, settings: EvalSettings) -> DataSet:
    """Load a data set's samples. Raises ValueError for a file or row that does not fit it."""
    if name == "demo":
        pool = read_heldout()
        samples = tuple(_demo(example) for example in pool[: settings.prompts or None])
        return DataSet(
            name=name, samples=samples, source="generated held-out tasks", total=len(pool)
        )
    path = Path(settings.data) if settings.data else None
    if name == "custom":
        assert path is not None, "a file is what makes a data set custom"
        rows = read_rows(path)
        published = Published(repo="", files=(), sample=_custom)
    else:
        published = PUBLISHED[name]
        rows = read_rows(path) if path is not None else _fetch_rows(name, published.files)
    make = published.sample
    if name == "gsm8k-5shot":
        make = partial(_five_shot, _examples(settings))
    selected = [rows[i] for i in spread(len(rows), settings.prompts)]
    samples = tuple(_sample(placed, make, name, settings.code_seconds) for placed in selected)
    ungraded = published.ungraded
    if not ungraded and not any(sample.grade for sample in samples):
        ungraded = "no row has an answer"
    if any(sample.latex for sample in samples) and (ungraded := latex.missing()):
        samples = tuple(replace(sample, grade=None) for sample in samples)
    source = str(path) if path is not None else published.repo
    return DataSet(name=name, samples=samples, source=source, total=len(rows), ungraded=ungraded)


def spread(total: int, max_count: int) -> list[int]:
    """Return up to `max_count` indices spread evenly over `total`, since files may be sorted; 0 is
    all."""
    count = min(max_count or total, total)
    return [i * total // count for i in range(count)]


def _fetch_rows(name: str, patterns: Sequence[str]) -> list[Placed]:
    files = fetch(PUBLISHED[name].repo, patterns, name)
    return [row for file in files for row in read_rows(file)]


def _sample(
    placed: Placed, make: Callable[[Row, float], Sample], name: str, seconds: float
) -> Sample:
    try:
        return make(placed.row, seconds)
    except KeyError as error:
        keys = ", ".join(placed.row) or "nothing"
        hint = 'give {"turns": [text, ...]}' if name == "custom" else f"give {name}'s own rows"
        raise ValueError(
            f"{placed.location} has no {error.args[0]!r}, only {keys}; {hint}."
        ) from None
    except ValueError as error:
        raise ValueError(f"{placed.location}: {error}") from None


def _text(row: Row, name: str) -> str:
    value = row[name]
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} is {reprlib.repr(value)}, but must be a string.")
    return value


def _texts(row: Row, name: str) -> tuple[str, ...]:
    values = row[name]
    if not isinstance(values, list | tuple) or not values:
        raise ValueError(f"{name} is {reprlib.repr(values)}, but must be a list of texts.")
    for value in values:
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name} holds {reprlib.repr(value)}, which is not text.")
    return tuple(values)


def _gsm8k(row: Row, seconds: float) -> Sample:
    grade = partial(graders.number, expected=_text(row, "answer"))
    return Sample(turns=(f"{_text(row, 'question')}\n{_REASON}",), grade=grade, latex=True)


def _examples(settings: EvalSettings) -> str:
    """Return the first questions of the training set with their answers, as one text."""
    if settings.shots:
        rows = read_rows(Path(settings.shots), "shots")
    else:
        rows = _fetch_rows("gsm8k-5shot", ("main/train*.parquet",))
    if len(rows) < _SHOTS:
        raise ValueError(f"shots holds {len(rows)} questions, but {_SHOTS} are shown; give more.")
    examples = [_sample(placed, _example, "gsm8k-5shot", 0.0).turns[0] for placed in rows[:_SHOTS]]
    return "\n\n".join(examples)


def _example(row: Row, seconds: float) -> Sample:
    return Sample(turns=(f"Question: {_text(row, 'question')}\nAnswer: {_text(row, 'answer')}",))


def _five_shot(examples: str, row: Row, seconds: float) -> Sample:
    grade = partial(graders.few_shot_number, expected=_text(row, "answer"))
    text = f"{examples}\n\nQuestion: {_text(row, 'question')}\nAnswer:"
    return Sample(turns=(text,), grade=grade, raw=True, stop=("Question:",))


def _math(row: Row, seconds: float) -> Sample:
    grade = partial(graders.mathematics, expected=_text(row, "answer"))
    return Sample(turns=(f"{_text(row, 'problem')}\n{_REASON}",), grade=grade, latex=True)


def _human_eval(row: Row, seconds: float) -> Sample:
    prompt, tests, name = (_text(row, part) for part in ("prompt", "test", "entry_point"))
    grade = partial(_passes_human_eval, prompt=prompt, tests=tests, name=name, seconds=seconds)
    task = "Write a solution to the following problem and make sure that it passes the tests:"
    return Sample(turns=(f"{task}\n```python\n{prompt}\n```",), grade=grade, runs_code=True)


def _passes_human_eval(text: str, *, prompt: str, tests: str, name: str, seconds: float) -> bool:
    text = graders.spoken(text)
    program = programs.human_eval(text, prompt=prompt, tests=tests, name=name)
    return programs.passes(program, seconds)


def _mbpp(row: Row, seconds: float) -> Sample:
    return Sample(turns=(_text(row, "prompt" if "prompt" in row else "text"),))


def _mbpp_tests(row: Row, seconds: float) -> Sample:
    tests = _texts(row, "test_list")
    imports = tuple(row.get("test_imports") or [row.get("test_setup_code") or ""])
    grade = partial(_passes_mbpp, imports=imports, tests=tests, seconds=seconds)
    listed = "\n".join(tests)
    turn = f"{_mbpp(row, seconds).turns[0]}\nThe code should pass these tests:\n{listed}"
    return Sample(turns=(turn,), grade=grade, runs_code=True)


def _passes_mbpp(
    text: str, *, imports: tuple[str, ...], tests: tuple[str, ...], seconds: float
) -> bool:
    program = programs.mbpp(graders.spoken(text), imports=imports, tests=tests)
    return programs.passes(program, seconds)


def _mt_bench(row: Row, seconds: float) -> Sample:
    return Sample(turns=_texts(row, "turns" if "turns" in row else "prompt"))


def _alpaca(row: Row, seconds: float) -> Sample:
    instruction = _text(row, "instruction")
    context = str(row.get("input") or "").strip()
    return Sample(turns=(f"{instruction}\n\nInput:\n{context}" if context else instruction,))


def _custom(row: Row, seconds: float) -> Sample:
    turns = _texts(row, "turns")
    expected = row.get("answer")
    if expected is None:
        return Sample(turns=turns)
    if not isinstance(expected, str | int | float) or isinstance(expected, bool):
        raise ValueError(f"answer is {reprlib.repr(expected)}, but must be a string or a number.")
    return Sample(turns=turns, grade=partial(graders.answer, expected=str(expected)), latex=True)


def _demo(example: Example) -> Sample:
    *before, last = example.messages
    return Sample(
        turns=(last["content"],),
        grade=partial(check, example),
        runs_code=example.family == "code",
        before=tuple(before),
        tools=example.tools,
        thinking=example.thinking,
    )


_OPEN = "its answers are open, so only acceptance and speed are measured"
_NAMELESS = "the paper's prompt does not say what the function is called; mbpp-tests does"
_GSM8K = ("main/test*.parquet",)
_MBPP = ("sanitized/test*.parquet",)
PUBLISHED: dict[str, Published] = {
    "gsm8k": Published(repo="openai/gsm8k", files=_GSM8K, sample=_gsm8k),
    "gsm8k-5shot": Published(repo="openai/gsm8k", files=_GSM8K, sample=_gsm8k),
    "math500": Published(
        repo="HuggingFaceH4/MATH-500", files=("test.jsonl", "data/test*.parquet"), sample=_math
    ),
    "humaneval": Published(
        repo="openai/openai_humaneval",
        files=("openai_humaneval/test*.parquet",),
        sample=_human_eval,
    ),
    "mbpp": Published(
        repo="google-research-datasets/mbpp", files=_MBPP, sample=_mbpp, ungraded=_NAMELESS
    ),
    "mbpp-tests": Published(repo="google-research-datasets/mbpp", files=_MBPP, sample=_mbpp_tests),
    "mt-bench": Published(
        repo="HuggingFaceH4/mt_bench_prompts",
        files=("data/train*.parquet", "raw/question.jsonl"),
        sample=_mt_bench,
        ungraded=_OPEN,
    ),
    "alpaca": Published(
        repo="tatsu-lab/alpaca", files=("data/train*.parquet",), sample=_alpaca, ungraded=_OPEN
    ),
}
