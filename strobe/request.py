"""What a caller asks for, and one request's life on the host. Knows nothing of pages or tensors."""

from __future__ import annotations

import enum
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from strobe.checks import between, listed, whole
from strobe.structured import StructuredOutputs

METHODS = ("dflash", "ngram", "none")

FinishReason = Literal["stop", "length", "abort", "error"]

MOST_ANSWERS = 16384
"""The most answers to one prompt, vLLM's own limit."""

MOST_LOGPROBS = 1000
"""The most top log probabilities per token."""


@dataclass(frozen=True)
class Speculation:
    """How one request drafts; None leaves the choice to the engine.

    method: "dflash", "ngram" or "none". num_drafts: tokens verified per step, at most the
    engine's own.
    """

    method: str | None = None
    num_drafts: int | None = None

    def __post_init__(self) -> None:
        if self.method is not None and self.method not in METHODS:
            raise ValueError(
                f"speculation.method is {self.method!r}; name one of {', '.join(METHODS)}."
            )
        if self.num_drafts is not None:
            whole("speculation.num_drafts", self.num_drafts, 0, "0 turns drafting off.")

    @staticmethod
    def of(value: Any) -> Speculation:
        """Read true, false, {"method": ..., "num_drafts": ...} or None."""
        if isinstance(value, Speculation):
            return value
        if value is None or value is True:
            return Speculation()
        if value is False:
            return Speculation(method="none")
        if isinstance(value, Mapping):
            unknown = [name for name in value if name not in ("method", "num_drafts")]
            if unknown:
                raise ValueError(
                    f"speculation has no field {unknown[0]!r}; it has method and num_drafts."
                )
            return Speculation(**value)
        raise ValueError(
            f"speculation is {value!r}, but must be true, false or an object with method and "
            "num_drafts."
        )


