"""Write held-out prompts about code, rewriting and lists for `strobe bench offline --data`.

python scripts/smollm2/chats.py smollm2 64 > chats.jsonl
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.smollm2.prompts import LONGEST, is_heldout, render, user_turns  # noqa: E402
from strobe.config import EngineConfig  # noqa: E402
from strobe.hub.locate import locate_models  # noqa: E402


def main() -> None:
    """Print a line for each chat, the kinds in turn."""
    from transformers import AutoTokenizer

    directory = locate_models(EngineConfig(sys.argv[1], method="none")).target
    tokenizer = AutoTokenizer.from_pretrained(directory)
    kinds = [user_turns(kind, seed=0) for kind in ("code", "rewriting", "lists")]
    texts = (next(turns) for turns in itertools.cycle(kinds))
    chats: dict[str, None] = {}
    while len(chats) < int(sys.argv[2]):
        some = list(itertools.islice(texts, 1_000))
        rendered = zip(some, render(tokenizer, some), strict=True)
        chats |= {t: None for t, ids in rendered if len(ids) <= LONGEST and is_heldout(ids)}
    for text in itertools.islice(chats, int(sys.argv[2])):
        print(json.dumps({"messages": [{"role": "user", "content": text}]}))


if __name__ == "__main__":
    main()
