"""The target: a Qwen3 trained on plain text; the weights with the best held-out loss are kept.

The large one has 111 M parameters and trains on 340,000 tokens per second on an H200 (2026-11-23,
rows of 1024): four minutes are three passes over the text. Training ends after `--epochs`, or when
the held-out loss rises; answers and the drafter use the rest of the time.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.demo_models.train_draft import say
from scripts.demo_models.train_target import save, schedule
from scripts.text_pair.corpus import END, write_tokenizer

POSITIONS = 4096
EVALUATIONS = 40
"""Number of held-out evaluations in a training that is not stopped early."""
PATIENCE = 8
"""Evaluations without improvement after which training stops."""

# N rows of a batch, M rows in all, S tokens of a row.


def new_model(options: argparse.Namespace, end: int) -> Qwen3ForCausalLM:
    """Return a model with random fp32 weights."""
    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.inner,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        tie_word_embeddings=True,
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return Qwen3ForCausalLM(config).float()


def pieces(ids: Tensor, length: int) -> Tensor:
    """Split ids [T] into rows [M, S + 1]; neighbours share a token, the one's last label and the
    next one's first input."""
    if len(ids) <= length:
        raise ValueError(
            f"--length is {length}, but one side of the split has {len(ids)} tokens; lower it or "
            "name more --files."
        )
    return ids.unfold(0, length + 1, length)


def some(rows: Tensor, count: int) -> Tensor:
    """Return about `count` of the rows, spread evenly."""
    return rows[:: max(1, len(rows) // count)]


def batches(ids: Tensor, rows: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield batches [N, S + 1] without end; each epoch has different cuts and another order."""
    generator = torch.Generator().manual_seed(seed)
    spare = min(length, len(ids) - length)
    while True:
        rest = pieces(ids[int(torch.randint(spare, (), generator=generator)) :], length)
        order = torch.randperm(len(rest), generator=generator).to(ids.device)
        count = min(rows, len(rest))
        for part in order[: len(order) // count * count].split(count):
            yield rest[part]


def loss_of(model: Qwen3ForCausalLM, rows: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next token in nats. rows [N, S + 1]."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        hidden = model.model(rows[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: Qwen3ForCausalLM, rows: Tensor, at_once: int) -> float:
    """Return the mean loss of rows [M, S + 1], in full batches if there are enough rows."""
    count = min(at_once, len(rows))
    parts = rows[: len(rows) // count * count].split(count)
    return round(float(torch.stack([loss_of(model, part) for part in parts]).mean()), 4)


def train_target(
    sides: dict[str, list[list[int]]],
    tokenizer: Tokenizer,
    out: Path,
    options: argparse.Namespace,
    left: float,
) -> dict[str, Any]:
    """Train for options.epochs and up to `left` seconds, or options.steps; save; return the log.

    sides: token ids of each file, "trained" and "held-out".
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    end = tokenizer.token_to_id(END)
    training, heldout = (
        torch.tensor([i for ids in sides[kind] for i in (*ids, end)], device=device)
        for kind in ("trained", "held-out")
    )
    unseen, seen = (
        some(pieces(ids, options.length), 4 * options.rows) for ids in (heldout, training)
    )
    model = new_model(options, end).to(device)
    if device.type == "cuda" and not options.eager:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    weights = list(model.parameters())
    groups = [
        {"params": [w for w in weights if w.dim() == 2], "weight_decay": 0.1},
        {"params": [w for w in weights if w.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    source = batches(training, options.rows, options.length, options.seed)
    batch = options.rows * options.length
    limit = options.steps or max(1, options.epochs * len(training) // batch)
    begin, step, done, stale, best = time.monotonic(), 0, 0.0, 0, math.inf
    best_state: dict[str, Tensor] = {}
    curve: list[dict[str, float]] = []
    while done < 1 and (stale < PATIENCE or options.keep == "last"):
        rate = options.rate * schedule(done, step, min(options.warmup, limit // 10 + 1))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        step += 1
        spent = 0.0 if options.steps else (time.monotonic() - begin) / left
        done = max(step / limit, spent)
        if done < min(1.0, (len(curve) + 1) / EVALUATIONS):
            continue
        heldout_loss = mean_loss(model, unseen, options.rows)
        curve.append({
            "step": step,
            "seconds": round(time.monotonic() - begin, 1),
            "loss": round(loss.item(), 4),
            "heldout_loss": heldout_loss,
        })  # fmt: skip
        say(json.dumps(curve[-1]))
        stale = 0 if heldout_loss < best else stale + 1
        if heldout_loss < best or options.keep == "last":
            best_state = copy.deepcopy(model.state_dict())
        best = min(heldout_loss, best)
    elapsed = time.monotonic() - begin
    if not best_state:
        raise ValueError(f"--rate is {options.rate}, at which the loss is NaN; lower it.")
    model.load_state_dict(best_state)
    save(model, out)  # its tokenizer and sampling are the demo's, and replaced here
    write_tokenizer(tokenizer, out, POSITIONS)
    generation = {"do_sample": True, "eos_token_id": end, "pad_token_id": end, "temperature": 1.0}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return {
        "parameters": sum(w.numel() for w in weights),
        "steps": step,
        "of_planned_steps": limit,
        "tokens_per_second": round(step * batch / elapsed),
        "kept_loss": {
            "trained": mean_loss(model, seen, options.rows),
            "held-out": mean_loss(model, unseen, options.rows),
        },
        "curve": curve,
    }
