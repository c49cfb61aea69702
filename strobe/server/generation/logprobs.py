"""Log probabilities in the formats of the APIs."""

from __future__ import annotations

from collections.abc import Sequence

from strobe.outputs import logprobs_by_token
from strobe.request import TokenLogprob
from strobe.server.generation import bodies
from strobe.text.tokenizer import Tokenizer


def chat_logprob(entry: TokenLogprob, tokenizer: Tokenizer, as_ids: bool) -> bodies.TokenLogprob:
    """Convert a token's log probability to OpenAI's chat format."""

    def convert(token: int, value: float) -> bodies.TopLogprob:
        text = f"token_id:{token}" if as_ids else tokenizer.token_text(token)
        return {"token": text, "logprob": value, "bytes": list(tokenizer.token_bytes(token))}

    top = [convert(token, value) for token, value in entry.top]
    return {**convert(entry.token, entry.logprob), "top_logprobs": top}


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> bodies.PromptLogprobs:
    """Return vLLM's format: per prompt token, token ids to their log probabilities."""

    def convert(entry: TokenLogprob) -> dict[str, bodies.PromptLogprob]:
        return {
            str(token): {
                "logprob": value.logprob,
                "rank": value.rank,
                "decoded_token": value.decoded_token,
            }
            for token, value in logprobs_by_token(entry, tokenizer).items()
        }

    return [entry and convert(entry) for entry in entries]
