"""Strobe and others on a CPU, on the same prompts in turn: tokens/s, prompts included.

    python benchmarks/cpu_peers.py [--gguf FILE] [--hf DIR] [--concurrency 1,8,32] [--rounds 3]

Every way is a process of its own that stays while the others run: Strobe in each weight format,
plain and with drafts; llama.cpp on the GGUF file (one request); transformers, with --hf, on the
same model in fp32. llama.cpp gets an environment in --environments, made if it is missing.
The load before each round is printed: other processes make the table worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

PROMPTS = (
    "Write a Python function that reverses a string.",
    "Explain in three sentences why the sky is blue.",
    "List five fruits and their colours.",
    "Rewrite in the past tense: I go to the market and buy apples.",
)
STROBE = {
    "default": {},
    "float32": {"weight_dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int4": {"weight_dtype": "int4"},
}
Answer = Callable[[list[str]], int]
"""Answers prompts at once; returns the number of tokens."""


def strobe_answerer(options: argparse.Namespace) -> Answer:
    from strobe import LLM, SamplingParams

    name, method = options.way.split(":")[1:]
    settings: dict[str, Any] = {**STROBE[name], **({"method": method} if method == "none" else {})}
    llm = LLM(
        options.target, device="cpu", max_num_seqs=32, enable_prefix_caching=False, **settings
    )
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)

    def answer(prompts: list[str]) -> int:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(chats, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return answer


def llama_cpp_answerer(options: argparse.Namespace) -> Answer:
    from importlib import import_module

    model = import_module("llama_cpp").Llama(
        str(options.gguf),
        n_ctx=2048,
        seed=0,
        verbose=False,
        n_threads=options.threads,
        n_threads_batch=options.threads,
    )

    def answer(prompts: list[str]) -> int:
        count = 0
        for prompt in prompts:
            model.reset()  # otherwise a common prefix is reused
            reply = model.create_chat_completion(
                [{"role": "user", "content": prompt}],
                temperature=0.0,
                repeat_penalty=1.0,
                max_tokens=options.max_tokens,
            )
            count += reply["usage"]["completion_tokens"]
        return count

    return answer


def transformers_answerer(options: argparse.Namespace) -> Answer:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.hf, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.hf, dtype=torch.float32)

    @torch.inference_mode()
    def answer(prompts: list[str]) -> int:
        inputs = tokenizer.apply_chat_template(
            [[{"role": "user", "content": prompt}] for prompt in prompts],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        out = model.generate(**inputs, max_new_tokens=options.max_tokens, do_sample=False)
        answers = out[:, inputs["input_ids"].shape[1] :]
        return int((answers != tokenizer.pad_token_id).sum())

    return answer


ANSWERERS = {
    "strobe": strobe_answerer,
    "llama.cpp": llama_cpp_answerer,
    "transformers": transformers_answerer,
}


def serve(options: argparse.Namespace) -> None:
    """Answer each line of prompts with tokens and seconds."""
    answer = ANSWERERS[options.way.split(":")[0]](options)
    answer([PROMPTS[0]])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = answer(json.loads(line))
        print(json.dumps([tokens, time.perf_counter() - start]), flush=True)


class Worker:
    """A way in a process of its own."""

    def __init__(self, way: str, python: str):
        command = [python, __file__, *sys.argv[1:], "--way", way]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def rate(self, prompts: list[str]) -> float:
        """Return the tokens per second of these prompts at once."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()
        tokens, seconds = self._read()
        return tokens / seconds

    def _read(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("[", '"ready"')):
                return json.loads(line)
        raise RuntimeError(f"{self.process.args} ended; see its error above.")


def environment(directory: Path, package: str) -> str:
    """Return the interpreter of an environment with a package; make it if it is missing."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "-q", package], check=True)
    return str(python)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--hf", type=Path)
    parser.add_argument("--environments", type=Path, default=Path(".peers"))
    parser.add_argument("--ways", help="comma-separated; all by default")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        return serve(options)
    ways = [f"strobe:{name}:{method}" for name in STROBE for method in ("none", "dflash")]
    ways += ["llama.cpp"] if options.gguf else []
    ways += ["transformers"] if options.hf else []
    ways = options.ways.split(",") if options.ways else ways
    workers: dict[str, Worker] = {}
    for way in ways:
        python = sys.executable
        if way == "llama.cpp":
            python = environment(options.environments / "llamacpp", "llama-cpp-python")
        workers[way] = Worker(way, python)
    counts = [int(count) for count in options.concurrency.split(",")]
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds):
        print(f"round {number + 1}: load {os.getloadavg()[0]:.2f}", flush=True)
        for count in counts:
            for way, worker in workers.items():
                if way == "llama.cpp" and count > 1:
                    continue
                batches = [[prompt] * count for prompt in PROMPTS] if count == 1 else []
                batches = batches or [[PROMPTS[i % len(PROMPTS)] for i in range(count)]]
                own = [worker.rate(batch) for batch in batches]
                rates.setdefault((way, count), []).append(len(own) / sum(1 / r for r in own))
    print(f"| way | {' | '.join(map(str, counts))} |\n|---|{'---|' * len(counts)}")
    for way in ways:
        cells = [rates.get((way, count)) for count in counts]
        print(f"| {way} | {' | '.join(f'{median(c):.1f}' if c else '' for c in cells)} |")


if __name__ == "__main__":
    main()
