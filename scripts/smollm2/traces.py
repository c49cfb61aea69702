"""Record SmolLM2's drafting on held-out prompts, for `strobe bench load --traces`.

    python scripts/smollm2/traces.py TARGET DRAFT answers-*.npz --out traces.npz

Prompts of every kind are answered at temperatures 0 and 1; drafts are sampled as in serving.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.smollm2.evaluate import heldout_prompts  # noqa: E402
from scripts.smollm2.prompts import KINDS  # noqa: E402
from strobe.config import EngineConfig  # noqa: E402
from strobe.engine.build import resolve  # noqa: E402
from strobe.tools.bench.bench_settings import RecordSettings  # noqa: E402
from strobe.tools.bench.draft_traces import Traces  # noqa: E402
from strobe.tools.bench.record import RecordingEngine, record  # noqa: E402
from strobe.tools.report import circumstances  # noqa: E402

TEMPERATURES = 0.0, 1.0
MAX_TOKENS = 200


def joined(parts: list[Traces]) -> Traces:
    """Return the answers of all parts, which have equal widths, in one."""
    return replace(
        parts[0],
        lengths=np.concatenate([part.lengths for part in parts]),
        right=np.concatenate([part.right for part in parts]),
        margins=tuple(
            np.concatenate(rows) for rows in zip(*(p.margins for p in parts), strict=True)
        ),
    )


def main() -> None:
    """Record, join and save; print the tokens per step."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=20, help="prompts of a kind")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    kinds = heldout_prompts(options.answers, list(KINDS), options.count)
    prompts = [prompt for rows in kinds.values() for prompt in rows]
    random.Random(0).shuffle(prompts)
    setup = resolve(
        EngineConfig(
            str(options.target),
            str(options.draft),
            device=options.device,
            max_model_len=1024,
            max_num_seqs=options.at_once,
            enable_prefix_caching=False,
            adaptive=False,
            overlap=1,
            kv_cache_memory="2GiB",
        )
    )
    parts: list[Traces] = []
    for temperature in TEMPERATURES:
        engine = RecordingEngine(setup)
        settings = RecordSettings(
            temperature=temperature, max_tokens=MAX_TOKENS, at_once=options.at_once
        )
        parts.append(record(engine, prompts, settings))
        for n in parts[-1].widths:
            print(temperature, n, round(parts[-1].acceptance_length(n), 3), flush=True)
    command = f"scripts/smollm2/traces.py --count {options.count}"
    note = {k: v for k, v in circumstances(command, setup).items() if k != "threads"}
    replace(joined(parts), note=note).save(options.out)


if __name__ == "__main__":
    main()
