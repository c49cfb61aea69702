"""The grammars' walk along a step's drafts, before they are verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from strobe.host.transfer import upload
from strobe.sampling.grammar import GrammarState, GrammarWalk
from strobe.step import Span


class WalkedDrafts(NamedTuple):
    """A step's drafts with forced tokens in place of drafts that a grammar does not allow. The plan
    stays unchanged; verification reads these in place of its drafts.

    walk: the masks to compute. forced: by span, the host's drafts if some were replaced. by_device:
    the device's drafts [S, K].
    """

    walk: GrammarWalk
    forced: dict[int, list[int]]
    by_device: Tensor | None


def walk_drafts(
    grammars: GrammarState, spans: Sequence[Span], drafts: Tensor | None, device: torch.device
) -> WalkedDrafts:
    """Walk the grammars along each span's drafts: its own, or the device's in `drafts` [S, K],
    which this waits for."""
    on_host: list[list[int]] = [] if drafts is None else drafts.clamp(min=0).tolist()
    by_span: list[list[int]] = []
    for i, span in enumerate(spans):
        if span.method is None:
            by_span.append(list(span.tokens[span.num_context_rows :]))
        else:
            by_span.append(on_host[i][: span.num_drafts])
    # A chunk in the middle of a prompt gives no token, and its rows stay free.
    slots = [span.slot if span.num_logits else -1 for span in spans]
    walk = grammars.walk(slots, by_span)
    forced: dict[int, list[int]] = {}
    is_changed = False
    for i, span in enumerate(spans):
        if walk.drafts[i] == by_span[i]:
            continue
        if span.method is None:
            forced[i] = walk.drafts[i]
        else:
            on_host[i][: span.num_drafts] = walk.drafts[i]
            is_changed = True
    if drafts is not None:  # a copy: the forward's graph may use the memory of the drafter's
        drafts = upload(on_host, device) if is_changed else drafts.clone()
    return WalkedDrafts(walk, forced, drafts)
