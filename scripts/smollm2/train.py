"""Train SmolLM2's drafter on its own answers, for a fixed time on one GPU.

    python scripts/smollm2/train.py TARGET OUT answers-*.npz --minutes 5
    python scripts/smollm2/train.py TARGET OUT answers-*.npz --minutes 5 --start OUT --end-rate 0
    python scripts/smollm2/train.py TARGET OUT answers-*.npz --start DRAFT --head dflash2 --rank 64

`--start` continues from the weights of an earlier run, whose drafter may have no head yet. The
learning rate falls in a line from `--rate` to `--end-rate` over the time. OUT gets the drafter in
files under 16 MiB, every two minutes and at the end, and log.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.smollm2.answers import Answered, load  # noqa: E402
from scripts.smollm2.fused_loss import BlockLoss, LossInputs, block_loss  # noqa: E402
from scripts.smollm2.packed import (  # noqa: E402
    Rows,
    block_hidden,
    dense_attention,
    draw_blocks,
    pack,
    target_rows,
)
from scripts.smollm2.prompts import KINDS  # noqa: E402
from scripts.smollm2.shards import save_tensors  # noqa: E402
from strobe.hub.files import read_json  # noqa: E402
from strobe.models.architectures import load_draft_config, load_target_config  # noqa: E402
from strobe.models.dflash_drafter import DFlash  # noqa: E402
from strobe.models.model_config import DraftConfig  # noqa: E402
from strobe.models.target import Target  # noqa: E402
from strobe.models.weight_loading import load_draft, load_target  # noqa: E402
from strobe.tools.train.acceptance_length import Acceptance, batch_acceptance  # noqa: E402
from strobe.tools.train.data import Corpus, Sample  # noqa: E402
from strobe.tools.train.draft import (  # noqa: E402
    as_saved,
    checkpoint_config,
    draft_config,
    new_draft,
)
from strobe.tools.train.edges import (  # noqa: E402
    Edges,
    candidate_loss,
    confidence_loss,
    edges_of,
    previous_tokens,
)
from strobe.tools.train.loss import dpace_weights  # noqa: E402
from strobe.tools.train.train_settings import DraftShape  # noqa: E402
from strobe.tools.train.warm_start import start_from  # noqa: E402

START = time.monotonic()
MASK_TOKEN = 16
"""`<empty_output>`, which no chat contains."""
POSITIONS = 1024
WARMUP = 100
"""Steps until the learning rate is reached."""


def say(text: str) -> None:
    """Print progress with the time."""
    print(f"[{time.monotonic() - START:6.1f} s] {text}", flush=True)


def save(draft: DFlash, directory: Path, target_config: dict[str, Any]) -> None:
    """Write config.json and the weights in bf16, in files of at most 16 MiB."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.to("cpu", torch.bfloat16).contiguous()
        for name, value in as_saved(draft).items()
    }
    save_tensors(tensors, directory)
    config = checkpoint_config(draft.config, target_config)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class HeldOut:
    """Held-out answers by kind and temperature 0 or 1."""

    def __init__(self, answers: list[Answered], count: int, device: torch.device):
        self.device = device
        self.groups: dict[str, list[Sample]] = {}
        for item in answers:
            if item.heldout and item.temperature in (0.0, 1.0):
                name = f"{KINDS[item.kind]}, T = {item.temperature:g}"
                group = self.groups.setdefault(name, [])
                if len(group) < count:
                    group.append(Sample.of(item.prompt, item.answer))

    @torch.no_grad()
    def measure(self, draft: DFlash, target: Target) -> dict[str, Any]:
        """Return tokens per verify step; drafts are chosen as in serving at the temperature."""
        results: dict[str, Any] = {}
        generator = torch.Generator(self.device).manual_seed(0)
        for name, samples in sorted(self.groups.items()):
            total = Acceptance(draft.config.block_size - 1)
            corpus = Corpus(samples, self.device)
            drawn = generator if name.endswith("T = 1") else None
            for indices in corpus.lengths.argsort(stable=True).split(16):
                with autocast(self.device):
                    rows = batch_acceptance(draft, target, corpus.batch(indices), drawn)
                for row in rows:
                    total.add(row)
            results[name] = {
                "answers": len(samples),
                "length": round(total.length, 3),
                "per_position": [round(x, 3) for x in total.per_position()],
            }
        return results


