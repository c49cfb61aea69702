"""`strobe demo`: one streamed answer, then plain decoding and DFlash on the same prompts."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from strobe.config import EngineConfig
from strobe.demo_models import FAMILIES, Example, read_heldout
from strobe.hub.locate import locate_models
from strobe.llm import LLM
from strobe.outputs import Prompt, RequestOutput
from strobe.sampling_params import SamplingParams
from strobe.speculation.registry import DRAFTER_METHOD
from strobe.terminal.progress import Progress
from strobe.terminal.wording import counted
from strobe.terminal.wrapping import Wrapping
from strobe.tools.demo_prompts import chat_examples


@dataclass(frozen=True)
class Run:
    """Answers to the prompts, one at a time, with or without drafts. seconds: of each."""

    outputs: list[RequestOutput]
    seconds: list[float]

    @property
    def tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.tokens / sum(self.seconds)

    def of(self, prompts: Sequence[int]) -> Run:
        """Return the run of some of the prompts, named by their indices."""
        return Run([self.outputs[i] for i in prompts], [self.seconds[i] for i in prompts])


Answer = Callable[[Prompt], RequestOutput]


def prompts_of(llm: LLM, examples: Sequence[Example]) -> list[Prompt]:
    """Return the token ids of the examples' prompts, rendered with the chat template."""
    return [
        llm.tokenizer.render_chat(
            example.messages, tools=example.tools or None, enable_thinking=example.thinking
        )
        for example in examples
    ]


def answer(prompt: Prompt, *, llm: LLM, params: SamplingParams) -> RequestOutput:
    """Return the answer to one prompt. Raises ValueError for a prompt that cannot run."""
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    if output.outputs[0].error is not None:
        raise ValueError(output.outputs[0].error)
    return output


def race(
    answers: Mapping[str, Answer],
    prompts: Sequence[Prompt],
    repeats: int,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Run]:
    """Answer every prompt in every way, alternating between the ways so that they share the
    machine's conditions.

    A prompt's time is the fastest of `repeats`, after a warm-up. on_answer: called after each
    answer.
    """
    seconds = {name: [float("inf")] * len(prompts) for name in answers}
    outputs: dict[str, list[Any]] = {name: [None] * len(prompts) for name in answers}
    for repeat in range(repeats + 1):
        for i, prompt in enumerate(prompts if repeat else prompts[:1]):
            for name, answer in answers.items():
                began = time.perf_counter()
                outputs[name][i] = answer(prompt)
                if repeat:
                    seconds[name][i] = min(seconds[name][i], time.perf_counter() - began)
                on_answer()
    return {name: Run(outputs[name], seconds[name]) for name in answers}


