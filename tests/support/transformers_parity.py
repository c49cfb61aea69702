"""A target against transformers: every layer's residual stream, logits and greedy text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from tests.support.engine_runs import make_engine, run
from tests.support.tiny_checkpoints import VOCAB, edit_json

GEOMETRY = [(1, 1), (16, 7), (64, 5), (256, 64), (16, 3)]
"""(page size, max rows per step)"""


def greedy(hf: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """Return transformers' greedy output, its end token included."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)  # else token 0 counts as padding
    out = hf.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **options
    )
    return out[0, ids.shape[1] :].tolist()


@dataclass(frozen=True)
class Case:
    """A tiny target: changes of its config, and a change of its directory afterwards."""

    changes: dict[str, Any]
    after: Callable[[Path], None] = lambda path: None
    shards: str | None = None


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    noise = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in lengths]


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 5e4,
}


def check_rejected(path: Path, message: str, **changes: Any) -> None:
    """Change the config; the checkpoint must be rejected with a matching message."""
    edit_json(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        resolve(EngineConfig(target=str(path)))


@torch.no_grad()
def layer_outputs(hf: Any, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (residual stream after 0, 1, ... layers [T, N + 1, H], logits [T, V])."""
    seen: list[torch.Tensor] = []
    text = getattr(hf.model, "language_model", hf.model)
    hooks = [
        layer.register_forward_hook(
            lambda module, inputs, out: seen.append(out if torch.is_tensor(out) else out[0])
        )
        for layer in [text.embed_tokens, *text.layers]
    ]
    try:
        logits = hf(torch.tensor([tokens])).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([s[0] for s in seen], 1), logits


def record(engine: Engine) -> dict[tuple[Request, int], torch.Tensor]:
    """Capture every layer of the target; return the last row by request and position."""
    runner = engine.components.runner
    runner.capture = tuple(range(len(runner.model.layers) + 1))
    seen: dict[tuple[Request, int], torch.Tensor] = {}
    forward = runner.forward

    def forwarding(batch: Any) -> Any:
        residual, features = forward(batch)
        running = {record.slot: record.request for record in engine.scheduler.running}
        owners = [running[slot] for slot in batch.slots.tolist()]
        row_owners = [
            owner
            for owner, size in zip(owners, batch.sizes.tolist(), strict=True)
            for _ in range(size)
        ]
        for i, key in enumerate(zip(row_owners, batch.positions.tolist(), strict=True)):
            seen[key] = features[i]
        return residual, features

    runner.forward = forwarding
    return seen


def check_layers(
    hf: Any, path: Path, page_size: int, budget: int, *, atol: float = 1e-4, **options: Any
) -> None:
    """Run prompts and answers in steps of `budget` rows; compare every layer's output and the
    logits with transformers. options: of the engine."""
    config = EngineConfig(
        **options,
        target=str(path),
        page_size=page_size,
        max_model_len=64,
        max_num_seqs=min(3, budget),
        max_num_batched_tokens=budget,
    )
    engine = make_engine(config)
    seen = record(engine)
    requests: list[Request] = []
    sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    run(engine, prompts([11, 1, 30]), sampling, each_step=requests.extend)
    by_request: dict[Request, list[int]] = defaultdict(list)
    for request, position in seen:
        by_request[request].append(position)
    assert len(by_request) == 3
    for request, positions in by_request.items():
        assert sorted(positions) == list(range(len(request.tokens) - 1))
        expected, logits = layer_outputs(hf, request.tokens[:-1])
        outputs = torch.stack([seen[request, p] for p in range(len(positions))])
        outputs = outputs.view(len(positions), *expected.shape[1:])
        torch.testing.assert_close(outputs, expected, atol=atol, rtol=1e-5)
        head = engine.components.runner.model.head(outputs[:, -1])
        torch.testing.assert_close(head, logits, atol=atol, rtol=1e-5)


def check_text(hf: Any, path: Path) -> None:
    """Compare the greedy answers to prompts that run together with transformers, which says in one
    forward what follows each token of an answer."""
    texts = prompts([3, 17, 40, 1, 8])
    engine = make_engine(EngineConfig(target=str(path), max_model_len=128, page_size=4))
    answers = run(engine, texts, SamplingParams(temperature=0, max_tokens=40))
    end = hf.generation_config.eos_token_id
    for prompt, answer in zip(texts, answers, strict=True):
        logits = layer_outputs(hf, prompt + answer[:-1])[1]
        assert answer == logits[len(prompt) - 1 :].argmax(-1).tolist()
        ended = [token in ([end] if isinstance(end, int) else end) for token in answer]
        assert not any(ended[:-1])
        assert ended[-1] or len(answer) == 40
    assert len({token for out in answers for token in out}) > 10, "the answers are too uniform"
