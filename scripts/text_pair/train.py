"""Train a target and its DFlash drafter on the source text of Python's library and of transformers.

    python scripts/text_pair/train.py --out DIRECTORY

Writes DIRECTORY/target, DIRECTORY/draft, prompts.jsonl and log.json. It fits into --minutes on one
GPU; `--small` is for a CPU. Tokens are short (a vocabulary of 512, two characters each), so that
blocks are predictable: with 8192, a step yielded 1.8 tokens at temperature 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.demo_models.answers import answer  # noqa: E402
from scripts.demo_models.train_draft import BLOCK, say, seconds, train  # noqa: E402
from scripts.text_pair import corpus  # noqa: E402
from scripts.text_pair.target import train_target  # noqa: E402
from strobe.hub.files import read_json  # noqa: E402
from strobe.models.architectures import load_target_config  # noqa: E402
from strobe.models.dflash import DFlash  # noqa: E402
from strobe.models.load import load_target  # noqa: E402
from strobe.models.target import Target  # noqa: E402
from strobe.tools.train.acceptance import Acceptance, batch_acceptance  # noqa: E402
from strobe.tools.train.data import Corpus, Sample  # noqa: E402
from strobe.tools.train.draft import draft_config, find_mask_token, new_draft, save_draft  # noqa: E402
from strobe.tools.train.settings import DraftShape  # noqa: E402

PROMPTS = 256
GREEDY = 0.3
"""Share of greedy answers in the drafter's training data."""
TARGET_SHARE, ANSWER_SHARE = 0.22, 0.22
"""Maximum shares of the time for training the target and for generating answers."""
SETTINGS = {  # for a GPU, with --small
    "hidden": (768, 64, "size of the residual stream"),
    "layers": (16, 8, "of the target"),
    "heads": (12, 4, "query heads"),
    "kv-heads": (4, 2, "key and value heads"),
    "head-dim": (64, 16, "size of a head"),
    "inner": (2304, 128, "size of an MLP"),
    "vocabulary": (
        512,
        512,
        "entries of the tokenizer",
    ),
    "rows": (16, 4, "of a batch for the target"),
    "length": (1024, 128, "tokens of a row"),
    "epochs": (12, 4, "maximum for the target"),
    "rate": (6e-4, 3e-3, "peak learning rate of the target"),
    "warmup": (100, 10, "steps of the target"),
    "sequences": (32768, 64, "maximum answers to train the drafter on"),
    "generate-batch": (1024, 16, "answers generated at once"),
    "max-tokens": (320, 48, "maximum tokens of an answer"),
    "draft-layers": (4, 2, "of the drafter"),
    "draft-batch": (64, 8, "sequences of a step of the drafter"),
    "anchors": (64, 8, "blocks of a sequence"),
    "draft-rate": (1e-3, 3e-3, "peak learning rate of the drafter"),
    "measure": (64, 8, "prompts to measure acceptance with"),
    "seed": (0, 0, "of everything"),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="directory of the pair")
    parser.add_argument("--log", type=Path, help="JSON file, instead of OUT/log.json")
    parser.add_argument("--minutes", type=float, default=18.0, help="for everything")
    parser.add_argument("--steps", type=int, help="of each training, instead of --minutes")
    parser.add_argument("--small", action="store_true", help="tiny sizes, for a CPU")
    parser.add_argument("--eager", action="store_true", help="no torch.compile on a GPU")
    parser.add_argument("--files", nargs="+", default=(), help="only these of the corpus")
    parser.add_argument("--keep", choices=("best", "last"), default="best", help="target weights")
    small = parser.parse_known_args(argv)[0].small
    for name, (*values, text) in SETTINGS.items():
        value = values[small]
        parser.add_argument(f"--{name}", type=type(value), default=value, help=text)
    options = parser.parse_args(argv)
    if options.out.resolve().is_relative_to(ROOT / "strobe"):
        raise ValueError(
            f"--out is {options.out}, which lies in the package; name a directory outside "
            f"{ROOT / 'strobe'}."
        )
    options.log = options.log or options.out / "log.json"
    return options


def training_answers(
    target: Target, texts: list[list[int]], options: argparse.Namespace, deadline: float
) -> list[Sample]:
    """Generate answers at temperature 1, a share of GREEDY at 0, until `deadline` seconds."""
    generator = torch.Generator().manual_seed(options.seed)
    source = corpus.cuts(texts, f"answers {options.seed}")
    samples: list[Sample] = []
    for start in range(0, options.sequences, options.generate_batch):
        if start and not options.steps and seconds() > deadline:
            break
        count = min(options.generate_batch, options.sequences - start)
        prompts = [next(source) for _ in range(count)]
        temperatures = (torch.rand(count, generator=generator) >= GREEDY).float().tolist()
        answers = answer(
            target, prompts, temperatures, max_tokens=options.max_tokens, seed=options.seed + start
        )
        samples += [Sample.of(p, a) for p, a in zip(prompts, answers, strict=True) if len(a) > 1]
    return samples


