"""Optimiser steps, and checkpoints from which training resumes bit for bit.

All randomness (the order of the sequences, the anchors, the held-out part) is a function of (seed,
epoch) or (seed, step), so a checkpoint holds only weights, optimiser state and a step number.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strobe.models.dflash_drafter import DFlash
from strobe.models.target import Target
from strobe.tools.train.acceptance_length import Acceptance, batch_acceptance
from strobe.tools.train.capture import Captured, capture, target_choices
from strobe.tools.train.data import Batch, Corpus, Sample, epoch_order
from strobe.tools.train.edges import confidence_loss, edges_of, previous_tokens
from strobe.tools.train.loss import Accuracy, block_loss, measure_slots
from strobe.tools.train.train_settings import Schedule, TrainSettings
from strobe.tools.train.training_blocks import (
    Blocks,
    context_kv,
    draft_hidden,
    legal_anchors,
    make_blocks,
    random_anchors,
)

LOGITS_AT_ONCE = 1 << 31
"""Maximum logits kept for the backward pass; larger batches compute them in parts."""


@dataclass(frozen=True)
class StepResult:
    """Loss and gradient norm (scalars) and accuracy of an optimiser step, on the device."""

    loss: Tensor
    norm: Tensor
    accuracy: Accuracy


def learning_rate(step: int, total: int, schedule: Schedule) -> float:
    """Return the rate of a step (from 0): linear warmup, then a cosine to 0."""
    warm = max(1, round(schedule.warmup * total))
    if step < warm:
        return schedule.learning_rate * (step + 1) / warm
    done = (step - warm) / max(1, total - warm)
    return schedule.learning_rate * 0.5 * (1.0 + math.cos(math.pi * done))


def split_heldout(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], ...]:
    """Return (training, held-out) sequences; a share above 0 holds out at least one."""
    count = 0 if share == 0 else max(1, round(share * len(samples)))
    if count >= len(samples):
        raise ValueError(
            f"the data holds {len(samples)} sequence(s) and {count} of them would be held out; "
            "give more data or set heldout to 0."
        )
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    return [samples[i] for i in sorted(order[count:])], [samples[i] for i in order[:count]]


class Trainer:
    """Trains `draft` in place against a frozen target."""

    def __init__(
        self,
        target: Target,
        draft: DFlash,
        settings: TrainSettings,
        training: Sequence[Sample],
        heldout: Sequence[Sample] = (),
    ):
        self.target = target
        self.draft = draft
        self.settings = settings
        self.device = target.embed_tokens.weight.device
        self.corpus = Corpus(training, self.device)
        self.heldout = Corpus(heldout, self.device) if heldout else None
        schedule = settings.schedule
        self.optimizer = torch.optim.AdamW(
            draft.parameters(),
            lr=schedule.learning_rate,
            weight_decay=schedule.weight_decay,
            fused=self.device.type == "cuda",
        )
        self.per_epoch = len(epoch_order(self.corpus.lengths, schedule.batch_size, self._cpu(0)))
        self.total = schedule.steps or schedule.epochs * self.per_epoch
        self.done = 0
        self._order: tuple[int, list[Tensor]] | None = None
        self._capture: Callable[..., Captured] = capture
        self._hidden: Callable[..., Tensor] = self._block_hidden
        if settings.compile:
            self._capture = torch.compile(capture)
            self._hidden = torch.compile(self._block_hidden, dynamic=True)

    def _cpu(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.settings.seed * 1_000_003 + number)

    def _indices(self) -> Tensor:
        """Return the indices of the next step's sequences."""
        epoch, offset = divmod(self.done, self.per_epoch)
        if self._order is None or self._order[0] != epoch:
            size = self.settings.schedule.batch_size
            order = epoch_order(self.corpus.lengths, size, self._cpu(2 * epoch + 1))
            self._order = (epoch, order)
        return self._order[1][offset]

    def _block_hidden(self, features: Tensor, blocks: Blocks) -> Tensor:
        keys, values = context_kv(self.draft, features)
        return draft_hidden(self.draft, keys, values, blocks)

    def _autocast(self) -> torch.autocast:
        return torch.autocast("cuda", torch.bfloat16, enabled=self.device.type == "cuda")

    def _loss(self, batch: Batch, generator: torch.Generator) -> tuple[Tensor, Accuracy]:
        config = self.draft.config
        objective = self.settings.objective
        captured = self._capture(self.target, batch.ids, config.capture)
        anchors, live = random_anchors(
            legal_anchors(batch.supervised), self.settings.schedule.anchors, generator
        )
        blocks = make_blocks(
            batch.ids,
            batch.supervised,
            anchors,
            live,
            size=config.block_size,
            mask_token=config.mask_token_id,
        )
        rows = (blocks.positions[..., 1:] - 1).clamp(max=batch.ids.shape[1] - 1).flatten(1)
        labels = blocks.labels
        if objective.labels == "target":
            choices = target_choices(self.target, captured.hidden)
            labels = choices.gather(1, rows).view(labels.shape)
        teacher = self._teacher(captured.hidden, rows) if objective.kl else None
        edges = edges_of(self.draft)
        with self._autocast():
            hidden = self._hidden(captured.features, blocks)
            normed = self.draft.norm(hidden.flatten(0, 2))
            left = None
            if edges is not None:
                left = edges.left(normed, previous_tokens(blocks).flatten())
            slots = measure_slots(
                self.draft.head,
                hidden.flatten(0, 1),
                labels.flatten(0, 1),
                teacher,
                rows=max(1, LOGITS_AT_ONCE // config.decoder.vocab_size),
                edges=edges,
                left=left,
            )
        valid = blocks.valid.flatten(0, 1)
        loss = block_loss(slots, valid, objective)
        if edges is not None and left is not None:
            loss = loss + confidence_loss(
                edges,
                normed,
                left,
                correct=slots.correct.flatten(),
                weights=valid.flatten().float(),
            )
        return loss, Accuracy.of(slots, valid)

    @torch.no_grad()
    def _teacher(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Return the target's logits for each drafted slot, [N * A, K, V]."""
        index = rows[..., None].expand(-1, -1, hidden.shape[-1])
        logits = self.target.head(hidden.gather(1, index).flatten(0, 1))
        return logits.view(-1, self.draft.config.block_size - 1, logits.shape[-1])

    def step(self) -> StepResult:
        """Draw a batch and anchors, and make one optimiser step."""
        schedule = self.settings.schedule
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.done, self.total, schedule)
        generator = torch.Generator(self.device).manual_seed(
            self.settings.seed * 1_000_003 + 2 * self.done
        )
        parts = self._indices().split(schedule.micro_batch or schedule.batch_size)
        self.optimizer.zero_grad(set_to_none=True)
        results: list[tuple[Tensor, Accuracy]] = []
        for indices in parts:
            loss, accuracy = self._loss(self.corpus.batch(indices), generator)
            (loss / len(parts)).backward()
            results.append((loss.detach(), accuracy))
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), schedule.clip)
        self.optimizer.step()
        self.done += 1
        accuracy = results[0][1]
        for _, metrics in results[1:]:
            accuracy = accuracy + metrics
        return StepResult(torch.stack([x for x, _ in results]).mean(), norm, accuracy)

    def evaluate(self, batch_size: int = 16) -> Acceptance:
        """Return the acceptance of greedy decoding on the held-out sequences."""
        total = Acceptance(drafts=self.draft.config.block_size - 1)
        if self.heldout is None:
            return total
        order = self.heldout.lengths.argsort(stable=True)
        for indices in order.split(batch_size):
            with self._autocast():
                results = batch_acceptance(self.draft, self.target, self.heldout.batch(indices))
            for result in results:
                total.add(result)
        return total

    def save(self, path: Path) -> None:
        """Write a checkpoint atomically."""
        state = {
            "recipe": self.settings.recipe(),
            "sequences": len(self.corpus),
            "total": self.total,
            "done": self.done,
            "draft": self.draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint. Raises ValueError for one of another recipe or other data."""
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist; start without --resume.") from None
        except (OSError, RuntimeError, EOFError) as error:
            raise ValueError(
                f"{path} is damaged ({error}); remove it and start without --resume."
            ) from None
        recipe = self.settings.recipe()
        for key, value in recipe.items():
            if state["recipe"].get(key) != value:
                raise ValueError(
                    f"{path} was written with {key} = {state['recipe'].get(key)!r}, not {value!r}; "
                    "resume with the settings it was started with, or name another --output."
                )
        if state["sequences"] != len(self.corpus):
            raise ValueError(
                f"{path} was written for {state['sequences']} training sequences, the data now has "
                f"{len(self.corpus)}; resume with the same data, or name another --output."
            )
        self.draft.load_state_dict(state["draft"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
