"""Parts that the responses of several APIs have in common."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from strobe.outputs import SpeculationFields


class SpeculationReport(SpeculationFields):
    """How all answers of a response were drafted.

    drafted: drafts verified; drafts_made: drafts proposed. acceptance_length: 1 + accepted / steps,
    null without a step. rows_verified: rows of the target in all steps that could carry drafts;
    rested_steps: steps without drafts, and rest_reason why. off_reason: a sentence if no drafts
    were verified. decode_seconds: from the end of the first step to the end of the last one, by
    the engine's clock; null with one step.
    """

    decode_seconds: float | None


class Extras(TypedDict, total=False):
    """Fields that no other server sends. speculation: only on request. warnings: one sentence for
    each field without effect."""

    speculation: SpeculationReport
    warnings: list[str]


ItemStatus = Literal["in_progress", "completed", "incomplete"]
"""The state of an item of an answer."""


class TopLogprob(TypedDict):
    """bytes: the token's text as UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer, and the most probable tokens at its position."""

    top_logprobs: list[TopLogprob]


class CachedTokensDetails(TypedDict):
    """Prompt tokens found in the prefix cache by where they were: on the device, or in host
    memory."""

    device: int
    host: int


class PromptTokensDetails(TypedDict):
    """cached_tokens: prompt tokens found in the prefix cache. cached_tokens_details: with a hit in
    host memory (kv_offload_memory)."""

    cached_tokens: int
    cached_tokens_details: NotRequired[CachedTokensDetails]


class Usage(TypedDict):
    """Tokens of the prompt and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(TypedDict):
    """rank: 1 for the most probable token."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Per prompt token: token ids to their log probabilities; null for the first."""
