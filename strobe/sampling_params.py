"""How a caller asks for an answer: sampling parameters, speculation, structured outputs."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strobe.checks import between, listed, whole

METHODS = ("dflash", "ngram", "none")

MOST_ANSWERS = 16384
"""The most answers to one prompt, vLLM's own limit."""

MOST_LOGPROBS = 1000
"""The most top log probabilities per token."""

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like; exactly one of the first five is given.

    json: a JSON schema, as an object or its text. json_object: any JSON object. regex: a regular
    expression the whole answer matches. choice: the answer is one of these texts. grammar: Lark, or
    EBNF in llama.cpp's form. Raises ValueError.

    For models that think first: after, token ids behind which the constraint begins; opener, the
    token that begins thinking, without which the constraint holds from the start; lead, a text that
    may stand before the constrained one. instead: a Lark grammar that the answer may follow in
    place of the constraint, such as that of a tool call.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: Sequence[int] = ()
    opener: int | None = None
    lead: str = ""
    instead: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = f"gives {' and '.join(given)}" if given else "gives none"
            raise ValueError(
                f"structured_outputs {said} of {', '.join(STRUCTURES)}; give exactly one."
            )
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise ValueError(
                f"structured_outputs.json is {reprlib.repr(self.json)}, but must be a JSON schema."
            )
        if not isinstance(self.json_object, bool):
            raise ValueError(
                f"structured_outputs.json_object is {self.json_object!r}, but must be True or "
                "False."
            )
        for name in ("regex", "grammar", "lead", "instead"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(
                    f"structured_outputs.{name} is {reprlib.repr(getattr(self, name))}, but must "
                    "be a text."
                )
        if self.choice is not None:
            choice = listed("structured_outputs.choice", self.choice, "texts")
            if not choice or not all(isinstance(text, str) for text in choice):
                raise ValueError(
                    f"structured_outputs.choice is {reprlib.repr(self.choice)}, but must be a list "
                    "of one or more texts."
                )
            object.__setattr__(self, "choice", choice)
        mend = "name token ids of the model's vocabulary."
        after = listed("structured_outputs.after", self.after, "token ids")
        for token in after:
            whole("structured_outputs.after", token, 0, mend)
        object.__setattr__(self, "after", after)
        for token in self.opener_ids:
            whole("structured_outputs.opener", token, 0, mend)
        if self.opener is not None and not after:
            raise ValueError(
                f"structured_outputs.opener is {self.opener}, but nothing in after ends what it "
                "begins; give both or none."
            )

    @property
    def opener_ids(self) -> tuple[int, ...]:
        """The opener, where there is one."""
        return () if self.opener is None else (self.opener,)

    @staticmethod
    def of(value: Any) -> StructuredOutputs | None:
        """Read an object with these fields, or None."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"structured_outputs is {reprlib.repr(value)}, but must be an object with one of "
                f"{', '.join(STRUCTURES)}."
            )
        known = (*STRUCTURES, "after", "opener", "lead", "instead")
        unknown = [name for name in value if name not in known]
        if unknown:
            raise ValueError(
                f"structured_outputs has no field {unknown[0]!r}; it has {', '.join(known)}."
            )
        return StructuredOutputs(**value)


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
