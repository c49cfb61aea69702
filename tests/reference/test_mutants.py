"""Drafters with one mistake draft differently, but the output is the same.

The first tests show that the comparisons with the transcription detect such a mistake, the others
that no mistake of a drafter reaches the output.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import drain, make_engine
from tests.support.full_marks import full_where
from tests.support.recorded_drafter import Watched
from tests.support.scripted_drafting import wavering
from tests.support.tiny_checkpoints import MASK_TOKEN, VOCAB
from tests.support.transformers_parity import greedy

MIXED = {"layer_types": ["full_attention", "sliding_attention"], "window": 5}
IDS = (0, 1, 3)

MUTANTS: dict[str, dict[str, Any]] = {
    "causal in every layer": {**MIXED, "top": {"is_causal": True}},
    "bidirectional in every layer": {**MIXED, "top": {"is_causal": False}},
    "no window": {},
    "window one shorter": {**MIXED, "window": 4},
    "window one longer": {**MIXED, "window": 6},
    "layers one later": {**MIXED, "layer_ids": tuple(i + 1 for i in IDS)},
    "first layer one later": {**MIXED, "layer_ids": (1, 1, 3)},
    "layers in another order": {**MIXED, "layer_ids": (1, 0, 3)},
    "a shorter block": {**MIXED, "block": 6},
    "a longer block": {**MIXED, "block": 9},
    "another mask token": {**MIXED, "mask_token": MASK_TOKEN - 1},
    "another rope": {**MIXED, "top": {"rope_theta": 20.0}},
    "scaled embeddings": {**MIXED, "nested": {"input_embedding_scale": 3.0}},
    "other weights": {**MIXED, "seed": 99},
}

NUM_DRAFTS = 5


class WrongContext(Watched):
    """Stores zeros, another position's context or nothing instead of the context's K/V."""

    def __init__(self, parts: Any, mangle: Any, write: str):
        super().__init__(parts, mangle)
        store = self.inner.runner.store
        write_all = store.write_all

        def writing(slots: Any, keys: Any, values: Any) -> None:
            if write == "zeros":
                keys, values = torch.zeros_like(keys), torch.zeros_like(values)
            if write == "shifted":
                keys, values = keys.roll(1, 0), values.roll(1, 0)
            if write != "nothing":
                write_all(slots, keys, values)

        store.write_all = writing


@pytest.fixture(scope="module")
def texts(target: Any) -> list[tuple[list[int], list[int]]]:
    noise = torch.Generator().manual_seed(21)
    prompts = [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (9, 30, 17)]
    return [(p, greedy(target.hf, p, 24, eos_token_id=None)) for p in prompts]


def drafts(
    target: Any,
    path: Path,
    texts: list[tuple[list[int], list[int]]],
    make: Callable[[Any], Watched] = lambda parts: Watched(parts, wavering),
) -> dict[tuple[str, int], list[int]]:
    """Return the drafts after each position; outputs are compared with the true ones."""
    config = EngineConfig(
        target=str(target.path), draft=str(path), num_drafts=NUM_DRAFTS, max_model_len=96
    )
    engine = make_engine(config, lambda parts, _: make(parts), names=["dflash"])
    watched: Any = engine.proposers["dflash"]
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    requests = [engine.add(prompt, sampling) for prompt, _ in texts]
    for request, (prompt, answer) in zip(requests, texts, strict=True):
        watched.answers[request] = prompt + answer
    drain(engine, requests)
    assert [r.output_ids for r in requests] == [answer for _, answer in texts]
    return {(d.request.id, d.start): d.tokens[:NUM_DRAFTS] for d in watched.true_drafts()}


@pytest.fixture(scope="module")
def true_drafts(target: Any, draft: Any, texts: Any) -> dict[tuple[str, int], list[int]]:
    return drafts(target, draft(**MIXED), texts)


def num_differences(
    a: dict[tuple[str, int], list[int]], b: dict[tuple[str, int], list[int]]
) -> int:
    """Count the draft tokens that differ; both must have drafted at the same positions."""
    assert a.keys() == b.keys()
    return sum(x != y for key in a for x, y in zip(a[key], b[key], strict=True))


def test_same_drafter_repeats_its_drafts(target: Any, draft: Any, texts: Any, true_drafts: Any):
    assert len(true_drafts) > 15
    assert num_differences(true_drafts, drafts(target, draft(**MIXED), texts)) == 0


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_drafts_differ_but_output_does_not(
    name: str, target: Any, draft: Any, texts: Any, true_drafts: Any
):
    count = num_differences(true_drafts, drafts(target, draft(**MUTANTS[name]), texts))
    # Both run 8 rows for 5 drafts: the whole block of 8, and all but one row of 9.
    assert (count == 0) if name == "a longer block" else (count > 0)


@pytest.mark.parametrize("write", ["zeros", "shifted", "nothing"])
def test_wrong_context_changes_drafts_but_not_output(
    write: str, target: Any, draft: Any, texts: Any, true_drafts: Any
):
    wrong = drafts(
        target, draft(**MIXED), texts, lambda parts: WrongContext(parts, wavering, write)
    )
    assert num_differences(true_drafts, wrong) > 0


@full_where(lambda name: list(MUTANTS).index(name) % 2 == 1)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_drafts_do_not_change_sampled_output(name: str, target: Any, draft: Any):
    """The mutant's own drafts are verified, and compared with plain decoding of the same seeds."""
    noise = torch.Generator().manual_seed(22)
    prompts = [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (4, 25)]
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=20, seed=1)
    outputs = []
    for path in (None, str(draft(**MUTANTS[name]))):
        engine = make_engine(
            EngineConfig(target=str(target.path), draft=path, max_model_len=64, page_size=4)
        )
        requests = [engine.add(prompt, sampling) for prompt in prompts]
        drain(engine, requests)
        outputs.append([r.output_ids for r in requests])
    assert outputs[0] == outputs[1]
