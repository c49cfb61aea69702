"""Settings of the benchmarks. Imports no torch, since the command line reads it."""

from __future__ import annotations

import shlex
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field as Bounds
from pydantic import model_validator

from strobe.config import SERVED_OPTIONS, EngineConfig
from strobe.sampling_params import SamplingParams
from strobe.tools.bench.plot_style import FORMATS
from strobe.validation import MAX_INT, option, settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

DECIDED = ("load_format", "max_num_seqs", "enable_prefix_caching", *SERVED_OPTIONS)
"""Engine settings that a benchmark sets itself: no prompt may hit the prefix cache."""


Positive = Annotated[int, Bounds(ge=1, le=MAX_INT)]
Temperature = Annotated[float, Bounds(ge=0, le=100)]
RandomWeights = Literal["dummy", "uniform"]
TopP = Annotated[float, Bounds(gt=0, le=1)]
_MORE = "ask for one or more."


def _top_p() -> float:
    return option(1.0, "Keep the most probable tokens up to this mass; 1 is off.")


@settings
class _Concurrency:
    """Options of the benchmarks that measure several numbers of requests."""

    concurrency: str = option("1,8,32", "Requests at once, separated by commas.")
    json: str = option("", "File to write every figure to.")

    @model_validator(mode="after")
    def _check_shared(self) -> Self:
        _ = self.requests  # raises if it cannot be parsed
        check_file(self.json)
        return self

    @property
    def requests(self) -> tuple[int, ...]:
        return positive_ints("concurrency", self.concurrency)


@settings
class _RandomModels:
    """Options of the benchmarks with random weights."""

    shapes: str = option(
        "", "Shapes by name: demo (the default), qwen3-0.6b, qwen3-4b, qwen3-8b, llama-3.1-8b, "
        "qwen3-coder-30b-a3b, gpt-oss-20b, qwen3.5-9b, qwen3.5-35b-a3b or gemma-4-26b-a4b, "
        "each with its DFlash drafter, qwen3.8-27b with DFlash2's, or qwen3-8b-dflash2, "
        "qwen3-8b-dspark or qwen3.8-27b-dspark; of quantized targets with the format after a "
        "slash, as qwen3-8b/int4-g128 (modelopt-mixed, nvfp4, int4-g128, fp8-rows, fp8-block, "
        "gptq-int4, awq-int4); or give directories with --target and --draft."
    )  # fmt: skip
    load_format: RandomWeights = option(
        "dummy", "Random weights: dummy draws normal ones, with norms of 1; uniform draws all "
        "within 0.001 of 0, as vLLM's dummy does. Rows then hold the same few tokens, so that a "
        "GPU at its power limit is faster."
    )  # fmt: skip
    temperature: Temperature = option(0.0, "0 is greedy.")


@settings
class _RealPrompts:
    """Options of the benchmarks that answer real prompts."""

    data: str = option(
        "", "JSON lines with prompt, messages or turns; without it, held-out tasks of the demo "
        "models."
    )  # fmt: skip
    prompts: Positive = option(32, "Number of prompts, from the start of the data.", _MORE)
    max_tokens: Positive = option(256, "Maximum tokens per answer.", _MORE)
    temperature: Temperature = option(0.0, "0 is greedy.")
    top_p: TopP = _top_p()
    ignore_eos: bool = option(False, "The model's own end tokens do not end the answer.")
    thinking: bool = option(False, "Let the model think before it answers a prompt of --data.")

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters of all answers."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
        )


