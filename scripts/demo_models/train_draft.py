"""Train the demo drafter on the target's own answers, save it, and measure it.

    python scripts/demo_models/train_draft.py --compile --minutes 9.25

The training is in `strobe.tools.train`; this script has its prompts, answers and measurement.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from answers import answer, example_prompt, training_prompts, training_samples  # noqa: E402

from scripts.demo_models.tasks import FAMILIES, Example, check, heldout  # noqa: E402
from strobe.hub.files import read_json  # noqa: E402
from strobe.models.architectures import load_target_config  # noqa: E402
from strobe.models.dflash_drafter import DFlash  # noqa: E402
from strobe.models.target import Target  # noqa: E402
from strobe.models.weight_loading import load_target  # noqa: E402
from strobe.tools.train.acceptance_length import Acceptance, batch_acceptance  # noqa: E402
from strobe.tools.train.data import Corpus, Sample  # noqa: E402
from strobe.tools.train.draft import draft_config, find_mask_token, new_draft, save_draft  # noqa: E402
from strobe.tools.train.train_settings import DraftShape, Objective, Schedule, TrainSettings  # noqa: E402
from strobe.tools.train.trainer import Trainer  # noqa: E402

START = time.monotonic()
POSITIONS = 1280  # prompts and answers of the tasks are far shorter
BLOCK = 16


def seconds() -> float:
    """Return the seconds since the start."""
    return round(time.monotonic() - START, 1)


def say(text: str) -> None:
    """Print progress with the time."""
    print(f"[{seconds():6.1f} s] {text}", flush=True)


class HeldOut:
    """Held-out tasks of every family and mode, with the target's own answers."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any,
        count: int,
        *,
        max_tokens: int,
        temperature: float = 0.0,
    ):
        self.examples: list[Example] = []
        for thinking in (False, True):
            self.examples += heldout(count, seed=7, thinking=thinking)
        prompts = [example_prompt(tokenizer, example) for example in self.examples]
        temperatures = [temperature] * len(prompts)
        answers = answer(target, prompts, temperatures, max_tokens=max_tokens, seed=11)
        self.samples = [Sample.of(p, a) for p, a in zip(prompts, answers, strict=True)]
        texts = [tokenizer.decode(a, skip_special_tokens=True) for a in answers]
        pairs = zip(self.examples, texts, strict=True)
        self.correct = sum(check(e, text) for e, text in pairs) / len(texts)
        self.tokens = sum(map(len, answers)) / len(answers)

    def measure(self, draft: DFlash, target: Target) -> dict[str, Any]:
        """Return the acceptance of greedy blocks by family, by mode and by both."""
        results: dict[str, Acceptance] = {}
        corpus = Corpus(self.samples, target.embed_tokens.weight.device)
        for indices in corpus.lengths.argsort(stable=True).split(32):
            rows = batch_acceptance(draft, target, corpus.batch(indices))
            for i, row in zip(indices.tolist(), rows, strict=True):
                example = self.examples[i]
                mode = "thinking" if example.thinking else "direct"
                for key in ("all", mode, example.family, f"{example.family} / {mode}"):
                    results.setdefault(key, Acceptance(BLOCK - 1)).add(row)
        return {
            "prompts": len(self.samples),
            "answers_correct": round(self.correct, 4),
            "answer_tokens": round(self.tokens, 1),
            "acceptance_length": {k: round(r.length, 3) for k, r in sorted(results.items())},
            "verify_steps": results["all"].steps,
            "per_position": {
                k: [round(x, 4) for x in results[k].per_position()] for k in ("all", *FAMILIES)
            },
        }


def pack(samples: list[Sample]) -> dict[str, torch.Tensor]:
    """Pack sequences in three tensors: all ids, sequence lengths and prompt lengths."""
    return {
        "ids": torch.tensor([i for s in samples for i in s.ids], dtype=torch.int16),
        "lengths": torch.tensor([len(s.ids) for s in samples]),
        "prompts": torch.tensor([s.supervised.index(True) for s in samples]),
    }


