"""DSpark's heads: a Markov head corrects each draft's logits by the token before it, and a
confidence head estimates whether the target accepts the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.heads.head import Head
from strobe.models.heads.walk import MAX_CANDIDATES
from strobe.models.model_config import DraftConfig

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class MarkovConfig:
    """The keys of DSpark. rank: of the Markov head, 0 without one; kind: how it reads the token
    before and the row; confidence: whether there is a confidence head; confidence_with_markov:
    whether that reads the token before, too; draft_topk: number of the best tokens that the Markov
    head corrects, None for all; logit_scale: factor of all logits."""

    rank: int
    kind: MarkovKind
    confidence: bool
    confidence_with_markov: bool
    draft_topk: int | None
    logit_scale: float


def read(fields: Fields) -> MarkovConfig:
    """Read the head's keys. Raises ValueError."""
    return MarkovConfig(
        rank=fields.integer("markov_rank", low=0),
        kind=_read_kind(fields),
        confidence=_read_confidence(fields),
        confidence_with_markov=fields.flag("confidence_head_with_markov"),
        draft_topk=_read_topk(fields),
        logit_scale=fields.number("logit_scale", 1.0),
    )


def _read_kind(fields: Fields) -> MarkovKind:
    kinds = get_args(MarkovKind)
    kind = fields.get("markov_head_type", kinds[0])
    if kind not in kinds:
        raise ValueError(
            f"{fields.path}: markov_head_type is {kind!r}, but must be one of {', '.join(kinds)}; "
            f"{HINT}"
        )
    return kind


def _read_confidence(fields: Fields) -> bool:
    """Read the flag, which has two names."""
    keys = ("enable_confidence_head", "use_confidence_head")
    values = {key: fields.flag(key) for key in keys if fields.get(key) is not None}
    if len(set(values.values())) > 1:
        named = " and ".join(f"{key} {value!r}" for key, value in values.items())
        raise ValueError(f"{fields.path}: {named} contradict each other; {HINT}")
    return any(values.values())


def _read_topk(fields: Fields) -> int | None:
    if fields.get("dspark_draft_topk") is None:
        return None
    count = fields.integer("dspark_draft_topk")
    if count > MAX_CANDIDATES:
        raise ValueError(
            f"{fields.path}: dspark_draft_topk is {count}, but at most {MAX_CANDIDATES} candidates "
            "are supported; set a smaller number, or leave it out to correct all logits."
        )
    return count


def make(config: DraftConfig) -> Head:
    raise ValueError("Drafters for DSpark are not run yet; use one for DFlash.")