@settings
class StepSettings(_Concurrency, _RandomModels):
    """`strobe bench step`. Raises ValueError for invalid values and combinations."""

    prompt_len: str = option("256", "Tokens per prompt, separated by commas.")
    acceptance_length: Annotated[float, Bounds(ge=1, le=10**6)] = option(
        6.0,
        "Forced mean tokens per verify step; 1 accepts no draft.",
        "1 is no draft accepted.",
    )
    steps: Positive = option(200, "Timed steps.", "200 give a steady mean.")
    warmup: Annotated[int, Bounds(ge=0, le=MAX_INT)] = option(
        20, "Untimed steps before them.", "0 times the first steps, too."
    )
    top_p: TopP = _top_p()
    prefill: str = option("", "Prefills to time, prompts x tokens, such as 8x2048,1x32000.")
    routing: Literal["random", "even"] = option(
        "random", "Experts of each row: random chooses by the random weights, so that rows "
        "prefer the same ones; even draws them evenly, without repetition and the same in every "
        "run. Only even agrees with the floor and compares with other engines."
    )  # fmt: skip
    profile: bool = option(
        False, "Also list the operations of a step and of a prefill: launches, time and share of "
        "each, and the floor of each part of the model. On a GPU, the time of an operation counts "
        "from the end of those that started before it."
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name in ("prompt_lens", "prefills"):
            getattr(self, name)  # raises if it cannot be parsed
        return self

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        return positive_ints("prompt_len", self.prompt_len)

    @property
    def prefills(self) -> tuple[tuple[int, int], ...]:
        """(prompts, tokens per prompt), in order."""
        pairs: list[tuple[int, int]] = []
        for part in self.prefill.split(",") if self.prefill else ():
            numbers = part.strip().split("x")
            if len(numbers) != 2 or not all(_is_positive(n) for n in numbers):
                raise ValueError(
                    f"prefill is {self.prefill!r}, but must be prompts x tokens, such as 8x2048."
                )
            pairs.append((int(numbers[0]), int(numbers[1])))
        return tuple(pairs)


@settings
class OfflineSettings(_Concurrency, _RealPrompts):
    """`strobe bench offline`. Raises ValueError for invalid values and combinations."""

    repeats: Positive = option(2, "Timed runs; the fastest of each way counts.", _MORE)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        max_requests = max(self.requests)
        if max_requests > self.prompts:
            raise ValueError(
                f"concurrency is {max_requests}, but there are {self.prompts} prompts; lower it "
                f"or raise prompts to {max_requests}."
            )
        return self


@settings
class LoadSettings(_Concurrency, _RandomModels):
    """`strobe bench load`. Raises ValueError for invalid values and combinations."""

    rate: str = option(
        "", "Requests per second, arriving at random times, separated by commas; the largest "
        "concurrency limits the requests in flight."
    )  # fmt: skip
    ways: str = option("plain,3,7,15,adaptive", "plain, adaptive and numbers of drafts.")
    traces: str = option(
        "",
        "A file of strobe bench record, whose blocks the drafter of --shapes then has; without it, "
        "the traces shipped with Strobe.",
    )
    mix: str = option("all", "Answers of the traces: all, easy, hard, or drifting.")
    acceptance_rate: Annotated[float, Bounds(ge=0, le=1)] | None = option(
        None, "Instead of traces: accept each draft with this probability, whatever its margin.",
        "0 accepts none.",
    )  # fmt: skip
    answers: Annotated[int, Bounds(ge=0, le=MAX_INT)] = option(
        0, "Answers per load; 0 is 4 for each request at once, 30 s at a rate, and at least 24."
    )
    steady: bool = option(
        False, "All requests decode and none ends, until they average max_tokens each."
    )
    repeats: Positive = option(1, "Timed runs; the median of each way counts.", _MORE)
    prompt_len: Positive = option(256, "Tokens per prompt.", "A prompt needs a token.")
    max_tokens: Annotated[int, Bounds(ge=0, le=MAX_INT)] = option(
        0, "Maximum tokens per answer; 0 keeps the traces' lengths, or is 256 with --steady."
    )
    plot: str = option("", "Image to write: tokens/s and time per token over the load.")
    break_even: bool = option(
        False, "Instead of loads, time plain steps and steps with drafts at each of --contexts and "
        "of --concurrency, and print the accepted length that makes drafting pay."
    )  # fmt: skip
    contexts: str = option(
        "1000,8000,32000,128000", "Tokens of context of each request for --break-even, separated "
        "by commas."
    )  # fmt: skip

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name in ("rates", "fixed", "context_lengths"):
            getattr(self, name)  # raises if it cannot be parsed
        self._check_break_even()
        check_file(self.plot, "plot")
        if self.plot and Path(self.plot).suffix.lower() not in FORMATS:
            ends = ", ".join(FORMATS)
            raise ValueError(f"plot is {self.plot!r}, but must end in one of {ends}.")
        if self.rate and self.steady:
            raise ValueError("rate and steady are both set; set one of them.")
        if self.acceptance_rate is not None and (self.traces or self.mix != "all"):
            raise ValueError(
                "acceptance_rate is set together with traces or mix; leave it or them out."
            )
        return self

    def _check_break_even(self) -> None:
        """Raise ValueError if a setting would have no effect with break_even, or without it."""
        defaults = {f.name: f.default for f in fields(LoadSettings)}
        shared = ("concurrency", "json", "shapes", "load_format", "break_even", "contexts")
        names = [name for name in defaults if name not in shared] if self.break_even else []
        unused = [name for name in names if getattr(self, name) != defaults[name]]
        if unused:
            raise ValueError(
                f"{unused[0]} is set, but break_even sends no load; leave one of them out."
            )
        if not self.break_even and self.contexts != defaults["contexts"]:
            raise ValueError(
                f"contexts is {self.contexts!r}, but only break_even uses it; set it as well."
            )

    @property
    def context_lengths(self) -> tuple[int, ...]:
        return positive_ints("contexts", self.contexts)

    @property
    def rates(self) -> tuple[float, ...]:
        """Requests per second."""
        values: list[float] = []
        for part in self.rate.split(",") if self.rate else ():
            try:
                values.append(float(part))
            except ValueError:
                values.append(0.0)
            if not 0 < values[-1] < 1e6:
                raise ValueError(
                    f"rate is {self.rate!r}, but must be numbers above 0 separated by commas, "
                    "such as 0.5,2; leave it out for a fixed number of requests at once."
                )
        return tuple(values)

    @property
    def way_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.strip() for part in self.ways.split(",")))

    @property
    def fixed(self) -> tuple[int, ...]:
        """The ways that are numbers of drafts."""
        numbers = [way for way in self.way_names if way not in ("plain", "adaptive")]
        if not all(map(_is_positive, numbers)):
            raise ValueError(
                f"ways is {self.ways!r}, but must be plain, adaptive and numbers of drafts "
                "separated by commas."
            )
        return tuple(map(int, numbers))