def unpack(tensors: dict[str, torch.Tensor]) -> list[Sample]:
    """Reverse `pack`."""
    ids, offset, samples = tensors["ids"].tolist(), 0, []
    sizes = zip(tensors["lengths"].tolist(), tensors["prompts"].tolist(), strict=True)
    for length, prompt in sizes:
        samples.append(
            Sample.of(ids[offset : offset + prompt], ids[offset + prompt : offset + length])
        )
        offset += length
    return samples


def answers_of_target(
    target: Target, options: argparse.Namespace, log: dict[str, Any]
) -> list[Sample]:
    """Generate training sequences, or load them from an earlier run's file."""
    if options.data is not None and options.data.exists():
        return unpack(load_file(options.data))
    prompts = training_prompts(
        options.target, options.sequences, seed=options.seed, workers=options.workers
    )
    say(f"{len(prompts)} prompts")
    begin = time.monotonic()
    samples = training_samples(
        target,
        prompts,
        max_tokens=options.max_tokens,
        batch=options.generate_batch,
        seed=options.seed,
    )
    elapsed = time.monotonic() - begin
    tokens = sum(sum(s.supervised) for s in samples)
    log["answers"] = {
        "sequences": len(samples),
        "tokens": tokens,
        "cut": sum(sum(s.supervised) == options.max_tokens for s in samples),
        "seconds": round(elapsed, 1),
        "tokens_per_second": round(tokens / elapsed),
    }
    say(f"answers: {log['answers']}")
    if options.data is not None:
        save_file(pack(samples), options.data)
    return samples


def fit_budget(
    target: Target, draft: DFlash, settings: TrainSettings, samples: list[Sample], left: float
) -> TrainSettings:
    """Return the settings with as many steps as fit in `left` seconds, by timing real steps.

    The timed steps also warm up compilation; their learning rate is almost zero.
    """
    warmup_schedule = replace(settings.schedule, steps=10**9, warmup=0.5)
    trainer = Trainer(target, draft, replace(settings, schedule=warmup_schedule), samples)
    begin = time.monotonic()
    for _ in range(30):
        trainer.step()
    sync()
    say(f"warmed up in {time.monotonic() - begin:.1f} s")
    middle = time.monotonic()
    for _ in range(30):
        trainer.step()
    sync()
    step_seconds = (time.monotonic() - middle) / 30
    steps = max(20, int((left - (time.monotonic() - begin)) / step_seconds))
    say(f"{step_seconds * 1000:.1f} ms a step")
    return replace(settings, schedule=replace(settings.schedule, steps=steps))