class TokenLogprob(NamedTuple):
    """What the model itself gave a token: its natural log probability before temperature, penalties
    and masks, its rank from 1, and the most probable tokens with theirs."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def option(default: Any, help: str) -> Any:
    """A field with the one sentence that the command line and the docs show for it."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop, with vLLM's names, defaults and meaning.

    A token must pass all three filters: be among the top_k most probable, in the smallest set of
    those with mass >= top_p, and at least min_p times as probable as the most probable one.
    Raises ValueError naming a value out of range.
    """

    n: int = option(1, "Answers per prompt, sampled independently even under one seed.")
    temperature: float = option(
        1.0, "0 is greedy, and so is all below 1e-6; 1 is the model's own distribution."
    )
    top_p: float = option(1.0, "Keep the most probable tokens up to this mass; 1 is off.")
    top_k: int = option(0, "Keep this many most probable tokens; 0 or -1 is off.")
    min_p: float = option(0.0, "Drop tokens less probable than this share of the best; 0 is off.")
    seed: int | None = option(
        None,
        "The same seed gives the same tokens, whatever else runs and however it speculates, "
        "unless drafts are drawn.",
    )
    max_tokens: int | None = option(16, "Most tokens to make; None: up to the context's end.")
    min_tokens: int = option(0, "Nothing ends the answer before so many tokens.")
    presence_penalty: float = option(
        0.0, "Taken off the logit of every token the answer has already; -2 to 2."
    )
    frequency_penalty: float = option(
        0.0, "Taken off a token's logit for each time the answer has it already; -2 to 2."
    )
    repetition_penalty: float = option(
        1.0, "Divides the positive logits of tokens in prompt or answer, multiplies negative ones."
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "Added to the logits of these token ids; -100 to 100."
    )
    allowed_token_ids: Sequence[int] | None = option(None, "Only these token ids may be made.")
    logprobs: int | None = option(
        None, "Log probabilities: of each token made, and so many of the most probable."
    )
    prompt_logprobs: int | None = option(None, "The same of the prompt's tokens.")
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = option(
        None, "What the answer must look like: json, json_object, regex, choice or grammar."
    )
    stop: str | Sequence[str] = option((), "Texts that end the answer and are cut off it.")
    stop_token_ids: Sequence[int] = option((), "Token ids that end the answer.")
    include_stop_str_in_output: bool = option(False, "Leave the stop text in the answer.")
    ignore_eos: bool = option(False, "The model's own end tokens do not end the answer.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    speculation: Speculation | Mapping[str, Any] | bool | None = option(
        None, "False, or method and num_drafts for this request; None: the engine's own."
    )

    def __post_init__(self) -> None:
        texts = [self.stop] if isinstance(self.stop, str) else self.stop
        stop = listed("stop", texts, "texts, or one text")
        ids = listed("stop_token_ids", self.stop_token_ids, "token ids")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "speculation", Speculation.of(self.speculation))
        whole("n", self.n, 1, f"ask for 1 to {MOST_ANSWERS} answers.", MOST_ANSWERS)
        between("temperature", self.temperature, 0.0, 100.0, "0 is greedy, 1 the model's own.")
        between("top_p", self.top_p, 0.0, 1.0, "1 keeps every token.")
        if self.temperature < 1e-6:
            object.__setattr__(self, "temperature", 0.0)
        if self.top_p == 0.0:
            raise ValueError("top_p is 0, which keeps no token; use temperature 0 for greedy.")
        whole("top_k", self.top_k, -1, "0 or -1 keeps every token.")
        between("min_p", self.min_p, 0.0, 1.0, "0 keeps every token.")
        if self.seed is not None:
            seed: Any = self.seed
            is_whole = isinstance(seed, int) and not isinstance(seed, bool)
            if not is_whole or not -(2**63) <= seed < 2**63:
                raise ValueError(
                    f"seed is {seed!r}, but must be a whole number of 64 bits; "
                    "leave it out for the engine's own."
                )
        self._check_logit_rules()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0, "leave it None for none.", MOST_LOGPROBS)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 0, "leave it None for up to the context's end.")
        whole("min_tokens", self.min_tokens, 0, "0 asks for no minimum.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; "
                "lower the one or raise the other."
            )
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ValueError(
                    f"stop holds {text!r}, but every stop string must be a text of one character "
                    "or more."
                )
        for token in ids:
            whole("stop_token_ids", token, 0, "list token ids of the model's vocabulary.")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be True or False.")

    def _check_logit_rules(self) -> None:
        structured = StructuredOutputs.of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", structured)
        if structured is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos is True beside structured_outputs, whose end is the answer's end; "
                "leave one of them out."
            )
        between("presence_penalty", self.presence_penalty, -2.0, 2.0, "0 is off.")
        between("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0 is off.")
        between("repetition_penalty", self.repetition_penalty, 0.0, 100.0, "1 is off.")
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty is 0, but must be above 0; 1 is off.")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(
                    f"logit_bias is {reprlib.repr(self.logit_bias)}, but must map token ids to "
                    "numbers."
                )
            for token, value in self.logit_bias.items():
                whole("logit_bias", token, 0, "name token ids of the model's vocabulary.")
                between(f"logit_bias[{token}]", value, -100.0, 100.0, "0 changes nothing.")
        if self.allowed_token_ids is not None:
            ids = listed("allowed_token_ids", self.allowed_token_ids, "token ids")
            if not ids:
                raise ValueError(
                    "allowed_token_ids is empty, which allows no token; leave it out to allow all."
                )
            for token in ids:
                whole("allowed_token_ids", token, 0, "list ids of the model's vocabulary.")
            object.__setattr__(self, "allowed_token_ids", ids)

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        plain = self.presence_penalty == 0 == self.frequency_penalty
        return not plain or self.repetition_penalty != 1

    @property
    def filters(self) -> bool:
        """Whether sampling drops tokens before it draws."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class SpeculationCount:
    """One request's drafting: verify steps that carried drafts, and what came of them."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    per_position: list[int] = field(default_factory=list[int])

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verify step."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.per_position += [0] * (drafted - len(self.per_position))
        for position in range(accepted):
            self.per_position[position] += 1

    def merge(self, other: SpeculationCount) -> None:
        """Add another's counts."""
        self.steps += other.steps
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.per_position += [0] * (len(other.per_position) - len(self.per_position))
        for position, count in enumerate(other.per_position):
            self.per_position[position] += count

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / steps, vLLM's formula: tokens per verify step, the target's own included,
        or a little more where an answer ended on a draft. None before the first step."""
        return 1 + self.accepted / self.steps if self.steps else None


class Request:
    """One answer in the making. The scheduler owns its status; `tokens` is prompt then output."""

    def __init__(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        sibling: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        method: str = "none",
        num_drafts: int = 0,
        off_reason: str | None = None,
    ):
        self.id = request_id
        self.tokens = list(prompt_ids)
        self.num_prompt = len(self.tokens)
        self.sampling = sampling
        self.seed, self.sibling = seed, sibling
        self.stop_ids = stop_ids
        self.method, self.num_drafts = method, num_drafts
        self.off_reason = off_reason
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.stop_reason: int | str | None = None
        self.speculation = SpeculationCount()
        self.num_preemptions = 0
        self.num_cached: int | None = None
        self.admitted_at: float | None = None
        self.scores_prompt = sampling.prompt_logprobs is not None and not sibling
        self.prompt_logprobs: list[TokenLogprob | None] = [None] if self.scores_prompt else []
        self.structured = StructuredOutputs.of(sampling.structured_outputs)
        self.biased = bool(sampling.logit_bias) or sampling.allowed_token_ids is not None
        self.edited = (
            sampling.penalizes
            or self.biased
            or bool(sampling.min_tokens)
            or self.structured is not None
        )
        self.special = sampling.temperature > 0 or self.edited or sampling.logprobs is not None

    @property
    def needs_host_tokens(self) -> bool:
        """Whether each step needs the host to know all tokens before it: a grammar does."""
        return self.structured is not None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]
