"""Prompts for traces of the demo models: half demo tasks, half other text.

    python benchmarks/trace_prompts.py prompts.jsonl
    strobe bench record --data prompts.jsonl --prompts 300 --temperature 1 --out FILE.npz

The drafter was trained on the tasks but not on the other text, which is from Python's own
documentation, so acceptance differs between answers.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from pydoc_data.topics import topics

from strobe.demo_models import read_heldout

EACH = 150
QUESTIONS = ("Summarise this: ", "Explain: ", "What does this mean? ", "Go on with this text: ", "")


def main() -> None:
    rng, texts = random.Random(3), [topics[name] for name in sorted(topics)]
    lines: list[dict[str, object]] = [
        {"messages": example.messages} for example in read_heldout(EACH)
    ]
    for _ in range(EACH):
        text = rng.choice(texts)
        first, question = rng.randrange(max(1, len(text) - 400)), rng.choice(QUESTIONS)
        lines.append({"prompt": question + text[first : first + rng.randrange(60, 300)]})
    rng.shuffle(lines)
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
