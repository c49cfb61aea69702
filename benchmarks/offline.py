"""What LLM.generate adds to the engine's own time: prompts to tokens, and tokens to text.

    python benchmarks/offline.py [--requests 256] [--max-tokens 256] [--rounds 5] [--device auto]

The demo models answer the same prompts in turns by `Engine.add` and `Engine.step` alone, and by
`LLM.generate`, without a stop string and with one that never comes, which needs text in each step.
Medians over rounds; the first round warms up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

from strobe import LLM, SamplingParams
from strobe.tools.demo_comparison import choose_examples, prompts_of


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    llm = LLM(
        device=options.device,
        max_num_seqs=options.requests,
        max_model_len=1024,
        kv_cache_memory="4GiB",
        enable_prefix_caching=False,
    )
    examples: list[list[int]] = prompts_of(llm, choose_examples(min(options.requests, 64)))
    prompts = [examples[i % len(examples)] for i in range(options.requests)]
    params = SamplingParams(temperature=0, max_tokens=options.max_tokens, ignore_eos=True)

    def by_engine() -> None:
        for prompt in prompts:
            llm.engine.add(prompt, params)
        while llm.engine.has_work:
            llm.engine.step()

    def by_generate(asked: SamplingParams) -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)

    ways: dict[str, Callable[[], None]] = {
        "engine": by_engine,
        "generate": lambda: by_generate(params),
        "generate, stop string": lambda: by_generate(params.clone(stop=["\x00never"])),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    steps: dict[str, list[int]] = {way: [] for way in ways}
    for _ in range(options.rounds + 1):
        for way, run in ways.items():
            before, started = llm.engine.stats.steps, time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - started)
            steps[way].append(llm.engine.stats.steps - before)
    engine = median(seconds["engine"][1:])
    for way in ways:
        ms = 1e3 * median(seconds[way][1:]) / median(steps[way][1:])
        share = median(seconds[way][1:]) / engine
        print(json.dumps({"way": way, "ms_per_step": round(ms, 3), "of_engine": round(share, 3)}))


if __name__ == "__main__":
    main()
