"""Source text under free licences: Python's standard library, which repeats little, and the models
of transformers, which repeat much. Files, their split, a tokenizer, and prompts."""

from __future__ import annotations

import hashlib
import importlib
import json
import random
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from scripts.demo_models.make_tokenizer import SPECIAL, VISIBLE, config
from strobe.config import DEMO_MODELS

ROOTS = {
    "library": Path(sysconfig.get_path("stdlib")),
    "models": Path(transformers.__file__).parent / "models",
}
TOPICS = "pydoc_data/topics.py"
SKIPPED = {"test", "tests", "idle_test", "lib2to3", "encodings", "site-packages", "dist-packages"}
"""Folders left out: tests, third-party code, and tables of characters."""
HELDOUT = 25
"""One in this many files is held out: 2 to 4 % of the text, depending on Python's version."""
END = "<|endoftext|>"
SIDES = "held-out", "trained"
SHORTEST, LONGEST = 64, 256
"""Tokens of a prompt."""


def is_heldout(name: str) -> bool:
    """Return whether a file (its path in the standard library) is held out of training."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELDOUT == 0


def files(only: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the non-empty texts by kind: "held-out library", "trained library", and so on. only:
    paths of files, relative to one of the roots."""
    kinds: dict[str, list[str]] = {}
    for source, root in ROOTS.items():
        for name in sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py")):
            if SKIPPED.isdisjoint(name.split("/")) and (not only or name in only):
                kind = f"{'held-out' if is_heldout(name) else 'trained'} {source}"
                kinds.setdefault(kind, []).append(_read(root, name))
    if not all(side(kinds, name) for name in SIDES):
        raise ValueError(
            f"--files is {list(only)}, which leaves one side of the split empty; name more files "
            f"of {' or '.join(map(str, ROOTS.values()))}."
        )
    return kinds


def side(kinds: Mapping[str, list[Any]], name: str) -> list[Any]:
    """Return all texts of one of SIDES."""
    return [text for kind, texts in kinds.items() if kind.startswith(name) for text in texts]


def _read(root: Path, name: str) -> str:
    """Return a file's text; for the documentation, the text of its literals."""
    if name == TOPICS:
        return "\n\n".join(importlib.import_module("pydoc_data.topics").topics.values())
    return (root / name).read_bytes().decode("utf-8", errors="replace")


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """Train a byte-level BPE of `vocabulary` entries that splits text like the demo models'."""
    demo = Tokenizer.from_file(str(DEMO_MODELS / "target/tokenizer.json"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = demo.pre_tokenizer, demo.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(VISIBLE),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in VISIBLE])
    if (size := tokenizer.get_vocab_size()) != vocabulary:
        raise ValueError(f"--vocabulary is {vocabulary}, but the text gives {size}; ask for that.")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, out: Path, positions: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` next to the chat template in `out`."""
    tokenizer.save(str(out / "tokenizer.json"))
    fields = config(tokenizer, (out / "chat_template.jinja").read_text(encoding="utf-8"))
    fields |= {"eos_token": END, "model_max_length": positions}
    text = json.dumps(fields, indent=2, ensure_ascii=False) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text."""
    return [e.ids for e in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def cuts(texts: Sequence[list[int]], seed: str) -> Iterator[list[int]]:
    """Yield endless prompts of SHORTEST to LONGEST tokens, each from a random place of a text."""
    rng = random.Random(seed)
    long = [ids for ids in texts if len(ids) >= SHORTEST]
    if not long:
        raise ValueError(f"No text has {SHORTEST} tokens to cut a prompt from; name more --files.")
    weights = [len(ids) for ids in long]
    while True:
        (ids,) = rng.choices(long, weights)
        length = rng.randint(SHORTEST, min(LONGEST, len(ids)))
        start = rng.randint(0, len(ids) - length)
        yield ids[start : start + length]


def prompts(
    tokenizer: Tokenizer, kinds: dict[str, list[list[int]]], count: int, seed: int
) -> list[dict[str, str]]:
    """Return `count` lines {"prompt", "kind"}, cycling through the kinds; encoding a prompt gives
    its cut's ids."""

    def texts(kind: str) -> Iterator[str]:
        for ids in cuts(kinds[kind], f"{kind} {seed}"):
            text = tokenizer.decode(ids, skip_special_tokens=False)
            if tokenizer.encode(text, add_special_tokens=False).ids == ids:
                yield text

    sources = {kind: texts(kind) for kind in kinds}
    turns = range(count // len(kinds))
    return [{"prompt": next(sources[kind]), "kind": kind} for _ in turns for kind in sources]
