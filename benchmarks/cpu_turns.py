"""Compare two versions of Strobe on one CPU: tokens per second and the engine's own work per step.

    python benchmarks/cpu_turns.py BEFORE [--rounds 3] [--prompts 12] [--json FILE]

BEFORE is a checkout of the earlier version; the later one is this. Each version runs in its own
process, which answers the same prompts with the demo models of this checkout, or runs one step,
while the other waits, so that drift of the machine affects both. A prompt's time is the fastest of
`repeats`; own work is defined as in benchmarks/cpu.py, the median over steps. Each round starts new
processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

AFTER = Path(__file__).parents[1]
OWN_WORK = ((1, 0.0), (32, 0.0), (1, 1.0), (32, 1.0))  # requests, temperature
STEPS, MIN_STEPS = 60, 15


class Stopwatch:
    """Time spent in wrapped calls; a wrapped call within another one counts once."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds, self.depth, self.clock = 0.0, 0, clock

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            self.depth, began = self.depth + 1, self.clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.depth -= 1
                if not self.depth:
                    self.seconds += self.clock() - began

        return timed_call


class Worker:
    """One version; it answers questions, one line each."""

    def __init__(self, models: Path) -> None:
        import strobe
        from strobe import LLM

        is_here = Path(strobe.__file__).resolve().is_relative_to(Path.cwd().resolve())
        assert is_here, f"{Path.cwd()} holds no strobe: this is {strobe.__file__}"
        self.pair = {"target": str(models / "target"), "draft": str(models / "draft")}
        self.llms = {
            "plain": LLM(self.pair["target"], method="none", enable_prefix_caching=False),
            "dflash": LLM(**self.pair, enable_prefix_caching=False),
        }
        self.engine: Any = None
        self.watch = Stopwatch()

    def answer(self, way: str, ids: list[int]) -> tuple[float, list[int]]:
        """Answer a prompt greedily; return seconds and tokens."""
        from strobe import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=256)
        began = time.perf_counter()
        (output,) = self.llms[way].generate([ids], params, use_tqdm=False)
        return time.perf_counter() - began, output.outputs[0].token_ids

    def start(self, prompts: list[list[int]], temperature: float) -> None:
        """Add a request for each prompt, and step until all decode."""
        from strobe import EngineConfig, SamplingParams
        from strobe.engine.engine import Engine

        engine = self.engine = Engine(EngineConfig(**self.pair, max_num_seqs=len(prompts)))
        drafter = getattr(engine.proposers, "proposers", engine.proposers)["dflash"]
        for runner in (engine.runner, drafter.runner):
            model = runner.model
            for owner, name in ((runner, "forward"), (model, "head_part"), (model, "argmax")):
                if hasattr(owner, name):  # an earlier version called argmax within forward
                    setattr(owner, name, self.watch.wrap(getattr(owner, name)))
        drafter.observe = self.watch.wrap(drafter.observe)
        params = SamplingParams(max_tokens=600, ignore_eos=True, seed=1, temperature=temperature)
        for ids in prompts:
            engine.add(ids, params)
        while not self.steady():
            engine.step()
        self.requests = len(prompts)

    def steady(self) -> bool:
        """Return whether no request waits and all running ones decode."""
        scheduler = self.engine.scheduler
        return not scheduler.waiting and all(
            r.start >= getattr(r, "prefill_end", getattr(r, "goal", 0)) for r in scheduler.running
        )

    def step(self) -> float | None:
        """Run a step; return the seconds of the engine's own work, None once a request has
        ended."""
        if len(self.engine.scheduler.running) < self.requests or not self.steady():
            return None
        self.watch.seconds, began = 0.0, time.perf_counter()
        self.engine.step()
        return time.perf_counter() - began - self.watch.seconds

    def serve(self) -> None:
        for line in sys.stdin:
            name, *arguments = json.loads(line)
            print(json.dumps(getattr(self, name)(*arguments)), flush=True)


class Version:
    """A worker process in the tree of one version."""

    def __init__(self, tree: Path) -> None:
        models = str(AFTER / "strobe" / "demo_models")
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", models, str(tree)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )

    def ask(self, *question: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


def measured(
    trees: dict[str, Path], prompts: list[list[int]], repeats: int
) -> dict[str, dict[str, float]]:
    """Start a process for each version and return figures by cell and version."""
    versions = {name: Version(tree) for name, tree in trees.items()}
    names = list(versions)
    figures: dict[str, dict[str, float]] = {}
    for way in ("plain", "dflash"):
        seconds, tokens = dict.fromkeys(names, 0.0), 0
        for ids in prompts:
            fastest, answers = dict.fromkeys(names, float("inf")), dict[str, list[int]]()
            for turn in range(repeats):
                for name in names[:: 1 if turn % 2 else -1]:
                    took, answers[name] = versions[name].ask("answer", way, ids)
                    fastest[name] = min(fastest[name], took)
            assert answers["before"] == answers["after"], "the versions answer differently"
            tokens += len(answers["after"])
            for name in names:
                seconds[name] += fastest[name]
        figures[f"{way}, tokens/s"] = {name: tokens / seconds[name] for name in names}
    for count, temperature in OWN_WORK:
        took = {name: list[float]() for name in names}
        for name in names:
            versions[name].ask("start", (prompts * 32)[:count], temperature)
        for turn in range(STEPS // (2 if count > 1 else 1)):
            for name in names[:: 1 if turn % 2 else -1]:
                if (seconds := versions[name].ask("step")) is not None:
                    took[name].append(seconds)
        assert all(len(times) >= MIN_STEPS for times in took.values()), "requests end too early"
        cell = f"own work, requests: {count}, temperature {temperature:g}, ms"
        figures[cell] = {name: 1e3 * median(took[name]) for name in names}
    for version in versions.values():
        version.process.kill()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.worker:
        return Worker(options.worker).serve()

    from strobe import LLM
    from strobe.config import DEMO_MODELS
    from strobe.tools.demo_comparison import choose_examples, prompts_of

    llm = LLM(str(DEMO_MODELS / "target"), method="none")
    prompts = [[*map(int, p)] for p in prompts_of(llm, choose_examples(options.prompts))]
    trees = {"before": options.before.resolve(), "after": AFTER}
    rounds = []
    for _ in range(options.rounds):
        rounds.append(measured(trees, prompts, options.repeats))
        print(json.dumps(rounds[-1]), flush=True)
    figures = {
        cell: {name: round(median(r[cell][name] for r in rounds), 3) for name in trees}
        for cell in rounds[0]
    }
    for cell, row in figures.items():
        # Versions alternate within a round, so a round's change compares like with like.
        changes = [100 * (r[cell]["after"] / r[cell]["before"] - 1) for r in rounds]
        changes_text = ", ".join(f"{change:+.1f}" for change in changes)
        median_change = f"{median(changes):+.1f} % ({changes_text})"
        print(f"{cell}: {row['before']} -> {row['after']}, {median_change}")
    if options.json:
        options.json.write_text(json.dumps({"medians": figures, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