@settings
class RecordSettings(_RealPrompts):
    """`strobe bench record`. Raises ValueError for invalid values and combinations."""

    prompts: Positive = option(64, "Number of prompts, from the start of the data.", _MORE)
    at_once: Positive = option(8, "Requests running at once.", _MORE)
    max_tokens: Positive = option(320, "Maximum tokens per answer.", _MORE)
    out: str = option("traces.npz", "File to write the traces to.")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        check_file(self.out, "out")
        if not self.out.endswith(".npz"):
            raise ValueError(f"out is {self.out!r}, but must end with .npz.")
        return self


def _is_positive(text: str) -> bool:
    return text.strip().isdecimal() and 0 < int(text) < 2**31


def positive_ints(name: str, text: str) -> tuple[int, ...]:
    """Parse numbers such as 1,8,32. Raises ValueError that names the option."""
    parts = str(text).split(",")
    if not all(_is_positive(part) for part in parts):
        raise ValueError(
            f"{name} is {text!r}, but must be whole numbers of at least 1 separated by commas, "
            "such as 1,8,32."
        )
    return tuple(int(part) for part in parts)


def check_file(name: str, option: str = "json") -> None:
    """Raise ValueError if the file cannot be written when the benchmark ends."""
    if not name:
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        problem = f"{path} is a directory" if path.is_dir() else f"{path.parent} is not a directory"
        raise ValueError(f"{option} is {name!r}, but {problem}; name a file in one that exists.")


def command_line(command: str, *groups: DataclassInstance) -> str:
    """Return the command line that gives these groups of settings to a command, such as "bench
    step", without defaults."""
    words = ["strobe", *command.split()]
    for group in groups:
        for f in fields(group):
            value = getattr(group, f.name)
            default = None if f.default is MISSING else f.default
            decided = f.name in DECIDED and isinstance(group, EngineConfig)
            if decided or value == default:
                continue
            flag = f.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
    return shlex.join(words)