def choose_examples(count: int) -> list[Example]:
    """Return the demo models' held-out examples, cycling through the families; of every 24, half
    with thinking and half from templates that training never saw."""
    _check("prompts", count)
    read_heldout(count)  # raises if there are fewer
    pool = read_heldout()  # rounds of one example per family, with and without thinking in pairs
    rounds = range(-(-count // len(FAMILIES)))
    turns = [4 * (n // 4) + (0, 3, 2, 1)[n % 4] for n in rounds]
    return [pool[turn * len(FAMILIES) + f] for turn in turns for f in range(len(FAMILIES))][:count]


def _check(name: str, count: object) -> None:
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"{name} is {count!r}, but must be a whole number of at least 1.")


def compare(plain: Run, drafted: Run, llm: LLM) -> dict[str, Any]:
    """Return the figures of both runs. acceptance_length: tokens per step, with or without drafts,
    not counting each answer's first token, which the prefill generates. off_reason: why no step had
    drafts, None if some had. rest_reason: why some steps of answers that may draft had none."""
    reports = [r for output in drafted.outputs if (r := output.outputs[0].speculation) is not None]
    steps = sum(report.counts.rows - report.counts.num_verified for report in reports)
    rest_reasons = [reason for report in reports if (reason := report.rest_reason) is not None]
    off_reasons = [report.off_reason for report in reports if not report.used]
    num_tokens = sum(len(output.outputs[0].token_ids) - 1 for output in drafted.outputs)
    same = [
        a.outputs[0].token_ids == b.outputs[0].token_ids
        for a, b in zip(plain.outputs, drafted.outputs, strict=True)
    ]
    return {
        "plain_tokens_per_s": round(plain.rate, 1),
        "dflash_tokens_per_s": round(drafted.rate, 1),
        "speedup": round(drafted.rate / plain.rate, 3),
        "acceptance_length": round(num_tokens / steps, 3) if steps else None,
        "off_reason": off_reasons[0] if off_reasons and len(off_reasons) == len(reports) else None,
        "rested_share": round(sum(r.counts.skipped_steps for r in reports) / steps, 3)
        if steps
        else 0.0,
        "rest_reason": rest_reasons[0] if rest_reasons else None,
        "identical": all(same),
        "prompts": len(same),
        "tokens": drafted.tokens,
        "device": str(llm.engine.resolved.device),
        "dtype": str(llm.engine.resolved.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def run_demo(
    config: EngineConfig, *, prompts: int, max_tokens: int, repeats: int, as_json: bool
) -> int:
    """Run the demo, on the demo models' tasks or, with a named target, on chats; return 0 if both
    ways gave identical tokens, else 1."""
    _check("prompts", prompts)
    named = bool(config.target)
    examples = chat_examples(prompts) if named else choose_examples(prompts)
    _check("repeats", repeats)
    _check("max_tokens", max_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    config = replace(config, method=DRAFTER_METHOD if named else None, enable_prefix_caching=False)
    config = locate_models(config)
    with Progress("Loading the models, and warming up"):
        drafting = LLM(**_options(config))
        plain = LLM(**_options(config.without_draft()))
    example_prompts = prompts_of(drafting, examples)
    if not as_json:
        _stream(drafting, examples[0], example_prompts[0], params)
        print("\nComparing plain decoding with DFlash, one request at a time ...", flush=True)
    ways = {
        "plain": partial(answer, llm=plain, params=params),
        "dflash": partial(answer, llm=drafting, params=params),
    }
    total = len(ways) * (1 + repeats * len(example_prompts))
    with Progress("Comparing", total, unit="answers") as shown:
        runs = race(ways, example_prompts, repeats, shown.advance)
    figures = compare(runs["plain"], runs["dflash"], drafting)
    if named:
        figures["kinds"] = _by_kind(examples, runs, drafting)
    if as_json:
        print(json.dumps(figures))
    else:
        _table(figures)
    return 0 if figures["identical"] else 1


def _by_kind(
    examples: Sequence[Example], runs: Mapping[str, Run], llm: LLM
) -> dict[str, dict[str, Any]]:
    """Return rates, speed-up and acceptance length of each kind of prompt."""
    kinds: dict[str, list[int]] = {}
    for i, example in enumerate(examples):
        kinds.setdefault(example.family, []).append(i)
    names = ("plain_tokens_per_s", "dflash_tokens_per_s", "speedup", "acceptance_length")
    figures = {k: compare(runs["plain"].of(i), runs["dflash"].of(i), llm) for k, i in kinds.items()}
    return {kind: {name: figures[kind][name] for name in names} for kind in kinds}


def _options(config: EngineConfig) -> dict[str, Any]:
    return dict(vars(config))


def _stream(llm: LLM, example: Example, prompt: Prompt, params: SamplingParams) -> None:
    """Print a prompt and stream its answer; on a terminal, every other step is bold."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, emoji=False)
    question = next(m["content"] for m in reversed(example.messages) if m["role"] == "user")
    question_line = Text.assemble(("prompt>", "bold cyan"), " ", question)
    console.print(question_line, soft_wrap=not console.is_terminal)
    console.print("[bold green]strobe>[/bold green] ", end="")
    bold = ("\033[1m", "\033[0m") if console.is_terminal and not console.no_color else ("", "")
    wrapping = Wrapping(console, column=len("strobe> "))
    last = None
    for step, delta in enumerate(llm.stream(prompt, params)):
        print(wrapping.wrap(delta.text, *(bold if step % 2 else ())), end="", flush=True)
        last = delta
    console.print()
    report = last.output.speculation if last is not None else None
    if last is not None and report is not None and report.used:
        num_tokens = len(last.output.token_ids)
        weight = " (alternately normal and bold)" if console.is_terminal else ""
        console.print(
            f"[dim]{counted(num_tokens, 'token')} in "
            f"{counted(report.counts.steps, 'verify step')}{weight}, "
            f"{report.counts.acceptance_length:.2f} per step.[/dim]"
        )


def _table(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for name in ("", "tokens/s", "tokens per step", "speed-up"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("plain decoding", f"{figures['plain_tokens_per_s']:.1f}", "1.00", "1.00x")
    kinds: dict[str, dict[str, Any]] = figures.get("kinds", {})
    for name, row in ({"DFlash": figures} | {f"  {kind}": kinds[kind] for kind in kinds}).items():
        length = row["acceptance_length"]
        table.add_row(
            name,
            f"{row['dflash_tokens_per_s']:.1f}",
            "-" if length is None else f"{length:.2f}",
            f"{row['speedup']:.2f}x",
        )
    console = Console(highlight=False)
    console.print(table)
    if figures["off_reason"] is not None:
        console.print(f"DFlash drafted nothing: {figures['off_reason']}.")
    elif figures["rest_reason"] is not None:
        console.print(
            f"Drafting rested in {figures['rested_share']:.0%} of the steps: "
            f"{figures['rest_reason']}.",
            soft_wrap=not console.is_terminal,
        )
    same = "identical" if figures["identical"] else "[bold red]NOT identical[/bold red]"
    console.print(
        f"{counted(figures['prompts'], 'prompt' if kinds else 'held-out prompt')}, "
        f"{counted(figures['tokens'], 'token')}, outputs {same}; "
        f"{figures['device']}, {figures['dtype']}, torch {figures['torch']}.",
        soft_wrap=not console.is_terminal,
    )