def measure(draft: DFlash, target: Target, samples: list[Sample]) -> list[Acceptance]:
    """Return the acceptance of each answer."""
    device = target.embed_tokens.weight.device
    data, results = Corpus(samples, device), list[Acceptance]()
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for indices in torch.arange(len(samples)).split(16):
            results += batch_acceptance(draft, target, data.batch(indices))
    return results


def figures(results: list[Acceptance]) -> dict[str, Any]:
    """Return acceptance over all verify steps, and per answer."""
    pooled = Acceptance(BLOCK - 1)
    for result in results:
        pooled.add(result)
    return {
        "acceptance_length": round(pooled.length, 3),
        "of_each_answer": sorted(round(r.length, 2) for r in results if r.steps),
        "per_position": [round(x, 4) for x in pooled.per_position()],
        "verify_steps": pooled.steps,
    }


@contextlib.contextmanager
def stage(name: str, log: dict[str, Any], path: Path) -> Iterator[None]:
    """Add the seconds of the enclosed block to the log, and write it."""
    begin = seconds()
    yield
    log["seconds"][name] = round(seconds() - begin, 1)
    path.write_text(json.dumps(log, indent=1) + "\n")
    say(f"{name}: {log['seconds'][name]} s")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run all stages and return the log."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log: dict[str, Any] = {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {k: v for k, v in vars(options).items() if k not in ("out", "log")},
        "seconds": {},
    }
    for folder in (options.out, options.log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    directory = options.out / "target"
    with stage("corpus", log, options.log):
        texts = corpus.files(options.files)
        tokenizer = corpus.train_tokenizer(corpus.side(texts, "trained"), options.vocabulary)
        kinds = {kind: corpus.encode(tokenizer, kind_texts) for kind, kind_texts in texts.items()}
        sides = {name: corpus.side(kinds, name) for name in corpus.SIDES}
        log["corpus"] = {
            kind: {"files": len(ids), "tokens": sum(map(len, ids))} for kind, ids in kinds.items()
        }
        lines = corpus.prompts(tokenizer, kinds, PROMPTS, options.seed)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (options.out / "prompts.jsonl").write_text(text, encoding="utf-8")
    with stage("target", log, options.log):
        left = max(1.0, options.minutes * 60 * TARGET_SHARE - seconds())
        log["target"] = train_target(sides, tokenizer, directory, options, left)
    config = load_target_config(directory)
    positions = corpus.LONGEST + options.max_tokens + 64 + BLOCK

    def target_in(dtype: torch.dtype) -> Target:
        return load_target(directory, config, max_positions=positions, dtype=dtype, device=device)

    with stage("answers", log, options.log):
        target = target_in(torch.float32)
        deadline = seconds() + options.minutes * 60 * ANSWER_SHARE
        samples = training_answers(target, sides["trained"], options, deadline)
        log["answers"] = {
            "sequences": len(samples),
            "tokens": sum(sum(sample.supervised) for sample in samples),
        }
        measured_lines = lines[: options.measure]
        prompts = corpus.encode(tokenizer, [line["prompt"] for line in measured_lines])
        measured = {
            name: answer(
                target, prompts, [heat] * len(prompts), max_tokens=options.max_tokens, seed=11
            )
            for name, heat in (("greedy", 0.0), ("temperature 1", 1.0))
        }
    with stage("draft", log, options.log):
        if device.type == "cuda":  # the dtype in which it is served
            target = target_in(torch.bfloat16)
        mask = find_mask_token(AutoTokenizer.from_pretrained(directory), config.decoder.vocab_size)
        shape = DraftShape(layers=options.draft_layers, block_size=BLOCK)
        new_config = draft_config(shape, config, mask)
        draft = new_draft(new_config, target, max_positions=positions, seed=options.seed)
        settings = argparse.Namespace(
            target=directory,
            out=options.out / "draft",
            minutes=options.minutes - 1,  # leave a minute for saving and measuring
            steps=options.steps,
            layers=options.draft_layers,
            weighting="decay",
            kl=0.0,
            batch=options.draft_batch,
            anchors=options.anchors,
            rate=options.draft_rate,
            seed=options.seed,
            compile=device.type == "cuda" and not options.eager,
        )
        train(target, draft, samples, settings, log)
        save_draft(draft, settings.out, read_json(directory / "config.json"))
    with stage("acceptance", log, options.log):
        log["acceptance"] = {"counted": "greedy drafts, against the greedy or the sampled answer"}
        for name, answers in measured.items():
            pairs = zip(prompts, answers, strict=True)
            results = measure(draft, target, [Sample.of(p, a) for p, a in pairs])
            indices = {
                k: [i for i, line in enumerate(measured_lines) if line["kind"] == k] for k in kinds
            }
            log["acceptance"][name] = {
                k: figures([results[i] for i in indices[k]]) for k in indices
            }
    return log


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    try:
        log = run(parse(argv))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    for name in ("greedy", "temperature 1"):
        for kind, result in log["acceptance"][name].items():
            print(f"{name}, {kind}: {result['acceptance_length']} tokens per verify step")


if __name__ == "__main__":
    main()
