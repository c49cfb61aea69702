"""The processors' kernel against its twin and against plain Python."""

from __future__ import annotations

import pytest
import torch

from strobe.kernels import processors as kernel
from strobe.runner.step_ops.triton_step_ops import TritonStepOps
from strobe.sampling import processors
from strobe.sampling.processors import LogitRows
from tests.support.full_marks import full_where
from tests.support.random_logit_batches import World, check


def test_floor_matches_torch_twin() -> None:
    assert kernel.FLOOR.value == processors.FLOOR


@full_where(lambda seed, drafts, dtype: (seed + drafts + dtype.itemsize // 2) % 2 == 0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("seed", range(12))
def test_rows_match_torch_twin(device, monkeypatch, seed, drafts, dtype) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 16)
    world = World(seed, max_drafts=drafts)
    state = world.state(TritonStepOps(), device=device)
    rows = LogitRows(*[column.to(device) for column in world.rows])
    wide = torch.tensor(world.logits).repeat(1, 2).to(device, dtype)
    logits, masks = wide[:, : world.size], world.masks.to(device)
    for processed in (True, False):
        for used_masks in (masks, None):
            arguments = logits, state.tables, rows, used_masks
            actual = kernel.process(*arguments, processed=processed)
            expected = processors.process(*arguments, processed=processed)
            assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-5)
    if dtype == torch.float32:
        actual = kernel.process(logits, state.tables, rows, masks, processed=True)
        check(actual.cpu(), world.expected())


def test_processors_with_real_vocabulary_size(device) -> None:
    """Rows have many blocks, and the last slot's tables start at cell 1,000,000 or later."""
    size = 151_936
    world = World(4, size=70, max_drafts=2)
    world.size = size
    state = world.state(device=device)
    rows = LogitRows(*[column.to(device) for column in world.rows])
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(world.places), size, generator=generator).to(device)
    words = torch.randint(-(2**31), 2**31, (len(logits), size // 32), generator=generator)
    masks = words.to(torch.int32).to(device)
    actual = kernel.process(logits, state.tables, rows, masks, processed=True)
    expected = processors.process(logits, state.tables, rows, masks, processed=True)
    assert torch.allclose(actual, expected, rtol=1e-6, atol=1e-5)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_sampling_state_with_kernels_matches_torch(device) -> None:
    """With processors, filters, sampled and greedy rows, and scores of the unprocessed logits."""
    worlds = [World(seed, size=70) for seed in range(4)]
    for world in worlds:
        for i, admitted in enumerate(world.admitted):
            changes = {"temperature": (0.0, 0.8, 1.3)[i % 3], "top_p": (1.0, 0.9)[i % 2]}
            sampling = admitted.sampling.clone(**changes, logprobs=2)
            world.admitted[i] = admitted._replace(sampling=sampling, seed=i)
        by_kernel, by_torch = world.state(TritonStepOps(), device=device), world.state()
        mode = by_kernel.mode(world.spans)
        rows = LogitRows(*[column.to(device) for column in world.rows])
        logits, masks = torch.tensor(world.logits), world.masks
        actual = by_kernel.sample(logits.to(device), rows, mode, masks.to(device))
        expected = by_torch.sample(logits, world.rows, by_torch.mode(world.spans), masks)
        assert actual.tokens.tolist() == expected.tokens.tolist()
        assert actual.scores is not None
        assert expected.scores is not None
        for a, b in zip(actual.scores, expected.scores, strict=True):
            assert torch.allclose(a.cpu(), b, equal_nan=True)