def sync() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(
    target: Target,
    draft: DFlash,
    samples: list[Sample],
    options: argparse.Namespace,
    log: dict[str, Any],
) -> None:
    """Train in place until the time is up, and fill `log`."""
    settings = TrainSettings(
        target=options.target,
        data=Path("the target's own answers"),
        output=options.out,
        draft=DraftShape(layers=options.layers, block_size=BLOCK),
        objective=Objective("target", options.weighting, kl=options.kl),
        schedule=Schedule(
            batch_size=options.batch, anchors=options.anchors, learning_rate=options.rate
        ),
        heldout=0.0,
        seed=options.seed,
        compile=options.compile,
    )
    if options.steps is None:
        settings = fit_budget(target, draft, settings, samples, options.minutes * 60 - seconds())
    else:
        settings = replace(settings, schedule=replace(settings.schedule, steps=options.steps))
    trainer = Trainer(target, draft, settings, samples)
    log["settings"] |= settings.recipe()
    say(f"{trainer.total} steps, {len(trainer.corpus)} sequences")
    curve: list[dict[str, Any]] = []
    begin, blocks = time.monotonic(), torch.zeros((), device=trainer.device, dtype=torch.int64)
    log_every = max(1, trainer.total // 60)
    # --steps runs without a deadline.
    deadline = options.minutes * 60 + 30 if options.steps is None else float("inf")
    while trainer.done < trainer.total and (trainer.done % 50 or seconds() < deadline):
        result = trainer.step()
        blocks += result.accuracy.count[0]
        if trainer.done % log_every == 0 or trainer.done == trainer.total:
            curve.append({
                "step": trainer.done,
                "seconds": round(time.monotonic() - begin, 1),
                "loss": round(float(result.loss), 5),
                "gradient": round(float(result.norm), 4),
                "expected_length": round(result.accuracy.expected_length(), 3),
            })  # fmt: skip
            if trainer.done % (log_every * 6) == 0:
                say(json.dumps(curve[-1]))
    sync()
    elapsed = time.monotonic() - begin
    log["training"] = {
        "parameters": sum(p.numel() for p in draft.parameters()),
        "steps": trainer.done,
        "of_planned_steps": trainer.total,
        "seconds": round(elapsed, 1),
        "blocks": int(blocks),
        "blocks_per_second": round(int(blocks) / elapsed),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if torch.cuda.is_available()
        else None,
        "curve": curve,
    }


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.25, help="until training ends")
    parser.add_argument("--steps", type=int, help="training steps, instead of --minutes")
    parser.add_argument("--target", type=Path, default=ROOT / "strobe/demo_models/target")
    parser.add_argument("--out", type=Path, default=ROOT / "strobe/demo_models/draft")
    parser.add_argument("--log", type=Path, default=ROOT / "docs/demo_models/draft_training.json")
    parser.add_argument("--start", type=Path, help="fp32 weights of an earlier run to start from")
    parser.add_argument(
        "--data", type=Path, help="file to save the target's answers to, or load them from"
    )
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--weighting", choices=("decay", "dpace"), default="decay")
    parser.add_argument("--kl", type=float, default=0.0)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=32)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--generate-batch", type=int, default=4096)
    parser.add_argument("--max-tokens", type=int, default=320, help="maximum tokens of an answer")
    parser.add_argument("--heldout", type=int, default=100, help="tasks per family and mode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Answer, train, save, measure, write the log."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = load_target_config(options.target)
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = load_target(
        options.target, config, max_positions=POSITIONS, dtype=torch.float32, device=device
    )
    weights = (options.target / "model.safetensors").read_bytes()
    log: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "target_sha256": hashlib.sha256(weights).hexdigest(),
        "settings": {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name not in ("target", "out", "log", "data")
        },
    }
    torch.set_float32_matmul_precision("highest")
    greedy = HeldOut(target, tokenizer, options.heldout, max_tokens=options.max_tokens)
    num_sampled = max(2, options.heldout // 4)
    sampled = HeldOut(
        target, tokenizer, num_sampled, max_tokens=options.max_tokens, temperature=1.0
    )
    say(f"held-out answers right: {greedy.correct:.3f} greedy, {sampled.correct:.3f} sampled")
    samples = answers_of_target(target, options, log)
    shape = DraftShape(layers=options.layers, block_size=BLOCK)
    new_config = draft_config(shape, config, find_mask_token(tokenizer, config.decoder.vocab_size))
    draft = new_draft(new_config, target, max_positions=POSITIONS, seed=options.seed)
    if options.start is not None:
        draft.load_state_dict(load_file(options.start, device=str(device)))
    torch.set_float32_matmul_precision("high")
    train(target, draft, samples, options, log)
    save_draft(draft, options.out, read_json(options.target / "config.json"))
    state = {k: v.detach().cpu().contiguous() for k, v in draft.state_dict().items()}
    save_file(state, options.log.with_suffix(".fp32.safetensors"))
    options.log.write_text(json.dumps(log, indent=1) + "\n")
    say("saved")
    log["heldout"] = {
        "greedy": greedy.measure(draft, target),
        "temperature 1": sampled.measure(draft, target),
    }
    log["seconds"] = seconds()
    options.log.write_text(json.dumps(log, indent=1) + "\n")
    for kind, result in log["heldout"].items():
        print(
            kind, json.dumps(result["acceptance_length"], indent=1), result["per_position"]["all"]
        )
    print(json.dumps({k: v for k, v in log["training"].items() if k != "curve"}))
    say("done")


if __name__ == "__main__":
    main()