def autocast(device: torch.device) -> torch.autocast:
    """Return bf16 autocast on a GPU, none on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def read_draft(
    options: argparse.Namespace, config: DraftConfig, target: Target, device: torch.device
) -> DFlash:
    """Return a drafter, trainable in fp32, with the weights of an earlier run."""
    start_config = load_draft_config(options.start)
    start = load_draft(
        options.start,
        start_config,
        target,
        max_positions=POSITIONS,
        dtype=torch.float32,
        device=device,
    )
    draft = new_draft(config, target, max_positions=POSITIONS, seed=options.seed)
    start_from(draft, start)
    return draft


def new_config(options: argparse.Namespace, target: Target) -> DraftConfig:
    """Return the config of the drafter to train."""
    shape = DraftShape(
        layers=options.layers,
        block_size=options.block_size,
        features=options.features,
        intermediate_size=options.intermediate_size,
        head=options.head,
        rank=options.rank,
        candidates=options.candidates,
        conv_group=options.conv_group,
        confidence=options.confidence,
    )
    return draft_config(shape, target.config, MASK_TOKEN)


def create_draft(options: argparse.Namespace, target: Target, device: torch.device) -> DFlash:
    """Return the drafter to train: new, or from `--start`."""
    config = new_config(options, target)
    if options.start:
        return read_draft(options, config, target, device)
    return new_draft(config, target, max_positions=POSITIONS, seed=options.seed)


def is_muon_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon trains it: matrices between rows, but no tables of tokens."""
    tables = ("codebook", "markov_w1.weight", "markov_w2.weight", "confidence_head.proj.weight")
    return parameter.dim() == 2 and not name.endswith(tables)


