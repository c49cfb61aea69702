"""Settings of a training run; the command line is generated from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from strobe.models.heads.walk import MAX_CANDIDATES


def _at_least(name: str, value: float, low: float) -> None:
    if value < low:
        raise ValueError(f"{name} is {value!r}, but must be at least {low:g}.")


def _share(name: str, value: float) -> None:
    if not 0.0 <= value < 1.0:
        raise ValueError(f"{name} is {value!r}, but must lie in [0, 1); 0.05 means 5 %.")


@dataclass(frozen=True)
class DraftShape:
    """Shape of the new drafter; everything else equals the target's."""

    layers: int = 5
    """Decoder layers of the drafter."""
    block_size: int = 16
    """Slots of a block: the bonus token and the tokens drafted in one pass."""
    features: int = 5
    """Number of target layers that the drafter reads, spread by z-lab's rule."""
    intermediate_size: int | None = None
    """Width of the MLP; None uses the target's."""
    target_layer_ids: tuple[int, ...] | None = None
    """The target layers whose output is read, counted from 0, instead of the rule's."""
    mask_token_id: int | None = None
    """The token that fills empty slots; None asks the tokenizer."""
    sliding_layers: int = 0
    """Number of first layers that see only a window and are causal within the block."""
    sliding_window: int = 2048
    """Tokens that a sliding layer sees."""
    head: Literal["dflash", "dflash2", "dspark"] = "dflash"
    """How drafts depend on each other: not at all, by DFlash2's selector with convolutions in the
    layers, or by DSpark's Markov head."""
    rank: int = 256
    """Size of a head's vectors of tokens; each of its two tables has as many columns."""
    candidates: int | None = None
    """Best tokens of each slot among which a head chooses; None is 16 for dflash2, all for
    dspark."""
    conv_taps: int = 2
    """Rows that a convolution of dflash2 reads."""
    conv_group: int = 16
    """Channels that share a dynamic kernel in dflash2; a divisor of the hidden size."""
    confidence: bool = False
    """Whether dspark gets a confidence head."""

    def __post_init__(self) -> None:
        _at_least("draft.layers", self.layers, 1)
        _at_least("draft.block_size", self.block_size, 2)
        _at_least("draft.features", self.features, 1)
        _at_least("draft.sliding_window", self.sliding_window, 1)
        _at_least("draft.rank", self.rank, 1)
        _at_least("draft.conv_taps", self.conv_taps, 1)
        _at_least("draft.conv_group", self.conv_group, 1)
        if self.candidates is not None and not 1 <= self.candidates <= MAX_CANDIDATES:
            raise ValueError(
                f"draft.candidates is {self.candidates}, but must be 1 to {MAX_CANDIDATES}; 16 is "
                "usual."
            )
        if self.confidence and self.head != "dspark":
            raise ValueError(
                f"draft.confidence needs draft.head dspark, but the head is {self.head}; leave one "
                "of them out."
            )
        if not 0 <= self.sliding_layers <= self.layers:
            raise ValueError(
                f"draft.sliding_layers is {self.sliding_layers}, but the drafter has "
                f"{self.layers} layers; ask for 0 to {self.layers}."
            )


@dataclass(frozen=True)
class Objective:
    """The loss. The formulas are in `strobe.tools.train.loss`."""

    labels: Literal["data", "target"] = "target"
    """The tokens of the answers, or the target's own argmax after the true prefix: equal for greedy
    answers, less noisy for sampled ones."""
    weighting: Literal["decay", "dpace"] = "decay"
    """Weight of each slot: decaying with its distance, or by its share in the accepted length."""
    gamma: float | None = None
    """Decay constant; None uses the paper's for the block size."""
    alpha: float = 0.5
    """Smoothing of dpace."""
    kl: float = 0.0
    """Weight of KL(target || drafter), added to the cross entropy."""
    unary_share: float = 0.3
    """Share of the logits that choose candidates, for a head that chooses among some."""

    def __post_init__(self) -> None:
        if self.gamma is not None and self.gamma <= 0:
            raise ValueError(f"objective.gamma is {self.gamma!r}, but must be above 0; 7 is usual.")
        _share("objective.alpha", self.alpha)
        _at_least("objective.kl", self.kl, 0)
        _share("objective.unary_share", self.unary_share)


