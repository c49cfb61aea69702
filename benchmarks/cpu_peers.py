"""Strobe and others on a CPU, on the same prompts in turn: tokens/s, prompts included.

    python benchmarks/cpu_peers.py [--ways strobe,vllm,llama.cpp,transformers]
        [--concurrency 1,8,32] [--rounds 3] [--python vllm=PATH,llama.cpp=PATH]

Every way is a process of its own that stays while the others run:

- `strobe:FORMAT:METHOD`: each weight format of STROBE, also with `--compile`, plain (`none`) and
  with drafts (`dflash`);
- `vllm:bfloat16:none`: vLLM's CPU build, compiled; `vllm:bfloat16:dflash`: with the drafter that
  ships with Strobe, eager. Its CPU build normalizes the keys of the drafter's context with the
  first layer's weights in every layer, so that fewer drafts are accepted (SmolLM2: 2.49 tokens a
  step instead of 2.79); `vllm:bfloat16:mended` mends that in its own process;
- `llama.cpp` on the GGUF file, one request; `transformers` on the same weights in fp32.

--ways takes whole names or their beginnings. Each of the others has an environment in
--environments, made if it is missing (vLLM takes 2 GB), unless --python names the Python of one.
The load before each round is printed: other processes make the table worthless.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

sys.path.pop(0)  # where transformers would take kernels.py for the package of that name
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts import vllm_cpu

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
    "compiled": {"compile": True},
    "int4-compiled": {"weight_dtype": "int4", "compile": True},
}
WAYS = (
    *(f"strobe:{name}:{method}" for name in STROBE for method in ("none", "dflash")),
    *(f"vllm:bfloat16:{method}" for method in ("none", "dflash", "mended")),
    "llama.cpp",
    "transformers",
)
PACKAGES = {"vllm": (vllm_cpu.PACKAGE,), "llama.cpp": ("llama-cpp-python",)}
"""What the environment of a way has; transformers gets the versions that Strobe runs with."""
LONE = ("llama.cpp",)
"""Ways that answer one request at a time."""
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


def vllm_answerer(options: argparse.Namespace) -> Answer:
    dtype, method = options.way.split(":")[1:]
    llm = vllm_cpu.load(
        options.hf,
        None if method == "none" else vllm_cpu.BF16_DRAFTER,
        dtype=dtype,
        max_model_len=2048,
        max_num_seqs=32,
        mend=method == "mended",
        compiled=method == "none",
    )
    tokenizer = llm.get_tokenizer()

    def answer(prompts: list[str]) -> int:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            for chat in chats
        ]
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        answers = vllm_cpu.answer_prompts(llm, ids, options.max_tokens, ignore_eos=False)
        return sum(len(answer["tokens"]) for answer in answers)

    return answer


def llama_cpp_answerer(options: argparse.Namespace) -> Answer:
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
    "vllm": vllm_answerer,
    "llama.cpp": llama_cpp_answerer,
    "transformers": transformers_answerer,
}


def serve(options: argparse.Namespace) -> None:
    """Answer each line of prompts with tokens and seconds."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries log to standard output
    answer = ANSWERERS[options.way.split(":")[0]](options)
    answer([PROMPTS[0]])
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        tokens = answer(json.loads(line))
        print(json.dumps([tokens, time.perf_counter() - start]), file=replies, flush=True)


class Worker:
    """A way in a process of its own."""

    def __init__(self, way: str, python: Path, arguments: list[str]):
        command = [str(python), __file__, *arguments, "--way", way]
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
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self.process.args)} ended; its error is above.")
        return json.loads(line)


def choose_ways(names: str | None) -> list[str]:
    """Return the ways with these names or beginnings of names, all without."""
    wanted = list(WAYS) if names is None else names.split(",")
    for name in wanted:
        if not any(way.startswith(name) for way in WAYS):
            sys.exit(f"--ways has {name!r}, but must have some of {', '.join(WAYS)}.")
    return [way for way in WAYS if any(way.startswith(name) for name in wanted)]


def python_of(name: str, options: argparse.Namespace) -> Path:
    """Return the interpreter of an engine; make its environment if it is missing."""
    named = dict(pair.split("=", 1) for pair in options.python.split(",") if pair)
    if name in named:
        return Path(named[name])
    if name == "strobe":
        return Path(sys.executable)
    directory = options.environments / name
    if name == "vllm":
        return vllm_cpu.make_environment(directory)
    packages = PACKAGES.get(name)
    if packages is None:
        packages = tuple(f"{package}=={version(package)}" for package in ("torch", name))
    return vllm_cpu.make_package_environment(directory, packages)


def measure(workers: dict[str, Worker], counts: list[int], rounds: int) -> dict[Any, list[float]]:
    """Return the tokens/s of each round by way and number of requests."""
    rates: dict[Any, list[float]] = {}
    for number in range(rounds):
        print(f"round {number + 1}: load {os.getloadavg()[0]:.2f}", flush=True)
        for count in counts:
            for way, worker in workers.items():
                if way in LONE and count > 1:
                    continue
                batches = [[prompt] * count for prompt in PROMPTS] if count == 1 else []
                batches = batches or [[PROMPTS[i % len(PROMPTS)] for i in range(count)]]
                own = [worker.rate(batch) for batch in batches]
                rates.setdefault((way, count), []).append(len(own) / sum(1 / r for r in own))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="smollm2", help="Strobe's model")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's model; SmolLM2 by default")
    parser.add_argument(
        "--hf", type=Path, help="vLLM's and transformers' model; SmolLM2 by default"
    )
    parser.add_argument("--environments", type=Path, default=vllm_cpu.ROOT / "build" / "cpu-peers")
    parser.add_argument("--python", default="", help="NAME=PATH of environments that are there")
    parser.add_argument("--ways", help="comma-separated; all by default")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--way", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        return serve(options)
    ways = choose_ways(options.ways)
    arguments = sys.argv[1:]
    engines = {way.split(":")[0] for way in ways}
    if options.gguf is None and "llama.cpp" in engines:
        from strobe.hub.packaged import packaged_file

        arguments += ["--gguf", str(packaged_file("smollm2"))]
    if options.hf is None and engines & {"vllm", "transformers"}:
        directory = options.environments / "smollm2"
        arguments += ["--hf", str(vllm_cpu.make_target(directory.resolve()))]
    workers: dict[str, Worker] = {}
    for way in ways:
        workers[way] = Worker(way, python_of(way.split(":")[0], options), arguments)
    counts = [int(count) for count in options.concurrency.split(",")]
    rates = measure(workers, counts, options.rounds)
    print(f"| way | {' | '.join(map(str, counts))} |\n|---|{'---|' * len(counts)}")
    for way in ways:
        cells = [rates.get((way, count)) for count in counts]
        print(f"| {way} | {' | '.join(f'{median(c):.1f}' if c else '' for c in cells)} |")
    if "vllm:bfloat16:dflash" in ways:
        print(
            "vllm:bfloat16:dflash normalizes the keys of the drafter's context with the first "
            "layer's weights in every layer; vllm:bfloat16:mended does not."
        )


if __name__ == "__main__":
    main()
