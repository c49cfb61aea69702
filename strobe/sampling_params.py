"""How a caller asks for an answer: sampling parameters, speculation, structured outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator

from strobe.checks import MAX_INT, Texts, Token, Tokens, as_tuple, brief, option, settings

Method = Literal["dflash", "ngram", "dflash+ngram", "none"]
METHODS: tuple[str, ...] = get_args(Method)

MAX_ANSWERS = 16384
"""The most answers to one prompt, vLLM's own limit."""

MAX_LOGPROBS = 1000
"""The most top log probabilities per token."""

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
_TOKENS = "name token ids of the model's vocabulary."


def _schema(value: Any) -> Any:
    if value is not None and not isinstance(value, str | Mapping):
        raise ValueError(f"structured_outputs.json is {brief(value)}, but must be a JSON schema.")
    return value


T = TypeVar("T", "StructuredOutputs", "Speculation")


def _parse(cls: type[T], value: Any, requirement: str) -> T:
    """A value of that kind from an object with its fields. Raises ValueError."""
    name, field_names = cls.prefix.removesuffix("."), [field.name for field in fields(cls)]
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {brief(value)}, but must be {requirement}.")
    for key in value:
        if key not in field_names:
            raise ValueError(f"{name} has no field {key!r}; it has {', '.join(field_names)}.")
    return cls(**value)


@settings
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

    prefix: ClassVar[str] = "structured_outputs."

    json: Annotated[Mapping[str, Any] | str | None, PlainValidator(_schema)] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[Texts, Field(min_length=1)] | None = None
    grammar: str | None = None
    after: Tokens = option((), "", _TOKENS)
    opener: Token | None = option(None, "", _TOKENS)
    lead: str = ""
    instead: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> StructuredOutputs:
        constraints = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(constraints) != 1:
            mistake = f"gives {' and '.join(constraints)}" if constraints else "gives none"
            raise ValueError(
                f"structured_outputs {mistake} of {', '.join(STRUCTURES)}; give exactly one."
            )
        if self.opener is not None and not self.after:
            raise ValueError(
                f"structured_outputs.opener is {self.opener}, but nothing in after ends what it "
                "begins; give both or none."
            )
        return self

    @staticmethod
    def of(value: Any) -> StructuredOutputs | None:
        """Read an object with these fields, or None."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        return _parse(StructuredOutputs, value, f"an object with one of {', '.join(STRUCTURES)}")


@settings
class Speculation:
    """How one request drafts; None leaves the choice to the engine.

    method: "dflash", "ngram", "dflash+ngram", where prompt lookup drafts where it promises more, or
    "none". num_drafts: tokens verified per step, at most the engine's own.
    """

    prefix: ClassVar[str] = "speculation."

    method: Method | None = None
    num_drafts: Count | None = option(None, "", "0 turns drafting off.")

    @staticmethod
    def of(value: Any) -> Speculation:
        """Read true, false, {"method": ..., "num_drafts": ...} or None."""
        if isinstance(value, Speculation):
            return value
        if value is None or value is True:
            return Speculation()
        if value is False:
            return Speculation(method="none")
        return _parse(Speculation, value, "true, false or an object with method and num_drafts")


Bounded = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _as_texts(value: Any) -> Any:
    """None is no item, and a text is one."""
    if value is None:
        return ()
    return as_tuple([value] if isinstance(value, str) else value)


Stops = Annotated[Sequence[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_texts)]


@settings
class SamplingParams:
    """How to choose tokens and when to stop, with vLLM's names, defaults and meaning.

    A token must pass all three filters: be among the top_k most probable, in the smallest set of
    those with mass >= top_p, and at least min_p times as probable as the most probable one.
    Raises ValueError naming a value out of range.
    """

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = option(
        1, "Answers per prompt, sampled independently even under one seed."
    )
    temperature: Annotated[
        float, Field(ge=0, le=100), AfterValidator(lambda value: value if value >= 1e-6 else 0.0)
    ] = option(1.0, "0 is greedy, and so is all below 1e-6; 1 is the model's own distribution.")
    top_p: Annotated[float, Field(gt=0, le=1)] = option(
        1.0,
        "Keep the most probable tokens up to this mass; 1 is off.",
        "1 keeps every token, and temperature 0 is greedy.",
    )
    top_k: Annotated[int, Field(ge=-1, le=MAX_INT)] = option(
        0, "Keep this many most probable tokens; 0 or -1 is off."
    )
    min_p: Share = option(0.0, "Drop tokens less probable than this share of the best; 0 is off.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = option(
        None,
        "The same seed gives the same tokens, whatever else runs and however it speculates.",
        "leave it out for the engine's own.",
    )
    max_tokens: Count | None = option(16, "Most tokens to make; None: up to the context's end.")
    min_tokens: Count = option(0, "Nothing ends the answer before so many tokens.")
    presence_penalty: Bounded = option(
        0.0, "Taken off the logit of every token the answer has already; -2 to 2."
    )
    frequency_penalty: Bounded = option(
        0.0, "Taken off a token's logit for each time the answer has it already; -2 to 2."
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = option(
        1.0, "Divides the positive logits of tokens in prompt or answer, multiplies negative ones."
    )
    logit_bias: Mapping[Token, Annotated[float, Field(ge=-100, le=100)]] | None = option(
        None, "Added to the logits of these token ids; -100 to 100.", "map token ids to numbers."
    )
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = option(
        None, "Only these token ids may be made.", "leave it out to allow all."
    )
    logprobs: Logprobs | None = option(
        None, "Log probabilities: of each token made, and so many of the most probable."
    )
    prompt_logprobs: Logprobs | None = option(None, "The same of the prompt's tokens.")
    structured_outputs: Annotated[
        StructuredOutputs | Mapping[str, Any] | None, PlainValidator(StructuredOutputs.of)
    ] = option(None, "What the answer must look like: json, json_object, regex, choice or grammar.")
    stop: Stops = option((), "Texts that end the answer and are cut off it.")
    stop_token_ids: Annotated[
        Tokens, BeforeValidator(lambda value: () if value is None else value)
    ] = option((), "Token ids that end the answer.", _TOKENS)
    include_stop_str_in_output: bool = option(False, "Leave the stop text in the answer.")
    ignore_eos: bool = option(False, "The model's own end tokens do not end the answer.")
    skip_special_tokens: bool = option(True, "Leave special tokens out of the text.")
    speculation: Annotated[
        Speculation | Mapping[str, Any] | bool | None, PlainValidator(Speculation.of)
    ] = option(
        Speculation(), "False, or method and num_drafts for this request; None: the engine's own."
    )

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos is True beside structured_outputs, whose end is the answer's end; "
                "leave one of them out."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; "
                "lower the one or raise the other."
            )
        return self

    @property
    def penalizes(self) -> bool:
        """Whether earlier tokens change the logits."""
        no_penalty = self.presence_penalty == 0 == self.frequency_penalty
        return not no_penalty or self.repetition_penalty != 1

    @property
    def filters(self) -> bool:
        """Whether some tokens are dropped before one is sampled."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def clone(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed."""
        return replace(self, **changes)
