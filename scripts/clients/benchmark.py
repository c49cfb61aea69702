"""Run `vllm bench serve` against the server, with and without speculation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from client import MODEL, SPECULATION, TARGET, Client, environment, origin, serving, table
from examples import write_chats

Words = Sequence[object]

RANDOM: Words = (
    *("--dataset-name", "random", "--random-input-len", 1024, "--random-output-len", 128),
    "--ignore-eos",
)
CHATS: Words = (
    *("--dataset-name", "custom", "--dataset-path", "chats.jsonl", "--custom-output-len", 384),
    "--disable-shuffle",
)
COMPLETIONS: Words = ("--backend", "openai", "--endpoint", "/v1/completions")
CHAT: Words = ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions")
LOADS: dict[str, Words] = {
    "random 1024/128, completions": (*COMPLETIONS, *RANDOM),
    "random 1024/128, chat": (*CHAT, *RANDOM),
    "chat set, completions, thinking": (*COMPLETIONS, *CHATS),
    "chat set, chat": (*CHAT, *CHATS, "--skip-chat-template"),
}
CONCURRENCY = (1, 4)


def benchmark(directory: Path, prompts: int) -> list[str]:
    """Print figures as a Markdown table; return sentences on failures."""
    client = environment(
        directory / "vllm", ["-r", "vllm.txt"], ["--no-deps", "-r", "vllm_alone.txt"]
    )
    write_chats(client.folder / "chats.jsonl", prompts)
    rows, problems = [], []
    for i, (load, words) in enumerate(LOADS.items()):
        for concurrency in CONCURRENCY:
            results = {
                speculation: _bench(
                    client,
                    f"load_{i}_{concurrency}_{speculation}",
                    options,
                    [*words, "--num-prompts", prompts, "--max-concurrency", concurrency],
                )
                for speculation, options in SPECULATION.items()
            }
            for speculation, result in results.items():
                rows.append([load, concurrency, speculation, *_figures(result)])
                if result["completed"] < prompts:
                    problems.append(f"{load}: {result['completed']} of {prompts} answers came.")
            texts = [result["generated_texts"] for result in results.values()]
            unequal = sum(a != b for a, b in zip(*texts, strict=True))
            if unequal:
                problems.append(f"{load}: {unequal} of {prompts} texts differ on and off.")
    print(origin(client.versions("vllm", "transformers", "torch")), end="\n\n")
    print(table(HEAD, rows))
    return problems


HEAD = (
    *("load", "at once", "speculation", "answers", "tokens out", "s", "tokens/s out"),
    *("TTFT ms mean", "p99", "TPOT ms mean", "p99", "tokens per verify step"),
)


def _figures(result: dict[str, Any]) -> list[object]:
    accepted = result.get("spec_decode_acceptance_length")
    times = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms")
    return [
        result["completed"],
        result["total_output_tokens"],
        f"{result['duration']:.1f}",
        f"{result['output_throughput']:.1f}",
        *(f"{result[name]:.1f}" for name in times),
        "-" if not accepted else f"{accepted:.2f}",
    ]


def _bench(client: Client, name: str, options: Sequence[str], load: Words) -> dict[str, Any]:
    """Run once against a fresh server, whose prefix cache is empty."""
    result = client.folder / f"{name}.json"
    result.unlink(missing_ok=True)
    words: list[object] = ["bench", "serve", "--model", MODEL, "--tokenizer", TARGET, *load]
    words += ["--temperature", 0, "--seed", 0, "--save-result", "--save-detailed"]
    words += ["--result-filename", result, "--disable-tqdm"]
    with serving(client.folder / f"{name}_server.log", options) as url:
        client.run("vllm", [*words, "--base-url", url], client.folder / f"{name}.log")
    return json.loads(result.read_text(encoding="utf-8"))
