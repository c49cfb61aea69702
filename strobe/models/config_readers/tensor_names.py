"""Tensor names in files, and checks of a drafter's tensors that its module does not make."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from strobe.models.model_config import DraftConfig

VOCABULARY = ("d2t", "t2d")
"""Tensors of a reduced vocabulary: d2t [V'] int64, token id minus row; t2d [V] bool, whether a
token has a row (redundant)."""
HINT = "weights and config.json must come from one checkpoint."


PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
"""Prefixes of tensor names that are dropped."""
ALIASES = {
    "midlayer.": "layers.0.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
"""Prefixes of drafters' tensor names that are replaced."""


def own_name(key: str) -> str:
    """Return the module's name for a tensor in a file."""
    name = next((key.removeprefix(p) for p in PREFIXES if key.startswith(p)), key)
    alias = next((a for a in ALIASES if name.startswith(a)), "")
    return ALIASES.get(alias, "") + name.removeprefix(alias)


def has_weight(module: str, names: Collection[str]) -> bool:
    """Whether a checkpoint with tensors of these names has the module's weight, in any format."""
    return any(f"{module}.{leaf}" in names for leaf in ("weight", "weight_packed", "qweight"))


def names_in_files(name: str) -> tuple[str, ...]:
    """Return the names that a module may have in a file or a config; see `own_name`."""
    return (name, *(prefix + name for prefix in PREFIXES))


def draft_parts(
    shapes: Mapping[str, tuple[int, ...]] | None, config: DraftConfig, directory: Path
) -> tuple[set[str], tuple[str, ...]]:
    """Return which of "embed_tokens" and "lm_head" the drafter has, and which further tensors its
    checkpoint may contain. shapes: the checkpoint's; None if no weights are read. Raises ValueError
    if fc does not fit the captured layers, or if a reduced vocabulary has no table."""
    own_names = {"lm_head"} if config.draft_vocab_size is not None else set[str]()
    if config.target_hidden_size not in (None, config.decoder.hidden_size):
        own_names = {"embed_tokens", "lm_head"}
    if shapes is None:
        return own_names, ()
    own_names |= {part for part in ("embed_tokens", "lm_head") if has_weight(part, shapes)}
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
    count = len(config.capture)
    size = config.target_hidden_size or config.decoder.hidden_size
    fc = shapes.get("fc.weight", (0,))
    is_packed = "fc.weight_scale_2" in shapes  # two values a byte
    if len(fc) == 2 and fc[1] * (1 + is_packed) != count * size:
        raise ValueError(
            f"{directory}: tensor fc.weight reads {fc[1]} values per token, but "
            f"{config.capture_ids_key} {list(config.capture_ids)} names {count} layers of "
            f"{size}, which make {count * size}; {HINT}"
        )
