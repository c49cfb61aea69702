"""Faults at random stages of steps: the engine stays alive, its counts are right, and answers are
those of an engine without faults, or a part of them where a request's steps keep failing alone.

    python -m tests.support.random_faults --faults 10000
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from tests.reference.test_failed_results import Fault
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import cache_bytes, make_engine
from tests.support.losslessness_matrix import make_pair
from tests.support.random_engines import TARGETS, prepared
from tests.support.tiny_checkpoints import make_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PARAMS = [
    GREEDY,
    GREEDY.clone(temperature=0.9, seed=4, frequency_penalty=0.4, logprobs=1),
    GREEDY.clone(structured_outputs={"regex": "[ab0-9]{30}"}, ignore_eos=False),
    GREEDY,
]
TEXTS = [[(5 * i + n) % 50 for i in range(n)] for n in (9, 23, 5, 17)]
OFTEN = 9
"""Calls of a stage, at most, until it fails again."""


def make_faulty_engine(root: Path, family: str, overlap: int) -> Engine:
    """Return an engine with a drafter and prompt lookup, whose few pages go to host memory."""
    write, changes = TARGETS[family]
    pair = make_pair(root, write, device="cpu", width=16, **changes)
    make_tokenizer(pair.target)
    config = EngineConfig(
        str(pair.target), draft=str(pair.draft), method="dflash+ngram", num_drafts=5,
        overlap=overlap, max_model_len=64, page_size=4, max_num_seqs=3, max_num_batched_tokens=24,
        dtype="float32", device="cpu", kv_cache_memory="8MiB", kv_offload_memory="4MiB",
    )  # fmt: skip
    config = config.with_(kv_cache_memory=cache_bytes(resolve(config), 24))
    return prepared(make_engine(config))


def stages(engine: Engine) -> dict[str, tuple[Any, str]]:
    """Return where each stage of a step is called."""
    return {
        "plan": (engine.scheduler, "_plan"),
        "draft": (engine, "_propose"),
        "forward": (engine.verify_step, "run"),
        "verify": (engine, "_verify"),
        "observe": (engine.scheduler.draft_policy, "observe"),
        "copies": (engine, "_copy_host"),
        "result": (engine, "_result"),
        "commit": (engine.scheduler, "commit"),
    }


def answers(engine: Engine, rng: random.Random, before_step: Callable[[], None]) -> list[Request]:
    """Return the ended requests of all texts; check every step. A further request, always another,
    evicts their pages."""
    requests = [engine.add(text, params) for text, params in zip(TEXTS, PARAMS, strict=True)]
    engine.add([rng.randrange(50) for _ in range(20)], GREEDY.clone(max_tokens=2))
    reported: dict[Any, list[int]] = {}
    for _ in range(600):
        before_step()
        try:
            for event in engine.step():
                reported.setdefault(event.key, []).extend(event.tokens)
        except MemoryError:
            pass
        check_engine(engine)
        if not engine.has_work:
            break
    assert not engine.has_work, "the engine hangs"
    assert engine.components.pool.available == engine.components.pool.capacity
    assert all(reported[request.key] == request.output_ids for request in requests)
    return requests


def inject(engine: Engine, count: int, seed: int) -> Counter[str]:
    """Let random calls within random stages fail so many times; return the faults by stage."""
    rng = random.Random(seed)
    expected = [request.output_ids for request in answers(engine, rng, lambda: None)]
    faults: dict[str, Fault] = {}
    for name, (owner, method) in stages(engine).items():
        faults[name] = Fault(getattr(owner, method))
        setattr(owner, method, faults[name])
    injected, ended = Counter[str](), 0
    name = ""

    def arm() -> None:
        nonlocal name
        if name and faults[name].turn > 0:
            return  # its call is still to come
        if name:
            injected[name] += faults[name].calls >= faults[name].call
        name = rng.choice(list(faults))
        faults[name].turn = rng.randint(1, OFTEN)
        faults[name].call = rng.randint(1, max(faults[name].calls, 12))

    while injected.total() < count:
        for request, answer in zip(answers(engine, rng, arm), expected, strict=True):
            if request.finish_reason == "error":  # its steps failed alone, again and again
                ended += 1
                assert request.output_ids == answer[: request.num_output]
            else:
                assert request.output_ids == answer, f"after {injected}"
    assert ended <= count // 20, "hardly any request fails alone three times"
    return injected


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=list(TARGETS), default="qwen3")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        engine = make_faulty_engine(Path(root), args.family, overlap=1 + args.seed % 2)
        injected = inject(engine, args.faults, args.seed)
    print(f"{injected.total()} faults, no token changed: {dict(injected)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
