"""`python -m strobe.tools.train`: train a drafter for a target."""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import tyro
from transformers import AutoTokenizer

from strobe.hub.files import read_json
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.weight_loading import load_draft, load_target
from strobe.terminal.progress import Progress
from strobe.terminal.wording import counted
from strobe.tools.exit_status import exit_status
from strobe.tools.train.data import read_samples
from strobe.tools.train.draft import (
    draft_config,
    find_mask_token,
    new_draft,
    save_draft,
)
from strobe.tools.train.train_settings import TrainSettings
from strobe.tools.train.trainer import StepResult, Trainer, learning_rate, split_heldout
from strobe.tools.train.warm_start import continued_config, start_from

log = logging.getLogger("strobe.tools.train")
CHECKPOINT = "checkpoint.pt"


def build(settings: TrainSettings) -> Trainer:
    """Load and check everything, and return a trainer ready for its first step."""
    name = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    config = load_target_config(settings.target)
    torch_dtype = getattr(torch, config.dtype, None)
    dtype = (
        torch_dtype
        if device.type == "cuda" and isinstance(torch_dtype, torch.dtype)
        else torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(str(settings.target))
    samples = read_samples(
        settings.data,
        tokenizer,
        vocabulary=config.decoder.vocab_size,
        eos_ids=config.eos_ids,
        max_length=settings.max_length,
    )
    training, heldout = split_heldout(samples, settings.heldout, settings.seed)
    shape = settings.draft
    start_config = None if settings.start is None else load_draft_config(settings.start)
    if start_config is not None:
        new_config = continued_config(shape, start_config)
    else:
        mask_token = shape.mask_token_id
        if mask_token is None:
            mask_token = find_mask_token(tokenizer, config.decoder.vocab_size)
        new_config = draft_config(shape, config, mask_token)
    positions = settings.max_length + 64 + new_config.block_size
    target = load_target(
        settings.target, config, max_positions=positions, dtype=dtype, device=device
    )
    draft = new_draft(new_config, target, max_positions=positions, seed=settings.seed)
    if settings.start is not None and start_config is not None:
        start = load_draft(
            settings.start,
            start_config,
            target,
            max_positions=positions,
            dtype=torch.float32,
            device=device,
        )
        start_from(draft, start)
    return Trainer(
        target=target, draft=draft, settings=settings, training=training, heldout=heldout
    )


def step_record(trainer: Trainer, result: StepResult, seconds: float) -> dict[str, Any]:
    """Return a log line for an optimiser step."""
    schedule = trainer.settings.schedule
    return {
        "step": trainer.done,
        "loss": round(float(result.loss), 5),
        "gradient_norm": round(float(result.norm), 4),
        "learning_rate": learning_rate(trainer.done - 1, trainer.total, schedule),
        "expected_length": round(result.accuracy.expected_length(), 3),
        "accuracy": [round(x, 4) for x in result.accuracy.per_position()],
        "seconds_per_step": round(seconds, 4),
    }


def evaluation_record(trainer: Trainer) -> dict[str, Any]:
    """Return a log line for an evaluation on the held-out part."""
    heldout = trainer.evaluate()
    return {
        "step": trainer.done,
        "heldout_acceptance_length": round(heldout.length, 3),
        "heldout_per_position": [round(x, 4) for x in heldout.per_position()],
        "verify_steps": heldout.steps,
    }


def train(settings: TrainSettings) -> None:
    """Train to the end and write checkpoint, log and drafter to settings.output."""
    checkpoint = settings.output / CHECKPOINT
    if checkpoint.exists() and not settings.resume:
        raise ValueError(
            f"{checkpoint} exists; pass --resume to continue from it, or name another --output."
        )
    trainer = build(settings)
    if settings.resume:
        trainer.load(checkpoint)
    settings.output.mkdir(parents=True, exist_ok=True)
    log.info(
        "%s, %s, %d parameters",
        counted(len(trainer.corpus), "sequence"),
        counted(trainer.total, "step"),
        sum(p.numel() for p in trainer.draft.parameters()),
    )
    with (
        (settings.output / "train.jsonl").open("a", encoding="utf-8") as lines,
        Progress("training", trainer.total, trainer.done, "steps") as progress,
    ):
        _Run(trainer, lines, progress).finish(checkpoint)
    save_draft(trainer.draft, settings.output, read_json(settings.target / "config.json"))
    print(f"drafter written to {settings.output}", file=sys.stderr)


class _Run:
    """Trains, and reports the steps: lines of train.jsonl, and a progress line."""

    def __init__(self, trainer: Trainer, lines: TextIO, progress: Progress):
        self.trainer = trainer
        self.lines = lines
        self.progress = progress
        self.first = trainer.done + 1
        self._restart_clock()

    def finish(self, checkpoint: Path) -> None:
        """Take the steps that are left."""
        trainer = self.trainer
        settings = trainer.settings
        while trainer.done < trainer.total:
            result = trainer.step()
            last = trainer.done == trainer.total
            logged = last or trainer.done % settings.log_every == 0
            self.progress.update(done=trainer.done)
            if logged or trainer.done == self.first:
                self._report(result, logged=logged)
            if last or trainer.done % settings.save_every == 0:
                trainer.save(checkpoint)
            if trainer.heldout is not None and (last or trainer.done % settings.eval_every == 0):
                self._evaluate()

    def _report(self, result: StepResult, *, logged: bool) -> None:
        done = self.trainer.done
        seconds = (time.perf_counter() - self.since) / (done - self.first_timed)
        record = step_record(self.trainer, result, seconds)
        loss = record["loss"]
        length = record["expected_length"]
        self.progress.update(f"training (step {done}: loss {loss:.3f}, length {length:.2f})")
        if done == self.first:
            self.progress.show()
        if logged:
            self._write(record)
            self._restart_clock()

    def _evaluate(self) -> None:
        record = evaluation_record(self.trainer)
        self._write(record)
        self.progress.print(
            f"step {self.trainer.done}: held-out acceptance length "
            f"{record['heldout_acceptance_length']:.2f}"
        )
        self._restart_clock()

    def _restart_clock(self) -> None:
        """Measure the seconds per step from here."""
        self.since = time.perf_counter()
        self.first_timed = self.trainer.done

    def _write(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self.lines, flush=True)


def main() -> int:
    """Run the command line; return the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    train(tyro.cli(TrainSettings, prog="python -m strobe.tools.train"))
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
