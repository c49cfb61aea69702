"""Write the held-out examples that ship with Strobe.

python scripts/demo_models/write_heldout.py
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.demo_models.tasks import FAMILIES, heldout
from strobe.demo_models import HELDOUT

EACH, SEED = 40, 1


def lines() -> list[str]:
    """Return one JSON object per example, cycling through the families."""
    pool = heldout(EACH, seed=SEED)  # by family
    turns = [pool[family * EACH + i] for i in range(EACH) for family in range(len(FAMILIES))]
    return [json.dumps(asdict(example), ensure_ascii=False) for example in turns]


if __name__ == "__main__":
    HELDOUT.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
