"""Which rows of a block predict: whether the anchor, the row of the newest token, does, too."""

from __future__ import annotations

from strobe.models.config_readers.detection import (
    DEEPSPEC,
    DFLASH,
    DSPARK,
    MODELOPT,
    SPECFORGE,
    SPECULATORS,
    Z_LAB,
    Dialect,
)
from strobe.models.config_readers.fields import HINT, Fields

_DEFAULTS = {Z_LAB: False, SPECULATORS: False, DEEPSPEC: True, SPECFORGE: True, MODELOPT: True}
"""Of `sample_from_anchor`, by format. For speculators it is the default of vLLM's loader; the
library itself always writes the key."""
_SAMPLED = "sample_from_anchor"
_BONUS = "dspark_bonus_anchor"
_SHIFTED = "shift_label"


def read_anchor_first(fields: Fields, dialect: Dialect) -> bool:
    """Read whether the anchor predicts, from three keys. Raises ValueError if they
    contradict each other, if the method cannot, or if the file does not tell."""
    by_key = {key: fields.flag(key) for key in (_SAMPLED, _SHIFTED) if fields.get(key) is not None}
    if fields.get(_BONUS) is not None:  # the anchor stands apart from the drafts
        by_key[_BONUS] = not fields.flag(_BONUS)
    if len(set(by_key.values())) > 1:
        named = ", ".join(f"{key} is {fields.get(key)!r}" for key in by_key)
        raise ValueError(
            f"{fields.path}: {named}, which contradict each other on whether the first row of a "
            f"block predicts; {HINT}"
        )
    predicts = by_key.get(next(iter(by_key), ""), _DEFAULTS[dialect.format])
    if dialect.format == Z_LAB and dialect.method == DSPARK and not by_key:
        raise ValueError(
            f"{fields.path}: a drafter labelled as DFlash has a Markov head, but {_SAMPLED} does "
            "not say whether the first row of its blocks predicts; set it to true for a drafter "
            "trained as DSpark, and to false for DFlash's blocks."
        )
    may_predict = dialect.method == DSPARK or (dialect.method == DFLASH and dialect.format != Z_LAB)
    if predicts and not may_predict:
        key = next(key for key, value in by_key.items() if value)
        raise ValueError(
            f"{fields.path}: {key} is {fields.get(key)!r}, which is not supported for "
            f"{dialect.method} in {dialect.format}'s format; use another drafter."
        )
    return predicts
