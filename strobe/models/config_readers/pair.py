"""Whether a drafter's config fits a target's."""

from __future__ import annotations

from pathlib import Path

from strobe.models.config import DraftConfig, TargetConfig


def check_pair(draft: DraftConfig, target: TargetConfig, draft_path: Path) -> None:
    """Raises ValueError, before any weight is read, when the drafter cannot serve the target."""
    wanted, own, where = target.decoder, draft.decoder, f"{draft_path / 'config.json'}:"
    hint = "use the drafter that was trained for this target."
    key, size = "hidden_size", own.hidden_size
    if draft.target_hidden_size is not None:  # then embedding and head are the drafter's own
        key, size = "target_hidden_size", draft.target_hidden_size
    if size != wanted.hidden_size:
        raise ValueError(f"{where} {key} is {size}, the target's is {wanted.hidden_size}; {hint}")
    if own.vocab_size != wanted.vocab_size:
        raise ValueError(
            f"{where} vocab_size is {own.vocab_size}, the target's is {wanted.vocab_size}; {hint}"
        )
    if draft.num_target_layers not in (None, wanted.num_layers):
        raise ValueError(
            f"{where} num_target_layers is {draft.num_target_layers}, the target has "
            f"{wanted.num_layers} layers; {hint}"
        )
    for k, named in zip(draft.capture, draft.ids, strict=True):
        if k > wanted.num_layers:
            last = wanted.num_layers - (k - named)
            raise ValueError(
                f"{where} {draft.ids_name} holds {named}, but the target's layers are 0 to "
                f"{last}; {hint}"
            )
    if not 0 <= draft.mask_token_id < wanted.vocab_size:
        raise ValueError(
            f"{where} mask_token_id is {draft.mask_token_id}, but the target's vocabulary has ids "
            f"0 to {wanted.vocab_size - 1}; {hint}"
        )
