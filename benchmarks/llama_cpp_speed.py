"""llama.cpp's speed on a GGUF file, to compare with `strobe bench offline --data` on the same file.

    python benchmarks/llama_cpp_speed.py model.gguf prompts.jsonl [--threads 2] [--max-tokens 256]

It runs in an environment of its own, without Strobe (`pip install llama-cpp-python`). Prompts are
JSON lines with `messages`, answered greedily, one at a time, each as a new context. Each round
answers all of them; the fastest counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib import import_module
from importlib.metadata import version
from pathlib import Path


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--count", type=int, default=6, help="prompts, from the start of the file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.count]
    chats = [json.loads(line)["messages"] for line in lines]
    threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    model = import_module("llama_cpp").Llama(
        str(options.model), n_ctx=2048, seed=0, verbose=False, **threads
    )
    rates: list[float] = []
    cpu_rates: list[float] = []
    for _ in range(options.rounds):
        num_tokens, began, cpu_began = 0, time.perf_counter(), time.process_time()
        for messages in chats:
            model.reset()  # otherwise a common prefix is reused
            answer = model.create_chat_completion(
                messages, temperature=0.0, repeat_penalty=1.0, max_tokens=options.max_tokens
            )
            num_tokens += answer["usage"]["completion_tokens"]
        rates.append(num_tokens / (time.perf_counter() - began))
        cpu_rates.append(num_tokens / (time.process_time() - cpu_began))
    figures = {
        "prompts": len(chats),
        "tokens": num_tokens,
        "tokens_per_second": round(max(rates), 1),
        "tokens_per_cpu_second": round(max(cpu_rates), 1),
        "rounds": [round(rate, 1) for rate in rates],
        "threads": options.threads,
        "llama-cpp-python": version("llama-cpp-python"),
        "python": platform.python_version(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
