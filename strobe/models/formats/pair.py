"""Whether a drafter's config fits a target's."""

from __future__ import annotations

from pathlib import Path

from strobe.models.config import DraftConfig, TargetConfig


def check_pair(draft: DraftConfig, target: TargetConfig, draft_path: Path) -> None:
    """Raises ValueError, before any weight is read, when the drafter cannot serve the target."""
    wanted, own, where = target.decoder, draft.decoder, f"{draft_path / 'config.json'}:"
    mend = "use the drafter that was trained for this target."
    if own.hidden_size != wanted.hidden_size:
        raise ValueError(
            f"{where} hidden_size is {own.hidden_size}, the target's is {wanted.hidden_size}; "
            f"{mend}"
        )
    if own.vocab_size != wanted.vocab_size:
        raise ValueError(
            f"{where} vocab_size is {own.vocab_size}, the target's is {wanted.vocab_size}; {mend}"
        )
    if draft.num_target_layers not in (None, wanted.num_layers):
        raise ValueError(
            f"{where} num_target_layers is {draft.num_target_layers}, the target has "
            f"{wanted.num_layers} layers; {mend}"
        )
    for k in draft.capture:
        if k > wanted.num_layers:
            raise ValueError(
                f"{where} target_layer_ids holds {k - 1}, but the target's layers are 0 to "
                f"{wanted.num_layers - 1}; {mend}"
            )
    if not 0 <= draft.mask_token_id < wanted.vocab_size:
        raise ValueError(
            f"{where} mask_token_id is {draft.mask_token_id}, but the target's vocabulary has ids "
            f"0 to {wanted.vocab_size - 1}; {mend}"
        )
