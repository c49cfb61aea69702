"""Step times with sampling, logits processors and grammars on a GPU, relative to greedy decoding.

    python benchmarks/modes.py [--shapes qwen3-8b] [--concurrency 1,8] [--steps 60] [--json FILE]

Random weights of published shapes and a synthetic tokenizer of their vocabulary size. Only the time
per step counts; each step verifies a whole block, without forced acceptance. The modes alternate.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from strobe import EngineConfig, SamplingParams
from strobe.engine.engine import Engine
from strobe.tools.bench.engine_step import random_prompts
from strobe.tools.bench.published_shapes import NAMES, directories
from strobe.tools.report import circumstances

GREEDY = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 3},
        "note": {"type": "string"},
    },
    "required": ["name", "tags", "note"],
    "additionalProperties": False,
}
MODES = {
    "greedy": GREEDY,
    "temperature 1, top-p 0.9": GREEDY.clone(temperature=1.0, top_p=0.9, seed=1),
    "penalties and bias": GREEDY.clone(
        presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1, logit_bias={5: 1.0}
    ),
    "JSON schema": GREEDY.clone(structured_outputs={"json": SCHEMA}, ignore_eos=False),
}


def write_tokenizer(directory: Path, size: int) -> None:
    """Make a byte-level tokenizer of this size: bytes, pairs and triples of bytes, end tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    common = alphabet[:94]
    for width in (2, 3):
        for i in range(len(common) ** width):
            if len(vocab) >= size - 300:
                break
            digits = [common[i // len(common) ** j % len(common)] for j in range(width)]
            vocab["".join(digits)] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([f"<|special {i}|>" for i in range(size - len(vocab))])
    tokenizer.save(str(directory / "tokenizer.json"))


def step_seconds(engine: Engine, params: SamplingParams, count: int, steps: int) -> float:
    """Return the median seconds of a step while `count` requests decode."""
    requests = [engine.add(prompt, params) for prompt in random_prompts(engine, count, 256)]
    while not all(request.num_output > 4 for request in requests):
        engine.step()
    seconds: list[float] = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / 4)
        if any(request.finish_reason for request in requests):
            break
    for request in requests:
        engine.finish(request, "abort")
    while engine.has_work:
        engine.step()
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="qwen3-8b", choices=NAMES)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--steps", type=int, default=15, help="groups of four steps, timed")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.concurrency.split(",")]
    result: dict[str, Any] = {}
    with directories(arguments.shapes) as (target, draft):
        size = json.loads((Path(target) / "config.json").read_text())["vocab_size"]
        write_tokenizer(Path(target), size)
        config = EngineConfig(
            str(target), draft=str(draft), load_format="dummy", max_model_len=2048,
            enable_prefix_caching=False, max_num_seqs=max(counts),
        )  # fmt: skip
        engine = Engine(config)
        result |= circumstances("python benchmarks/modes.py", engine.resolved)
        for count in counts:
            rounds = [
                {
                    name: step_seconds(engine, mode, count, arguments.steps)
                    for name, mode in MODES.items()
                }
                for _ in range(3)
            ]
            times = {name: min(round_times[name] for round_times in rounds) for name in MODES}
            result[str(count)] = times
            for name, seconds in times.items():
                share = seconds / times["greedy"]
                print(f"c = {count}: {name}: {1e3 * seconds:.3f} ms, {share:.3f} of greedy")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