class PackedTrainer:
    """Optimiser steps on packed rows. Matrices are trained with Muon, the others with AdamW."""

    def __init__(self, target: Target, draft: DFlash, rows: Rows, options: argparse.Namespace):
        self.target, self.draft, self.rows, self.options = target, draft, rows, options
        self.device = target.embed_tokens.weight.device
        self.head = target.output.weight.to(torch.bfloat16)
        self.edges = edges_of(draft)
        named = dict(draft.named_parameters())
        matrices = [p for name, p in named.items() if is_muon_matrix(name, p)]
        others = {n: p for n, p in named.items() if not is_muon_matrix(n, p)}
        tables = [p for p in others.values() if p.dim() == 2]
        vectors = [p for p in others.values() if p.dim() != 2]
        groups = [
            {"params": vectors, "share": 1.0},
            {"params": tables, "share": options.table_rate},
        ]
        self.optimizers = [
            torch.optim.Muon(
                matrices,
                lr=options.rate,
                weight_decay=options.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=options.rate,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        self.done = options.first_step
        self.hidden: Callable[..., Tensor] = block_hidden
        self.attention: Callable[..., Tensor] = (
            flex_attention if self.device.type == "cuda" else dense_attention
        )
        self.make_mask: Callable[..., Any] = create_block_mask
        if options.compile:
            self.hidden = torch.compile(block_hidden, dynamic=False)
            self.make_mask = torch.compile(create_block_mask, dynamic=False)

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next step."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("share", 1.0)

    def step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make one step; return the loss, and per draft the numbers of right ones and of all."""
        options, config = self.options, self.draft.config
        rows = self.rows.batch(self.done, options.rows, options.seed)
        generator = torch.Generator(self.device).manual_seed(options.seed * 1_000_003 + self.done)
        features, last = target_rows(self.target, rows, config.capture)
        drawn = draw_blocks(
            rows,
            options.anchors,
            size=config.block_size,
            mask_token=config.mask_token_id,
            generator=generator,
            make_mask=self.make_mask,
        )
        blocks = drawn.blocks
        with torch.no_grad():
            teacher = self.target.norm(last).flatten(0, 1).to(self.head.dtype)
        count, length = rows.ids.shape
        columns = blocks.anchors[..., None] + torch.arange(
            config.block_size - 1, device=self.device
        )
        first = torch.arange(count, device=self.device)[:, None, None] * length
        teacher_rows = (columns.clamp(max=length - 1) + first).flatten()
        with autocast(self.device):
            hidden = self.hidden(
                self.draft,
                features,
                rows.positions,
                blocks.ids,
                drawn.positions,
                drawn.mask,
                self.attention,
            )
            normed = self.draft.norm(hidden).flatten(0, 2).to(self.head.dtype)
        drafts = config.block_size - 1
        sampled = rows.sampled.gather(1, blocks.anchors)[..., None].expand(-1, -1, drafts).flatten()
        valid = blocks.valid.flatten(0, 1)

        def weigh(entropy: Tensor, part: slice) -> Tensor:
            own = valid.flatten()[part].view(-1, drafts)
            return (dpace_weights(entropy.view(-1, drafts), own, options.alpha) * own).flatten()

        inputs = LossInputs(
            head=self.head,
            teacher_hidden=teacher,
            teacher_rows=teacher_rows,
            labels=blocks.labels.flatten(),
            shares=torch.where(sampled, options.sampled_share, options.greedy_share),
            variation=options.variation,
            parts=max(1, count // options.loss_rows),
            weigh=weigh,
            candidates=0 if self.edges is None else self.compared_candidates(self.edges),
        )
        with autocast(self.device):
            loss, best = self.loss(normed, previous_tokens(blocks).flatten(), inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.done += 1
        right = (best.view(-1, drafts) == blocks.labels.flatten(0, 1)) & valid
        return loss.detach(), right.sum(0), valid.sum(0)

    def compared_candidates(self, edges: Edges) -> int:
        """Return the number of candidates that the loss compares, 0 for all tokens."""
        return 0 if self.options.full_loss else edges.candidates or 0

    def loss(self, normed: Tensor, previous: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
        """Return the loss, and the best draft of each slot. normed [R, H]; previous [R]: the true
        token before each slot."""
        edges = self.edges
        if edges is None:
            result = block_loss(normed, inputs)
            return mean_loss(result), result.best
        left = edges.left(normed, previous)
        if not inputs.candidates:
            result = block_loss(normed, inputs, (left, edges.right))
            loss = mean_loss(result)
            best = result.best
        else:
            result = block_loss(normed, inputs)
            logits = torch.bmm(F.embedding(result.ids, self.head), normed[..., None])[..., 0]
            chosen = candidate_loss(
                edges.scores(logits, left, result.ids),
                result.ids,
                result.teacher,
                inputs.shares,
                self.options.variation,
            )
            weights = inputs.weigh(chosen.entropy, slice(None))
            own = (weights * chosen.loss).sum() / weights.sum().clamp(min=1e-6)
            share = self.options.unary_share
            loss = (1.0 - share) * own + share * mean_loss(result)
            best = chosen.best
        correct = best == inputs.labels
        even = inputs.weigh(torch.zeros_like(inputs.shares), slice(None))
        return loss + confidence_loss(edges, normed, left, correct=correct, weights=even), best


def mean_loss(result: BlockLoss) -> Tensor:
    """Return the weighted mean of the slots' losses."""
    return result.total / result.weight.clamp(min=1e-6)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("answers", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--steps", type=int, help="at most so many steps")
    parser.add_argument("--start", type=Path, help="drafter of an earlier run")
    parser.add_argument("--first-step", type=int, default=0, help="steps of earlier runs")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--features", type=int, default=5, help="target layers that are read")
    parser.add_argument("--intermediate-size", type=int, help="width of the MLP")
    parser.add_argument("--head", default="dflash", choices=("dflash", "dflash2", "dspark"))
    parser.add_argument("--rank", type=int, default=64, help="of a head")
    parser.add_argument("--candidates", type=int, help="of a slot; all for dspark, 16 for dflash2")
    parser.add_argument("--conv-group", type=int, default=16, help="channels of a kernel")
    parser.add_argument("--confidence", action="store_true", help="add dspark's confidence head")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--rows", type=int, default=64, help="rows of a step")
    parser.add_argument("--loss-rows", type=int, default=8, help="rows whose logits are in memory")
    parser.add_argument("--anchors", type=int, default=128, help="blocks of a row")
    parser.add_argument("--greedy-share", type=float, default=0.3, help="soft part of the labels")
    parser.add_argument("--sampled-share", type=float, default=1.0, help="of sampled answers")
    parser.add_argument("--variation", type=float, default=0.7, help="total variation's part")
    parser.add_argument("--alpha", type=float, default=0.5, help="smoothing of D-PACE's weights")
    parser.add_argument("--unary-share", type=float, default=0.3, help="loss before the edges")
    parser.add_argument(
        "--full-loss", action="store_true", help="compare all tokens, not the candidates alone"
    )
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--table-rate", type=float, default=1.0, help="factor for tables of tokens")
    parser.add_argument("--end-rate", type=float, default=2e-4)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--heldout", type=int, default=96, help="answers of a kind")
    parser.add_argument("--save-minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def train(
    trainer: PackedTrainer, options: argparse.Namespace, save_now: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Train until the time is up; yield a record every 100 steps."""
    begin = last_save = last = time.monotonic()
    limit = options.minutes * 60
    drafts = trainer.draft.config.block_size - 1
    right, count = (torch.zeros(drafts, device=trainer.device) for _ in range(2))
    steps = 0
    while (spent := time.monotonic() - begin) < limit and steps != options.steps:
        rate = options.rate + (options.end_rate - options.rate) * spent / limit
        trainer.set_rate(rate * min(1.0, (steps + 1) / WARMUP))
        loss, own_right, own_count = trainer.step()
        right, count, steps = right + own_right, count + own_count, steps + 1
        if steps % 100 == 0 or steps in (1, 10, 30) or steps == options.steps:
            accuracy = (right / count.clamp(min=1)).tolist()
            expected = 1.0 + float((right / count.clamp(min=1)).cumprod(0).sum())
            now = time.monotonic()
            yield {
                "step": trainer.done,
                "seconds": round(now - begin, 1),
                "loss": round(float(loss), 4),
                "expected_length": round(expected, 3),
                "accuracy": [round(x, 3) for x in accuracy],
                "anchors_per_second": round(float(count[0]) / (now - last)),
                "rate": round(rate, 6),
            }
            right, count, last = torch.zeros_like(right), torch.zeros_like(count), now
        if time.monotonic() - last_save > options.save_minutes * 60:
            save_now()
            last_save = time.monotonic()


def main() -> None:
    """Load, pack, train, save, measure."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    target = load_target(
        options.target,
        load_target_config(options.target),
        max_positions=POSITIONS,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        device=device,
    )
    answers = load(options.answers)
    sequences = [
        ((a.prompt + a.answer)[: options.length], len(a.prompt), a.temperature > 0)
        for a in answers
        if not a.heldout
    ]
    say(f"{len(sequences)} answers")
    rows = Rows(pack(sequences, options.length, options.seed), device)
    filled = sum(len(ids) for ids, *_ in sequences) / rows.count / options.length
    say(f"{rows.count} rows, {filled:.1%} filled")
    draft = create_draft(options, target, device)
    heldout = HeldOut(answers, options.heldout, device)
    trainer = PackedTrainer(target, draft, rows, options)
    target_config = read_json(options.target / "config.json")
    log: dict[str, Any] = {
        "settings": {
            k: v if isinstance(v, int | float) else str(v) for k, v in vars(options).items()
        },
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "parameters": sum(p.numel() for p in draft.parameters()),
        "curve": [],
    }
    for record in train(trainer, options, lambda: save(draft, options.out, target_config)):
        log["curve"].append(record)
        say(json.dumps(record))
    save(draft, options.out, target_config)
    say("saved")
    log["heldout"] = heldout.measure(draft, target)
    for name, result in log["heldout"].items():
        say(f"{name}: {result}")
    (options.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
