"""Measure what shadow mode costs: answers with and without it, whose steps alternate, so that other
work on the machine slows both.

python -m scripts.shadow_cost [TARGET DRAFT]
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from statistics import median

import torch

from strobe import __version__
from strobe.config import DEMO_MODELS, EngineConfig
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from strobe.text.tokenizer import Tokenizer

ROUNDS = 8
ANSWERS = 16
PROMPT = "Sort these words from A to Z: ocean, stone, umbrella, ember, water, number {}."
SAMPLING = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)


def seconds_of_both(engines: tuple[Engine, Engine], prompts: list[list[int]]) -> list[float]:
    """Answer the prompts with both engines, four at a time, one step of each in turn. Return the
    processor's seconds of each."""
    for engine in engines:
        for prompt in prompts:
            engine.add_prompt(prompt, SAMPLING)
    seconds = [0.0, 0.0]
    turn = 0
    while any(engine.has_work for engine in engines):
        turn += 1
        for i in (0, 1) if turn % 2 else (1, 0):
            started = time.process_time()
            if engines[i].has_work:
                engines[i].step()
            seconds[i] += time.process_time() - started
    return seconds


def main() -> None:
    names = sys.argv[1:] or [str(DEMO_MODELS / "target"), str(DEMO_MODELS / "draft")]
    target, draft = names
    torch.set_num_threads(1)
    tokenizer = Tokenizer(Path(target))
    options = {"target": target, "device": "cpu", "max_num_seqs": 4}
    options |= {"enable_prefix_caching": False}
    plain = Engine(EngineConfig().with_(method="none", **options))
    shadow = Engine(EngineConfig().with_(shadow=True, draft=draft, **options))
    assert shadow.shadow is not None
    print(f"strobe {__version__}, torch {torch.__version__}, {platform.machine()}, one thread")
    ratios: list[float] = []
    for number in range(1 + ROUNDS):
        texts = [PROMPT.format(f"{number}-{i}") for i in range(ANSWERS)]
        chats = [tokenizer.render([{"role": "user", "content": text}]) for text in texts]
        prompts = [tokenizer.encode_chat(chat) for chat in chats]
        without, scored = seconds_of_both((plain, shadow), prompts)
        if not number:  # warms up
            shadow.reset()
            shadow.shadow.start()
            continue
        ratios.append(without / scored)
        print(f"plain {without:.2f} s, shadow {scored:.2f} s: {ratios[-1]:.3f} of the throughput")
    stats = shadow.stats
    print(
        f"median {median(ratios):.3f}; {stats.shadow_requests} of {ROUNDS * ANSWERS} answers "
        f"scored, share of the steps' seconds {stats.shadow_seconds / stats.step_seconds:.3f}"
    )


if __name__ == "__main__":
    main()