@dataclass(frozen=True)
class Schedule:
    """Length of the training, batch sizes and learning rate."""

    epochs: int = 6
    """Passes over the data."""
    steps: int | None = None
    """Optimiser steps, instead of epochs."""
    batch_size: int = 32
    """Sequences per optimiser step."""
    micro_batch: int | None = None
    """Sequences in memory at once, a divisor of batch_size; None is the whole batch."""
    anchors: int = 512
    """Blocks sampled per sequence and step."""
    learning_rate: float = 6e-4
    """The peak, from which a cosine falls to 0."""
    warmup: float = 0.04
    """Share of the steps until the peak."""
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
    clip: float = 1.0
    """Maximum norm of the gradient."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "anchors"):
            _at_least(f"schedule.{name}", getattr(self, name), 1)
        if self.steps is not None:
            _at_least("schedule.steps", self.steps, 1)
        if self.micro_batch is not None and (
            self.micro_batch < 1 or self.batch_size % self.micro_batch
        ):
            raise ValueError(
                f"schedule.micro_batch is {self.micro_batch}, but must divide batch_size "
                f"{self.batch_size}."
            )
        if self.learning_rate <= 0:
            raise ValueError(
                f"schedule.learning_rate is {self.learning_rate!r}, but must be above 0; "
                "6e-4 is usual."
            )
        _share("schedule.warmup", self.warmup)
        _at_least("schedule.weight_decay", self.weight_decay, 0)
        if self.clip <= 0:
            raise ValueError(f"schedule.clip is {self.clip!r}, but must be above 0; 1.0 is usual.")


@dataclass(frozen=True)
class TrainSettings:
    """Train a DFlash drafter for a Qwen3 target. See docs/training.md."""

    target: Path
    """Directory of the target."""
    data: Path
    """JSONL of the target's own answers, as messages or as prompt_ids and output_ids."""
    output: Path
    """Directory for the drafter, the checkpoint and the log."""
    start: Path | None = None
    """Directory of a drafter for the same target whose weights and shape the new one takes; with
    draft.head it gets a head that changes nothing at first."""
    draft: DraftShape = DraftShape()
    objective: Objective = Objective()
    schedule: Schedule = Schedule()
    max_length: int = 3072
    """Maximum tokens of a sequence; the rest is cut off."""
    heldout: float = 0.02
    """Share of the sequences used only for evaluation."""
    seed: int = 0
    """Seed of the weights, the order, the anchors and the held-out part."""
    device: str | None = None
    """cpu, cuda or cuda:N; None uses CUDA if available."""
    compile: bool = False
    """Use torch.compile; it pays for long runs on CUDA."""
    log_every: int = 20
    """Steps between log lines."""
    eval_every: int = 1000
    """Steps between evaluations on the held-out part."""
    save_every: int = 1000
    """Steps between checkpoints."""
    resume: bool = False
    """Continue from the checkpoint in output."""

    def __post_init__(self) -> None:
        _at_least("max_length", self.max_length, 2)
        _share("heldout", self.heldout)
        for name in ("log_every", "eval_every", "save_every"):
            _at_least(name, getattr(self, name), 1)

    def recipe(self) -> dict[str, Any]:
        """Return the settings that must match to resume from a checkpoint, as JSON values."""
        return {
            "start": None if self.start is None else str(self.start),
            "draft": asdict(self.draft),
            "objective": asdict(self.objective),
            "schedule": asdict(self.schedule),
            "max_length": self.max_length,
            "heldout": self.heldout,
            "seed": self.seed,
        }
