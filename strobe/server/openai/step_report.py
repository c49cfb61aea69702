"""A verify step as a stream reports it."""

from __future__ import annotations

import math

from strobe.outputs import StreamDelta
from strobe.server.openai.protocol.response_bodies import Step
from strobe.text.tokenizer import Tokenizer


def step_of(delta: StreamDelta, tokenizer: Tokenizer) -> Step:
    """Describe a verify step for the page: each token's text and whether it was a draft; if the
    request reads its drafts, those that were rejected and the drafter's confidence in each."""
    accepted = delta.num_accepted
    verified = delta.num_verified
    tokens = [(piece, i < accepted) for i, piece in enumerate(delta.pieces)]
    step: Step = {"tokens": tokens, "drafted": verified, "accepted": accepted}
    if delta.drafts:
        ended = accepted == len(tokens)  # on a draft; the target said nothing of the later ones
        rejected = () if ended else delta.drafts[accepted:verified]
        step["rejected"] = [tokenizer.token_text(token) for token in rejected]
        margins = delta.margins[:verified] if any(delta.margins) else ()
        step["confidence"] = [round(1 / (1 + math.exp(-margin)), 3) for margin in margins]
    return step
