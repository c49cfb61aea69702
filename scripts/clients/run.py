"""Run clients that Strobe has not written against its server, as they come: lm-eval, vllm's `bench
serve` and Anthropic's. Each gets an environment of its own; README.md beside this file says more.

    python scripts/clients/run.py lm_eval [--count 24] [--directory build/clients]
    python scripts/clients/run.py vllm [--count 20] [--directory build/clients]
    python scripts/clients/run.py anthropic [--count 6] [--directory build/clients]

Prints a Markdown table with its date, versions and machine. Exits with 1, and says why on standard
error, where an answer is missing or depends on speculation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark import benchmark
from evaluation import evaluate
from messages import talk

CLIENTS = {"lm_eval": (evaluate, 24), "vllm": (benchmark, 20), "anthropic": (talk, 6)}
"""What runs a client, and how many questions or prompts it takes by default."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--count", type=int, help="questions per task, or prompts per load")
    parser.add_argument("--directory", type=Path, default=Path("build/clients"))
    options = parser.parse_args()
    run, usual = CLIENTS[options.client]
    wrong = run(options.directory, options.count or usual)
    for sentence in wrong:
        print(sentence, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
