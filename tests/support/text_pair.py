"""A tiny pair that reads text: random weights with the demo models' tokenizer."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from strobe.config import DEMO_MODELS
from tests.support.tiny_checkpoints import make_draft, make_target

VOCAB = 2048
MASK_TOKEN = 3
EOS_IDS = [2, 0]
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Pair:
    """Directories of a target and of a matching drafter."""

    target: Path
    draft: Path

    def copied(self, directory: Path) -> Pair:
        """Return a copy that a test may damage."""
        shutil.copytree(self.target, directory / "target")
        shutil.copytree(self.draft, directory / "draft")
        return Pair(directory / "target", directory / "draft")


def make_pair(directory: Path) -> Pair:
    """Write a tiny pair with the demo models' tokenizer."""
    pair = Pair(directory / "target", directory / "draft")
    make_target(pair.target, vocab_size=VOCAB, eos_token_id=EOS_IDS)
    for name in TEXT_FILES:
        shutil.copy(DEMO_MODELS / "target" / name, pair.target)
    make_draft(pair.draft, mask_token=MASK_TOKEN, top={"vocab_size": VOCAB})
    return pair
