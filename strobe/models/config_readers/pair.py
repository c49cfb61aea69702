"""Compatibility of a drafter's config with itself and with a target's."""

from __future__ import annotations

from pathlib import Path

from strobe.models.config_readers.fields import HINT
from strobe.models.model_config import DraftConfig, TargetConfig


def check_ids(draft: DraftConfig, path: Path) -> None:
    """Raises ValueError for an id that the config's own sizes exclude, which no target can fit."""
    vocab_size = draft.decoder.vocab_size
    if not 0 <= draft.mask_token_id < vocab_size:
        raise ValueError(
            f"{path}: mask_token_id is {draft.mask_token_id}, but the vocabulary has ids 0 to "
            f"{vocab_size - 1}; {HINT}"
        )
    total = draft.num_target_layers
    for k, layer_id in zip(draft.capture, draft.capture_ids, strict=True):
        if total is not None and k > total:
            raise ValueError(
                f"{path}: {draft.capture_ids_key} holds {layer_id}, but num_target_layers is "
                f"{total}; {HINT}"
            )


def check_pair(draft: DraftConfig, target: TargetConfig, draft_path: Path) -> None:
    """Raises ValueError if the drafter does not fit the target. Reads no weights. draft_path: the
    drafter's directory, or its config alone."""
    ours = draft.decoder
    theirs = target.decoder
    file = draft_path if draft_path.is_file() else draft_path / "config.json"
    prefix = f"{file}:"
    hint = "use the drafter that was trained for this target."
    key = "hidden_size"
    size = ours.hidden_size
    if draft.target_hidden_size is not None:  # it has its own embedding and head
        key = "target_hidden_size"
        size = draft.target_hidden_size
    if size != theirs.hidden_size:
        raise ValueError(f"{prefix} {key} is {size}, the target's is {theirs.hidden_size}; {hint}")
    if ours.vocab_size != theirs.vocab_size:
        raise ValueError(
            f"{prefix} vocab_size is {ours.vocab_size}, the target's is {theirs.vocab_size}; {hint}"
        )
    if draft.num_target_layers not in (None, theirs.num_layers):
        raise ValueError(
            f"{prefix} num_target_layers is {draft.num_target_layers}, the target has "
            f"{theirs.num_layers} layers; {hint}"
        )
    for k, layer_id in zip(draft.capture, draft.capture_ids, strict=True):
        if k > theirs.num_layers:
            last = theirs.num_layers - (k - layer_id)
            raise ValueError(
                f"{prefix} {draft.capture_ids_key} holds {layer_id}, but the target's layers are "
                f"0 to {last}; {hint}"
            )
