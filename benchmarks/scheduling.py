"""The scheduler's own time per request and step, with many requests and pages; no model runs.

    python benchmarks/scheduling.py [--requests N] [--pages N] [--steps N]

Requests decode with drafts, of which some are accepted; as many more wait. Each answer ends after
its tokens, and the next request takes its place.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import time
from datetime import date

from strobe.config import Limits
from strobe.engine.scheduler import Scheduler
from strobe.kv.pages import PagePool
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.proposer import Drafter
from strobe.step import Plan, StepResult

NUM_DRAFTS = 7
PROMPT = 512
ANSWER = 256


def request(number: int, noise: random.Random) -> Request:
    """Return a request with a prompt of its own."""
    return Request(
        f"request-{number}",
        [noise.randrange(1 << 17) for _ in range(PROMPT)],
        SamplingParams(max_tokens=ANSWER),
        seed=number,
        method="dflash",
        num_drafts=NUM_DRAFTS,
        key=number,
    )


def result_of(plan: Plan, noise: random.Random) -> StepResult:
    """Return a result that accepts some of each span's drafts."""
    num_accepted = [noise.randint(0, 4) if span.num_drafts else 0 for span in plan.spans]
    tokens = [
        [1] * (1 + accepted) if span.num_logits else []
        for span, accepted in zip(plan.spans, num_accepted, strict=True)
    ]
    return StepResult(tokens=tokens, num_accepted=num_accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    gc.freeze()  # as in a server
    gc.set_threshold(50_000, 20, 50)
    noise = random.Random(0)
    limits = Limits(4096, options.requests, 16_384, NUM_DRAFTS, 16, NUM_DRAFTS + 1, None)
    scheduler = Scheduler(
        limits,
        PagePool(options.pages, limits.page_size),
        drafters={"dflash": Drafter(device="dflash")},
    )
    number = 0
    seconds = 0.0
    spans = 0
    for step in range(options.steps + 100):
        while len(scheduler.waiting) < options.requests:
            scheduler.add(request(number, noise))
            number += 1
        started = time.process_time()
        plan = scheduler.plan()
        planned = time.process_time()
        result = result_of(plan, noise)
        accepted = time.process_time()
        scheduler.commit(plan, result)
        ended = time.process_time()
        if step >= 100:
            seconds += planned - started + ended - accepted
            spans += len(plan.spans)
    print(f"{date.today()}, {platform.processor() or platform.machine()}, time of one core")
    print(
        f"{options.requests} requests, as many waiting, {options.pages} pages: "
        f"{spans / options.steps:.0f} spans a step, {1e6 * seconds / spans:.1f} us for each; "
        f"{scheduler.stats.preemptions} preemptions"
    )


if __name__ == "__main__":
    main()
