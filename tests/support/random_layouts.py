"""Random spans of every kind, and the parts of their layout that a step reads."""

from __future__ import annotations

import random

from strobe.runner.layout import Layout
from strobe.step import TAIL, Span


def spans_of(rng: random.Random, drafts: int) -> list[Span]:
    """Return decoding requests, with drafts from device and host, and prompt chunks."""
    spans: list[Span] = []
    for slot in range(rng.randint(1, 6)):
        kind, n = rng.randrange(4), rng.randint(0, drafts)
        if kind < 2:
            spans.append(Span(slot, 5, 9, (TAIL,), n, "dflash" if n else None, 1 + n))
        elif kind == 2:
            spans.append(Span(slot, 5, 5, (4, *range(n)), n, None, 1 + n))
        else:
            scored = tuple(range(1, 1 + n)) if rng.random() < 0.5 else ()
            tokens = tuple(range(1 + n))
            spans.append(
                Span(slot, 0, 0, tokens, num_logits=rng.randint(0, 1), scored_tokens=scored)
            )
    return spans


def facts(layout: Layout) -> dict[str, object]:
    """Return all that a step reads; the span of a padding row is arbitrary."""
    used = int(layout.sizes.sum())
    rows = {"span_of_row": used, "offset": None, "tokens": None}
    scored = layout.scored
    scored_rows = None if scored is None else layout.row_starts[scored[0]] + scored[1]
    spans = ("slots", "context_rows", "drafts", "sizes", "row_starts", "active", "logits_rows")
    return {
        "shape": layout.shape,
        "scored_rows": None if scored_rows is None else scored_rows.tolist(),
        **{name: getattr(layout, name).tolist() for name in spans},
        **{name: getattr(layout, name)[:count].tolist() for name, count in rows.items()},
    }
