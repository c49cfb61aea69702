"""How files name tensors, and checks of a drafter's tensors that its module does not make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from strobe.models.config import DraftConfig

VOCABULARY = ("d2t", "t2d")
"""The tensors of a reduced vocabulary: what to add to a row's number to get its token, [V'] int64;
and whether a token has a row, [V] bool, which says the same once more."""
HINT = "weights and config.json must come from one checkpoint."


PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""What tensors' names may begin with, and are known without."""
ALIASES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
}
"""What names of drafters' tensors may begin with, and what that means."""


def own_name(key: str) -> str:
    """A tensor's name in a file -> as a module of its own would call it."""
    name = next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), key)
    alias = next((a for a in ALIASES if name.startswith(a)), "")
    return ALIASES.get(alias, "") + name.removeprefix(alias)


def draft_parts(
    shapes: Mapping[str, tuple[int, ...]] | None, config: DraftConfig, directory: Path
) -> tuple[set[str], tuple[str, ...]]:
    """Which of "embed_tokens" and "lm_head" the drafter brings, and which tensors may stand beside
    its module's. shapes: of its tensors, None where none are read. Raises ValueError where fc does
    not fit the captured layers, or a reduced vocabulary has no table."""
    own_names = {"lm_head"} if config.draft_vocab_size is not None else set[str]()
    if config.target_hidden_size not in (None, config.decoder.hidden_size):
        own_names = {"embed_tokens", "lm_head"}
    if shapes is None:
        return own_names, ()
    own_names |= {part for part in ("embed_tokens", "lm_head") if f"{part}.weight" in shapes}
    _check_features(shapes, config, directory)
    if config.draft_vocab_size is None:
        return own_names, VOCABULARY[1:]
    if shapes.get("d2t") != (config.draft_vocab_size,):
        state = f"has shape {list(shapes['d2t'])}" if "d2t" in shapes else "is missing"
        raise ValueError(
            f"{directory}: tensor d2t {state}, but draft_vocab_size {config.draft_vocab_size} of "
            f"{config.decoder.vocab_size} needs an offset for each row of the head; {HINT}"
        )
    return own_names, VOCABULARY


def _check_features(
    shapes: Mapping[str, tuple[int, ...]], config: DraftConfig, directory: Path
) -> None:
    count, size = len(config.capture), config.target_hidden_size or config.decoder.hidden_size
    fc = shapes.get("fc.weight", (0,))
    if len(fc) == 2 and fc[1] != count * size:
        raise ValueError(
            f"{directory}: tensor fc.weight reads {fc[1]} values per token, but "
            f"{config.capture_ids_key} {list(config.capture_ids)} names {count} layers of "
            f"{size}, which make {count * size}; {HINT}"
        )
