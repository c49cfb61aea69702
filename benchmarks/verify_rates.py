"""How often `strobe verify` is wrong: false alarms on clean engines, and planted faults that it
misses.

    python benchmarks/verify_rates.py [--clean 200] [--planted 5] [--rare 1] [--dtype float32]

Each run verifies the demo models with prompts, settings and seeds of its own, drawn from the
held-out tasks; a planted run has one of the eight faults of `tests/support/planted_faults.py`. A
rare run accepts one wrong token in 10,000 accepted drafts, and generates RARE_TOKENS tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from strobe.config import EngineConfig
from strobe.demo_models import read_heldout
from strobe.hub.locate import locate_models
from strobe.tools.report import device_name
from strobe.tools.verify.findings import Verification
from strobe.tools.verify.reference import make_reference
from strobe.tools.verify.verify import Verifier, make_engine
from strobe.tools.verify.verify_settings import VerifySettings
from tests.support.planted_faults import PLANTS, Plant, planted, wrong_token

PROMPTS = 2
RARE_TOKENS = 30_000
"""Of a fault in 10,000 tokens, so many show at least one with 95 %."""
TEXTS = [
    str(example.messages[-1]["content"])
    for example in read_heldout()
    if not example.tools and example.messages[-1]["role"] == "user"
]


class Rates:
    """Verifies one engine again and again."""

    def __init__(self, dtype: str):
        config = EngineConfig(dtype=dtype, device="cpu", max_model_len=256)
        self.engine = make_engine(locate_models(config))
        self.reference, _ = make_reference("auto", self.engine)

    def verify(
        self, seed: int, plant: Plant | None = None, tokens: int | None = None
    ) -> Verification:
        """Verify once, with the prompts and sizes of a seed."""
        rng = random.Random(seed)
        drawn = rng.choice((1, 500))
        settings = VerifySettings(
            tokens=drawn if tokens is None else tokens,
            max_tokens=rng.choice((8, 12, 20)),
            seeds=rng.choice((16, 48)),
        )
        verifier = Verifier(engine=self.engine, settings=settings, reference=self.reference)
        verifier.builder.texts = rng.sample(TEXTS, PROMPTS)
        verifier.builder.seed = 1000 * seed
        with contextlib.nullcontext() if plant is None else planted(self.engine, plant):
            return verifier.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clean", type=int, default=200, help="runs without a fault")
    parser.add_argument("--planted", type=int, default=5, help="runs of each planted fault")
    parser.add_argument("--rare", type=int, default=1, help="runs of a wrong token in 10,000")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--first-seed", type=int, default=0)
    args = parser.parse_args()
    rates = Rates(args.dtype)
    began = time.monotonic()
    verdicts: Counter[str] = Counter()
    tokens = 0
    for seed in range(args.first_seed, args.first_seed + args.clean):
        verification = rates.verify(seed)
        verdicts[verification.verdict] += 1
        tokens += verification.figures["tokens"]
        if verification.verdict != "clean":
            says = [f.says for f in (*verification.of("fault"), *verification.of("undecided"))]
            print(f"seed {seed}: {verification.verdict}: {says}", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{args.clean} clean runs in {args.dtype}, {tokens:,} tokens, {seconds:.0f} s: "
        f"{dict(verdicts)}",
        flush=True,
    )
    for name, plant in PLANTS.items():
        found = 0
        for seed in range(args.first_seed, args.first_seed + args.planted):
            found += rates.verify(seed, plant).verdict == "fault"
        print(f"{name}: found in {found} of {args.planted} runs", flush=True)
    for seed in range(args.first_seed, args.first_seed + args.rare):
        began = time.monotonic()
        verification = rates.verify(seed, wrong_token(10_000), RARE_TOKENS)
        figures = verification.figures
        print(
            f"one wrong token in 10,000, {figures['tokens']:,} tokens, {figures['accepted']:,} "
            f"accepted, {time.monotonic() - began:.0f} s: {verification.verdict}: "
            f"{[finding.says for finding in verification.of('fault')]}",
            flush=True,
        )
    device = device_name(torch.device("cpu"))
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
