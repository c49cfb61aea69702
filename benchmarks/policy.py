"""What a policy makes of traces where steps cost what a table says; no model runs.

    python benchmarks/policy.py [--costs FILE] [--traces FILE] [--concurrency 1,8,64] [--settle]

Each way verifies the same answers; requests never end, but go on with the next answer. One step is
in flight: a choice knows the results of the steps before it but for the newest. `--settle` has all
requests go from easy texts to hard ones and back, 400 steps each, and compares what the second half
of a phase brings with the best other way. FILE of --costs is one of `strobe bench load --json`;
without it, that of Qwen3-8B's shapes on an H200.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from strobe.kernels.reference_narrow import choose_drafts
from strobe.request import Request
from strobe.runner.buckets import Buckets, verified_rows
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy
from strobe.speculation.costs import Rates, StepCosts, StepWork
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.step import TAIL, Plan, Span, StepResult, num_rows
from strobe.tools.bench.draft_traces import Traces, independent, load
from strobe.tools.bench.request_load import TRACES

COSTS = Path(__file__).parent / "costs_h200.json"
"""Of the date and command in it."""
CONTEXT = 144  # positions of each request
PHASE = 400  # steps of a text of one kind
WAYS = ("plain", "3", "7", "15", "adaptive")


def costs(path: Path) -> StepCosts:
    """Return the costs in a file of `strobe bench load --json`."""
    found = json.loads(path.read_text())["costs"]
    tables = [{int(n): ms for n, ms in found[name].items()} for name in ("draft", "verify")]
    return StepCosts(*tables, **{name: found[name] for name in Rates._fields if name in found})


class Turn(NamedTuple):
    """Tokens made in so many milliseconds."""

    tokens: int = 0
    ms: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return 1e3 * self.tokens / self.ms


@dataclass
class World:
    """Requests at places of traces, and a way to decide on their drafts."""

    way: str
    traces: Traces
    table: Path
    count: int
    slots: tuple[int, ...]
    seed: int = 0
    turn: Turn = field(default_factory=Turn)
    flying: deque[tuple[Plan, StepResult]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        widths, block = self.traces.widths, self.slots[-1]
        padded = "NVIDIA" in json.loads(self.table.read_text())["device"]
        buckets = Buckets(self.count, widths[-1], block) if padded else None
        self.true, self.policy = costs(self.table), DraftPolicy()
        if self.way == "adaptive":
            rows = functools.partial(verified_rows, buckets)
            self.policy = AdaptiveDraftPolicy(widths, self.slots, rows, 512, self.count)
            self.policy.costs = costs(self.table)
        self.buckets, self.rng = buckets, np.random.default_rng(self.seed)
        most = {"plain": 0, "adaptive": widths[-1]}.get(self.way)
        most = int(self.way) if most is None else most
        one = Request("r", [1], SamplingParams(), seed=0)
        self.candidates = [Candidate(one, most, slot=i) for i in range(self.count)]
        self.turn_to(self.traces)

    def turn_to(self, traces: Traces) -> None:
        """All requests go on with answers of these."""
        self.traces = traces
        self.places = self.rng.choice(traces.starts, self.count)

    def step(self) -> None:
        widths, load = self.traces.widths, BatchLoad(0, self.count * CONTEXT)
        found = self.policy.plan(self.candidates, load)
        longest = max(found.max_drafts)
        width = next((i for i, n in enumerate(widths) if n >= longest), 0)
        right = np.minimum(self.traces.right[self.places, width], found.max_drafts)
        margins = self.traces.margins[width][self.places].astype(np.float64)
        verified = _verified(found, margins)
        accepted = np.minimum(right, verified)
        spans = tuple(
            Span(i, CONTEXT, CONTEXT, (TAIL,), n, "dflash" if n else None, 1 + n)
            for i, n in enumerate(found.max_drafts)
        )
        plan = Plan(spans, (), (), found.num_verified, found.confidence)
        rows = num_rows(spans, found.num_verified)
        rows = (
            rows if self.buckets is None else self.buckets.shape_of(spans, found.num_verified).rows
        )
        drafting = sum(n > 0 for n in found.max_drafts)
        work = StepWork(
            draft_rows=drafting * self.slots[width],
            rows=rows,
            requests=self.count,
            context=self.count * CONTEXT,
            drafting=drafting,
            drafts=int(verified.sum()),
        )
        ms = float(self.true.ms(work))
        self.turn = Turn(self.turn.tokens + self.count + int(accepted.sum()), self.turn.ms + ms)
        told = margins.tolist() if longest else None
        result = StepResult([], accepted.tolist(), rows, ms / 1e3, verified.tolist(), told)
        self.flying.append((plan, result))
        if len(self.flying) > 1:
            self.policy.observe(*self.flying.popleft())
        self.places = (self.places + 1 + accepted) % len(self.traces.right)

    @property
    def tokens(self) -> int:
        return self.turn.tokens

    def run(self, more: Callable[[], bool]) -> Turn:
        """Step as long as there is more to do."""
        self.turn = Turn()
        while more():
            self.step()
        return self.turn

    def run_for(self, steps: int) -> Turn:
        left = iter(range(steps))
        return self.run(lambda: next(left, None) is not None)


def _verified(found: DraftPlan, margins: Any) -> Any:
    """Drafts verified of each request, as the device chooses them."""
    if found.num_verified is None:
        return np.array(found.max_drafts)
    given = [torch.from_numpy(margins).float(), torch.tensor(found.confidence)[: margins.shape[1]]]
    return choose_drafts(*given, torch.tensor(found.max_drafts), found.num_verified).numpy()


def compare(options: argparse.Namespace, traces: Traces, count: int, way: str) -> list[Turn]:
    """After as many tokens of each request as it may learn from, and half as many before."""
    found: list[Turn] = []
    for seed in range(options.seeds):
        world = World(way, traces, options.costs, count, options.slots, seed)
        world.run(lambda world=world: world.tokens < count * options.tokens // 2)
        found.append(world.run(lambda world=world: world.tokens < count * options.tokens))
    return [Turn(*map(sum, zip(*found, strict=True)))]


def settle(options: argparse.Namespace, traces: Traces, count: int, way: str) -> list[Turn]:
    """The second half of the hard phases, and of the easy ones behind them."""
    easy, hard = traces.arranged("easy"), traces.arranged("hard")
    found: tuple[list[Turn], list[Turn]] = [], []
    for seed in range(options.seeds):
        world = World(way, easy, options.costs, count, options.slots, seed)
        world.run_for(PHASE)
        for phase in range(4):
            world.turn_to(easy if phase % 2 else hard)
            world.run_for(PHASE // 2)
            found[phase % 2].append(world.run_for(PHASE // 2))
    return [Turn(*map(sum, zip(*turns, strict=True))) for turns in found]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--costs", type=Path, default=COSTS)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--mix", default="all")
    parser.add_argument("--acceptance-rate", type=float)
    parser.add_argument("--concurrency", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--tokens", type=int, default=600, help="of each request")
    parser.add_argument("--settle", action="store_true")
    parser.add_argument("--seeds", type=int, default=3, help="whose tokens are added up")
    options = parser.parse_args(argv)
    traces = load(options.traces)
    options.slots = tuple(n + 1 for n in traces.widths)
    if options.acceptance_rate is not None:
        traces = independent(options.acceptance_rate, traces.widths)
    traces = traces.arranged(options.mix)
    for count in map(int, options.concurrency.split(",")):
        kind = settle if options.settle else compare
        found = {way: kind(options, traces, count, way) for way in WAYS}
        for i, phase in enumerate(("hard", "easy") if options.settle else ("",)):
            rates = {way: turns[i].rate for way, turns in found.items()}
            own = rates["adaptive"]
            best = max((rate, way) for way, rate in rates.items() if way != "adaptive")
            shown = ", ".join(f"{way} {rate:,.0f}" for way, rate in rates.items())
            print(f"c = {count} {phase}: {shown}; {own / best[0]:.3f} of {best[1]}", flush=True)


if __name__ == "__main__":
    main()
