"""Run other projects' clients, unmodified, against Strobe's server: lm-eval, vllm's `bench serve`
and Anthropic's. Each gets its own environment; see README.md in this directory.

    python scripts/clients/run.py lm_eval [--count 24] [--directory build/clients]
    python scripts/clients/run.py vllm [--count 20] [--directory build/clients]
    python scripts/clients/run.py anthropic [--count 6] [--directory build/clients]

Prints a Markdown table with date, versions and machine. Exits with 1, with the reason on standard
error, if an answer is missing or depends on speculation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark import benchmark
from evaluation import evaluate
from messages import talk

CLIENTS = {"lm_eval": (evaluate, 24), "vllm": (benchmark, 20), "anthropic": (talk, 6)}
"""The function that runs each client, and its default number of questions or prompts."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--count", type=int, help="questions per task, or prompts per load")
    parser.add_argument("--directory", type=Path, default=Path("build/clients"))
    options = parser.parse_args()
    run, default_count = CLIENTS[options.client]
    problems = run(options.directory, options.count or default_count)
    for sentence in problems:
        print(sentence, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
