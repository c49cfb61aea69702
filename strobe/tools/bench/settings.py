"""What the two benchmarks are asked for. Imports no torch, since the command line reads it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field as Bounds
from pydantic import model_validator

from strobe.checks import MOST, option, settings
from strobe.config import EngineConfig

DECIDED = ("load_format", "max_num_seqs", "enable_prefix_caching")
"""Engine settings that a benchmark decides itself: no prompt may be found in the cache."""


Positive = Annotated[int, Bounds(ge=1, le=MOST)]
Temperature = Annotated[float, Bounds(ge=0, le=100)]
TopP = Annotated[float, Bounds(gt=0, le=1)]
_MORE = "ask for one or more."


@settings
class StepSettings:
    """`strobe bench step`. Raises ValueError for what makes no sense by itself."""

    shapes: str = option(
        "", "Shapes by name: demo (the default), qwen3-0.6b, qwen3-4b, qwen3-8b, llama-3.1-8b, "
        "qwen3-coder-30b-a3b, gpt-oss-20b, qwen3.5-9b, qwen3.5-35b-a3b or gemma-4-26b-a4b, "
        "each with its DFlash drafter; or give directories with --target and --draft."
    )  # fmt: skip
    concurrency: str = option("1,8,32", "Requests decoding at once, with commas between.")
    prompt_len: str = option("256", "Tokens per prompt, with commas between.")
    acceptance_length: Annotated[float, Bounds(ge=1, le=10**6)] = option(
        6.0,
        "Tokens that each verify step is made to accept on average; 1 is no draft.",
        "1 is no draft accepted.",
    )
    steps: Positive = option(200, "Steps that are timed.", "200 give a steady mean.")
    warmup: Annotated[int, Bounds(ge=0, le=MOST)] = option(
        20, "Steps before them.", "0 times the first steps, too."
    )
    temperature: Temperature = option(0.0, "0 is greedy.")
    top_p: TopP = option(1.0, "Keep the most probable tokens up to this mass; 1 is off.")
    prefill: str = option("", "Prefills to time, prompts x tokens, such as 8x2048,1x32000.")
    json: str = option("", "File to write every figure to.")

    @model_validator(mode="after")
    def _check_together(self) -> StepSettings:
        for name in ("requests", "prompt_lens", "prefills"):
            getattr(self, name)  # raises where it cannot be read
        check_file(self.json)
        return self

    @property
    def requests(self) -> tuple[int, ...]:
        return positive_ints("concurrency", self.concurrency)

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        return positive_ints("prompt_len", self.prompt_len)

    @property
    def prefills(self) -> tuple[tuple[int, int], ...]:
        """(prompts, tokens of each), in order."""
        found: list[tuple[int, int]] = []
        for part in self.prefill.split(",") if self.prefill else ():
            numbers = part.strip().split("x")
            if len(numbers) != 2 or not all(_is_positive(n) for n in numbers):
                raise ValueError(
                    f"prefill is {self.prefill!r}, but must be prompts x tokens, such as 8x2048."
                )
            found.append((int(numbers[0]), int(numbers[1])))
        return tuple(found)


@settings
class OfflineSettings:
    """`strobe bench offline`. Raises ValueError for what makes no sense by itself."""

    data: str = option(
        "", "JSON lines with prompt, messages or turns; without it, held-out tasks of the demo "
        "models."
    )  # fmt: skip
    prompts: Positive = option(32, "Prompts to answer, the first of the data.", _MORE)
    concurrency: str = option("1,8,32", "Requests running at once, with commas between.")
    max_tokens: Positive = option(256, "Most tokens per answer.", _MORE)
    repeats: Positive = option(2, "Timed turns; the fastest of each way counts.", _MORE)
    temperature: Temperature = option(0.0, "0 is greedy.")
    top_p: TopP = option(1.0, "Keep the most probable tokens up to this mass; 1 is off.")
    ignore_eos: bool = option(False, "The model's own end tokens do not end the answer.")
    thinking: bool = option(False, "Let the model think before it answers a prompt of --data.")
    json: str = option("", "File to write every figure to.")

    @model_validator(mode="after")
    def _check_together(self) -> OfflineSettings:
        most = max(self.requests)
        if most > self.prompts:
            raise ValueError(
                f"concurrency is {most}, but there are {self.prompts} prompts; lower it or raise "
                f"prompts to {most}."
            )
        check_file(self.json)
        return self

    @property
    def requests(self) -> tuple[int, ...]:
        return positive_ints("concurrency", self.concurrency)


def _is_positive(text: str) -> bool:
    return text.strip().isdecimal() and 0 < int(text) < 2**31


def positive_ints(name: str, text: str) -> tuple[int, ...]:
    """1,8,32 as numbers. Raises ValueError, naming the option."""
    parts = str(text).split(",")
    if not all(_is_positive(part) for part in parts):
        raise ValueError(
            f"{name} is {text!r}, but must be whole numbers of at least 1 with commas between, "
            "such as 1,8,32."
        )
    return tuple(int(part) for part in parts)


def check_file(name: str) -> None:
    """Raises ValueError where the figures could not be written in the end."""
    if not name:
        return
    path = Path(name)
    if path.is_dir() or not path.parent.is_dir():
        what = f"{path} is a directory" if path.is_dir() else f"{path.parent} is no directory"
        raise ValueError(f"json is {name!r}, but {what}; name a file in one that exists.")


def command_line(name: str, *groups: StepSettings | OfflineSettings | EngineConfig) -> str:
    """The command that asks for these settings, defaults left out."""
    import shlex

    words = ["strobe", "bench", name]
    for group in groups:
        for f in _changed(group):
            flag, value = f.name.replace("_", "-"), getattr(group, f.name)
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", str(value)]
    return shlex.join(words)


def _changed(group: StepSettings | OfflineSettings | EngineConfig) -> Iterable[Field[Any]]:
    for f in fields(group):
        default = None if f.default is MISSING else f.default
        if f.name not in DECIDED and getattr(group, f.name) != default:
            yield f
