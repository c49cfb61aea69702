"""The token whose embedding fills the empty slots of a block."""

from __future__ import annotations

from pathlib import Path

from strobe.hub.files import read_json
from strobe.models.config_readers.fields import Fields

KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Keys of the mask token in order of precedence, as in vLLM."""


def read_mask_token(fields: Fields) -> int:
    """Read the mask token's id. Raises ValueError if the config has none."""
    ids = [fields.get(key) for key in KEYS]
    mask = next((value for value in ids if value is not None), None)
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise ValueError(
            f"{fields.path}: mask_token_id is {mask!r}; a drafter needs the id of its mask token."
        )
    return mask


def find_mask_token(fields: Fields, target: Path | None, rows: int) -> int:
    """Return the config's mask token or, for drafters from before February 2026, the mask token of
    the target's tokenizer, else the first embedding row without a token.

    target: its directory, if known. rows: of its embedding. Raises ValueError if there is no such
    token.
    """
    if any(fields.get(key) is not None for key in KEYS) or target is None:
        return read_mask_token(fields)
    file = target / "tokenizer.json"
    if not file.exists():
        return read_mask_token(fields)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    settings = target / "tokenizer_config.json"
    name = read_json(settings).get("mask_token") if settings.exists() else None
    name = name.get("content") if isinstance(name, dict) else name
    token_id = tokenizer.token_to_id(name) if isinstance(name, str) else None
    if token_id is None:
        used = tokenizer.get_vocab(with_added_tokens=True).values()
        token_id = max(used, default=-1) + 1
    if token_id < rows:
        return token_id
    raise ValueError(
        f"{fields.path}: mask_token_id is missing, and the target's tokenizer has no mask token "
        f"and uses all {rows} rows of the embedding; name the id in dflash_config.mask_token_id."
    )
