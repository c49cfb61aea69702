"""Whether a tokenizer is the one a model was trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strobe.hub.files import read_json
from strobe.text.tokenizer import Tokenizer


def fingerprint(directory: Path) -> str | None:
    """SHA-256 of what a tokenizer.json makes of text: its model, added tokens and the steps around
    them, whatever the layout of the file. None where there is no such file."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    content: dict[str, Any] = read_json(path)
    parts = {
        key: content.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer")
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def returning(tokenizer: Tokenizer, answers: Sequence[Sequence[int]]) -> float:
    """The share of the answers' tokens, 0 to 1, that come back when an answer is read as text and
    encoded again. A model writes as it was taught to read: nearly all do with its own tokenizer,
    few with another one. Special tokens are left out."""
    special = {int(i) for i in tokenizer.hf.all_special_ids}
    num_returning = total = 0
    for answer in answers:
        plain = [token for token in answer if token not in special]
        encoded = tokenizer.encode(tokenizer.fast.decode(plain), add_special_tokens=False)
        num_returning += _common(plain, encoded)
        total += len(plain)
    return num_returning / total if total else 1.0


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for token in left:
        before = 0
        for i, value in enumerate(right, start=1):
            before, row[i] = row[i], before + 1 if token == value else max(row[i], row[i - 1])
    return row[-1]
