"""DFlash2's head: a walk over each row's best tokens.

Two low-rank codebooks score which candidate follows which.
"""

from __future__ import annotations

from dataclasses import dataclass

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.heads.head import Head
from strobe.models.heads.walk import MAX_CANDIDATES
from strobe.models.model_config import DraftConfig


@dataclass(frozen=True)
class SelectorConfig:
    """The keys of DFlash2. conv_kernel_size: taps of the convolutions around attention and MLP;
    conv_group_size: channels that share a dynamic kernel; selector_rank: width of the codebooks;
    selector_top_k: candidates of each draft."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


def read(fields: Fields) -> SelectorConfig:
    """Read the four keys. Raises ValueError."""
    config = SelectorConfig(
        conv_kernel_size=fields.integer("conv_kernel_size"),
        conv_group_size=fields.integer("conv_group_size"),
        selector_rank=fields.integer("selector_rank"),
        selector_top_k=fields.integer("selector_top_k"),
    )
    if config.selector_top_k > MAX_CANDIDATES:
        raise ValueError(
            f"{fields.path}: selector_top_k is {config.selector_top_k}, but at most "
            f"{MAX_CANDIDATES} candidates are supported; {HINT}"
        )
    return config


def make(config: DraftConfig) -> Head:
    raise ValueError("Drafters for DFlash2 are not run yet; use one for DFlash.")
