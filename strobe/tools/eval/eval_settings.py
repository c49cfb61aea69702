"""Settings of an evaluation. Imports no torch, since the command line reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from strobe.tools.bench.bench_settings import Positive, Temperature, TopP, positive_ints
from strobe.validation import MAX_INT, option, settings

DATA_SETS = (
    "gsm8k", "gsm8k-5shot", "math500", "humaneval", "mbpp", "mbpp-tests", "mt-bench", "alpaca",
    "demo",
)  # fmt: skip
CONCURRENCY = {"acceptance": "1", "accuracy": "32", "speed": "1,8,32"}
"""Default numbers of requests in flight, by kind of evaluation."""


@settings
class EvalSettings:
    """`strobe eval`. Raises ValueError for invalid values and combinations."""

    dataset: str = option(
        "", f"Data sets separated by commas: {', '.join(DATA_SETS)}; by default demo, the held-out "
        "tasks of the demo models."
    )  # fmt: skip
    data: str = option(
        "", "A local file (.jsonl, .json, .parquet) instead of the hub's; without --dataset, "
        'lines of {"turns": [text, ...], "answer": text}, the answer optional.'
    )  # fmt: skip
    shots: str = option(
        "", "A local file of GSM8K's training questions; gsm8k-5shot shows the first five."
    )
    prompts: Annotated[int, Field(ge=0, le=MAX_INT)] = option(
        200, "Prompts of each data set, spread evenly over it; 0 uses all.", "0 uses all."
    )
    concurrency: str = option(
        "", "Requests in flight, separated by commas; by default 1 for acceptance, 32 for "
        "accuracy and 1,8,32 for speed."
    )  # fmt: skip
    max_tokens: Positive = option(2048, "Maximum tokens per answer.", "ask for one or more.")
    repeats: Positive = option(
        1, "Timed runs; the fastest of each way counts.", "ask for one or more."
    )
    temperature: Temperature = option(0.0, "0 is greedy.")
    top_p: TopP = option(1.0, "Keep the most probable tokens up to this mass; 1 is off.")
    thinking: bool = option(False, "Let the model think before it answers.")
    allow_code_execution: bool = option(
        False, "Run the model's code against its tests, with limits of time and memory but "
        "without a sandbox."
    )  # fmt: skip
    code_seconds: Annotated[float, Field(ge=0.1, le=3600)] = option(
        10.0, "Time limit of one program, in seconds.", "10 suits almost all tests."
    )
    expect: str = option(
        "", "Published figures to reach: a name, a JSON object or file such as "
        '{"gsm8k": {"acceptance_length": 6.2}}, or none; by default, the pair\'s own.'
    )  # fmt: skip
    expect_acceptance_length: Annotated[float, Field(ge=1, le=10**6)] | None = option(
        None, "Fail below this acceptance length on any data set.", "1 is no draft accepted."
    )
    expect_accuracy: Annotated[float, Field(ge=0, le=1)] | None = option(
        None,
        "Fail below this share of correct answers, 0 to 1, on any data set.",
        "0.9 is nine of ten.",
    )
    output: str = option("", "Directory for report.json, report.md and plots; created if missing.")
    save_answers: bool = option(False, "Also write every answer to answers.jsonl there.")

    @model_validator(mode="after")
    def _check_together(self) -> EvalSettings:
        self._check_data()
        if self.concurrency:
            positive_ints("concurrency", self.concurrency)
        if self.save_answers and not self.output:
            raise ValueError("save_answers is on, but output is empty; name a directory.")
        path = Path(self.output)
        if self.output and path.exists() and not path.is_dir():
            raise ValueError(f"output is {self.output!r}, which is a file; name a directory.")
        return self

    def _check_data(self) -> None:
        names = self.names
        if self.data and len(names) > 1:
            raise ValueError(
                f"data is one file, but dataset names {len(names)}; name only the file's own."
            )
        if self.data and names == ("demo",):
            raise ValueError(
                "The demo models' tasks are generated; drop --data, or --dataset demo."
            )
        if self.shots and "gsm8k-5shot" not in names:
            raise ValueError("Only gsm8k-5shot shows shots; add --dataset gsm8k-5shot.")
        if self.data and names == ("gsm8k-5shot",) and not self.shots:
            raise ValueError(
                "gsm8k-5shot with --data needs --shots, a file of training questions to show."
            )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the data sets, or `custom` for a user's file. Raises ValueError."""
        if not self.dataset:
            return ("custom",) if self.data else ("demo",)
        names = tuple(name.strip() for name in str(self.dataset).split(","))
        for name in names:
            if name not in DATA_SETS:
                raise ValueError(
                    f"dataset is {name!r}; name one of {', '.join(DATA_SETS)}, or give your own "
                    "file with --data."
                )
        if len(set(names)) < len(names):
            raise ValueError(f"dataset is {self.dataset!r}, which names one twice.")
        return names

    def requests(self, kind: str, limit: int) -> tuple[int, ...]:
        """Return the numbers of requests in flight. Raises ValueError if one exceeds `limit`."""
        if not self.concurrency:
            counts = positive_ints("concurrency", CONCURRENCY[kind])
            return tuple(dict.fromkeys(min(count, limit) for count in counts))
        counts = positive_ints("concurrency", self.concurrency)
        if max(counts) > limit:
            raise ValueError(
                f"concurrency is {max(counts)}, but a data set has {limit} prompts; lower it, or "
                "raise prompts."
            )
        return counts
