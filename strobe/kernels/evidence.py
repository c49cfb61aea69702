"""The evidence for a draft, by which its chance to count is read from a table: (m M^3)^(1/8), where
m is the draft's margin and M its block's mean margin; `strobe.speculation.acceptance` says why.

`evidence` is the formula for NumPy, on the host (`speculation.acceptance`), and for torch
(`kernels.reference_narrow`). The kernel (`kernels.narrow`) takes the same steps in Triton, with the
constants below. Imports no torch. Legend: n blocks, K positions of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

Array = TypeVar("Array", "NDArray[Any]", "Tensor")

MEAN_POWER = 3
"""Exponent of a block's mean margin; its draft's margin has 1."""

SQUARE_ROOTS = 3
"""The eighth root is three square roots, which every device rounds correctly."""

KNOTS = 13
KNOTS_PER_UNIT = 2
"""A table has a rate for evidence 0, 0.5, ..., 6. A margin is at most 40, which gives 6.3."""


def evidence(
    margins: Array, exists: Array, num_drafts: Array, *, sqrt: Callable[[Array], Array]
) -> Array:
    """Return the evidence [n, K] of margins [n, K]. exists [n, K]: whether a margin is a draft's.
    num_drafts [n]: number of drafts in each block, or 1 if it has none. sqrt: of NumPy or
    torch."""
    mean = cast("Array", ((margins * exists).sum(1) / num_drafts)[:, None])
    root = margins
    for _ in range(MEAN_POWER):
        root = root * mean
    for _ in range(SQUARE_ROOTS):
        root = sqrt(root)
    return root
