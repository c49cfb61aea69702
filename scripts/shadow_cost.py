"""Measure what shadow mode costs: answers of the demo models with and without it, in turn.

python -m scripts.shadow_cost
"""

from __future__ import annotations

import time
from statistics import median

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from strobe.text.tokenizer import Tokenizer

REPEATS = 5
ANSWERS = 24
PROMPT = "Sort these words from A to Z: ocean, stone, umbrella, ember, water, number {}."


def tokens_per_second(engine: Engine, prompts: list[list[int]]) -> float:
    """Answer the prompts, four at a time, and return the throughput."""
    sampling = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
    before = engine.stats.generation_tokens
    started = time.perf_counter()
    for prompt in prompts:
        engine.add_prompt(prompt, sampling)
    while engine.has_work:
        engine.step()
    return (engine.stats.generation_tokens - before) / (time.perf_counter() - started)


def main() -> None:
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    texts = [PROMPT.format(i) for i in range(ANSWERS)]
    chats = [tokenizer.render([{"role": "user", "content": text}]) for text in texts]
    prompts = [tokenizer.encode_chat(chat) for chat in chats]
    options = {"device": "cpu", "max_num_seqs": 4, "enable_prefix_caching": False}
    plain = Engine(EngineConfig().with_(method="none", **options))
    shadow = Engine(EngineConfig().with_(shadow=True, draft="auto", **options))
    assert shadow.shadow is not None
    for engine in (plain, shadow):
        tokens_per_second(engine, prompts[:4])
    shadow.shadow.start()
    ratios: list[float] = []
    for _ in range(REPEATS):
        without = tokens_per_second(plain, prompts)
        scored = tokens_per_second(shadow, prompts)
        ratios.append(scored / without)
        print(f"plain {without:.0f} tokens/s, shadow {scored:.0f} tokens/s: {ratios[-1]:.3f}")
    share = shadow.stats.shadow_seconds / shadow.stats.step_seconds
    print(f"median {median(ratios):.3f}; {shadow.stats.shadow_requests} answers scored, ", end="")
    print(f"share of the steps' seconds {share:.3f}")


if __name__ == "__main__":
    main()
