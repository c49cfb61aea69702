"""Check whether a tokenizer is the one that a model was trained with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from strobe.hub.files import read_json
from strobe.text.tokenizer import Tokenizer


def fingerprint(directory: Path) -> str | None:
    """Return a SHA-256 of the parts of tokenizer.json that decide the encoding (model, added
    tokens, normalizer, pre-tokenizer), whatever the file's layout; None without the file."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    content: dict[str, Any] = read_json(path)
    parts = {
        key: content.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer")
    }
    text = json.dumps(parts, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def roundtrip_share(tokenizer: Tokenizer, answers: Sequence[Sequence[int]]) -> float:
    """Return the share of the answers' tokens, 0 to 1, that decoding and encoding preserves:
    nearly all with the model's own tokenizer, few with another. Special tokens do not count."""
    special = {int(i) for i in tokenizer.hf.all_special_ids}
    preserved = total = 0
    for answer in answers:
        plain = [token for token in answer if token not in special]
        encoded = tokenizer.encode(tokenizer.fast.decode(plain), add_special_tokens=False)
        preserved += _common_length(plain, encoded)
        total += len(plain)
    return preserved / total if total else 1.0


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for token in left:
        diagonal = 0
        for i, value in enumerate(right, start=1):
            above = row[i]
            row[i] = diagonal + 1 if token == value else max(above, row[i - 1])
            diagonal = above
    return row[-1]
