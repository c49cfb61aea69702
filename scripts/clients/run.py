"""Run other projects' clients, unmodified, against Strobe's server. Each gets its own environment;
see README.md in this directory.

    python scripts/clients/run.py all [--count 6] [--directory build/clients]
    python scripts/clients/run.py openai|anthropic|ollama|litellm|langchain|instructor|...
    python scripts/clients/run.py lm_eval [--count 24]
    python scripts/clients/run.py vllm [--count 20]

Prints a Markdown table with date, versions and machine. Exits with 1, with the reason on standard
error, if an answer is missing or depends on speculation.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from answers import PACKAGES, talk_to_all, talker
from benchmark import benchmark
from evaluation import evaluate

CLIENTS = {
    "all": (talk_to_all, 6),
    **{name: (talker(name), 6) for name in PACKAGES},
    "lm_eval": (evaluate, 24),
    "vllm": (benchmark, 20),
}
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
