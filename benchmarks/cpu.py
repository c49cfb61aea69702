"""The figures of docs/performance.md for one machine: plain decoding, DFlash and transformers on
the same prompts, the engine's own work per step, and import times.

    python benchmarks/cpu.py [--prompts 24] [--json out.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_turns import Stopwatch

from strobe import LLM, EngineConfig, SamplingParams
from strobe.config import DEMO_MODELS
from strobe.engine.engine import Engine
from strobe.outputs import CompletionOutput, RequestOutput
from strobe.tools.demo_comparison import (
    Answer,
    answer,
    choose_examples,
    compare,
    prompts_of,
    race,
)


def own_work(
    pair: dict[str, str],
    prompts: list[list[int]],
    batch: int,
    *,
    alone: bool = False,
    **sampling: Any,
) -> dict[str, Any]:
    """Measure milliseconds per step at `batch` requests: of all of step(), and without target,
    drafter, their heads and attention, and observe. Medians over steps in which all requests
    decode.

    alone: the models repeat their last output immediately, so that the engine's code and data stay
    in the processor's caches; otherwise each forward evicts them.
    """
    engine = Engine(EngineConfig(**pair, max_num_seqs=batch))
    watch = Stopwatch()
    drafter = engine.proposers["dflash"]
    for runner in (engine.runner, drafter.runner):
        for owner, name in (
            (runner, "forward"),
            (runner.model, "head_part"),
            (runner.model, "argmax"),
        ):
            call = getattr(owner, name)
            setattr(owner, name, watch.wrap(remembering(call) if alone else call))
    drafter.observe = watch.wrap(drafter.observe)
    params = SamplingParams(max_tokens=600, ignore_eos=True, seed=1, **sampling)
    for i in range(batch):
        engine.add(prompts[i % len(prompts)], params)
    own_seconds, step_seconds = [], []
    while engine.has_work:
        steady = len(engine.scheduler.running) == batch and not engine.scheduler.waiting
        steady = steady and all(r.is_decoding for r in engine.scheduler.running)
        watch.seconds, began = 0.0, time.perf_counter()
        engine.step()
        passed = time.perf_counter() - began
        if steady:
            own_seconds.append(passed - watch.seconds)
            step_seconds.append(passed)
        if len(own_seconds) == 60:
            break
    return {
        "batch": batch,
        "own_ms": round(1e3 * median(own_seconds), 3),
        "step_ms": round(1e3 * median(step_seconds), 3),
        "steps": len(own_seconds),
    }


def remembering(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that repeats the call's last output for the same number of rows."""
    last: dict[int, Any] = {}

    def answer(rows: Any) -> Any:
        key = len(rows.ids) if hasattr(rows, "ids") else len(rows)
        if key not in last:
            last[key] = call(rows)
        return last[key]

    return answer


def transformers_answerer(target: str, tokens: int) -> Answer:
    """Return a function that runs transformers' greedy generate in fp32, with a RequestOutput."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)

    @torch.inference_mode()
    def answer(prompt: Any) -> RequestOutput:
        output_ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
        )
        answer = CompletionOutput(0, token_ids=output_ids[0, len(prompt) :].tolist())
        return RequestOutput("", None, prompt, [answer])

    return answer


def seconds_of(code: str) -> float:
    """Return the wall seconds of a fresh interpreter that runs `code`, the best of five."""
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, time.perf_counter() - began)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(DEMO_MODELS / "target"))
    parser.add_argument("--draft", default=str(DEMO_MODELS / "draft"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pair = {"target": options.target, "draft": options.draft}
    examples = choose_examples(options.prompts)
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)

    plain = LLM(options.target, method="none", enable_prefix_caching=False)
    drafting = LLM(options.target, options.draft, enable_prefix_caching=False)
    prompts = prompts_of(plain, examples)
    ways = {
        "transformers": transformers_answerer(options.target, options.max_tokens),
        "plain": partial(answer, llm=plain, params=params),
        "dflash": partial(answer, llm=drafting, params=params),
    }
    runs = race(ways, prompts, options.repeats)
    rate = {name: run.rate for name, run in runs.items()}
    tokens = {
        name: [output.outputs[0].token_ids for output in run.outputs] for name, run in runs.items()
    }
    figures = compare(runs["plain"], runs["dflash"], drafting)
    bare = seconds_of("import torch")
    figures = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "identical": figures["identical"],
        "same_as_transformers": tokens["transformers"] == tokens["plain"],
        "prompts": len(prompts),
        "tokens": figures["tokens"],
        "transformers_tokens_per_s": round(rate["transformers"], 1),
        "plain_tokens_per_s": round(rate["plain"], 1),
        "dflash_tokens_per_s": round(rate["dflash"], 1),
        "plain_over_transformers": round(rate["plain"] / rate["transformers"], 3),
        "dflash_over_plain": round(rate["dflash"] / rate["plain"], 3),
        "dflash_over_transformers": round(rate["dflash"] / rate["transformers"], 3),
        "acceptance_length": figures["acceptance_length"],
        "own_work_greedy": [own_work(pair, prompts, n, temperature=0.0) for n in (1, 32)],
        "own_work_greedy_alone": [
            own_work(pair, prompts, n, alone=True, temperature=0.0) for n in (1, 32)
        ],
        "own_work_temperature_1": [own_work(pair, prompts, n, temperature=1.0) for n in (1, 32)],
        "own_work_top_p_0.9": [
            own_work(pair, prompts, n, temperature=1.0, top_p=0.9) for n in (1, 32)
        ],
        "import_strobe_s_beyond_torch": round(
            seconds_of("import torch, strobe; strobe.LLM") - bare, 3
        ),
        "help_s": round(
            seconds_of(
                "import sys, runpy; sys.argv = ['strobe', '--help']\n"
                "runpy.run_module('strobe', run_name='__main__')"
            ),
            3,
        ),
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
