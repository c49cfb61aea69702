"""Parameters of a request: sampling, speculation, structured outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, model_validator
from pydantic.fields import FieldInfo

from strobe.validation import MAX_INT, Texts, Token, Tokens, as_tuple, brief, option, settings

Method = Literal["dflash", "ngram", "dflash+ngram", "none"]
METHODS: tuple[str, ...] = get_args(Method)
DRAFTER_METHODS = frozenset({"dflash", "dflash+ngram"})
"""Methods that need a drafter's checkpoint."""

MAX_ANSWERS = 16384
"""Maximum answers to one prompt, as in vLLM."""

MAX_LOGPROBS = 1000
"""Maximum number of top log probabilities per token."""

MAX_NAMED = 128
"""Maximum number of logprob_token_ids, as in vLLM."""

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
_TOKENS = "name token ids of the model's vocabulary."


def _schema(value: Any) -> Any:
    if value is not None and not isinstance(value, str | Mapping):
        raise ValueError(f"structured_outputs.json is {brief(value)}, but must be a JSON schema.")
    return value


T = TypeVar("T", "StructuredOutputs", "Speculation", "RepetitionDetection")


def _parse(cls: type[T], value: Any, requirement: str) -> T:
    """Build a `cls` from an object with its fields. Raises ValueError."""
    name = cls.error_prefix.removesuffix(".")
    field_names = [field.name for field in fields(cls)]
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {brief(value)}, but must be {requirement}.")
    for key in value:
        if key not in field_names:
            raise ValueError(f"{name} has no field {key!r}; it has {', '.join(field_names)}.")
    return cls(**value)


@settings
class StructuredOutputs:
    """Constrain an answer's form; set exactly one of the first five fields. Raises ValueError.

    json: a JSON schema, as an object or its text. json_object: any JSON object. regex: a regular
    expression that the whole answer matches. choice: the answer is one of these texts. grammar:
    Lark, or EBNF in llama.cpp's form.

    For models that think first: think_end, token ids that end thinking and start the constraint;
    think_start, the token that starts thinking (an answer without it is constrained from the
    start); max_thinking, the number of tokens after which thinking must end; prefix, a text that
    may precede the constrained text. alternative: a Lark grammar that the answer may follow in
    place of the constraint, such as one for tool calls.
    """

    error_prefix: ClassVar[str] = "structured_outputs."

    json: Annotated[Mapping[str, Any] | str | None, PlainValidator(_schema)] = None
    json_object: bool = False
    regex: str | None = None
    choice: Annotated[Texts, Field(min_length=1)] | None = None
    grammar: str | None = None
    think_end: Tokens = option((), "", _TOKENS)
    think_start: Token | None = option(None, "", _TOKENS)
    max_thinking: Count | None = None
    prefix: str = ""
    alternative: str | None = None

    @model_validator(mode="after")
    def _check_together(self) -> StructuredOutputs:
        constraints = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(constraints) != 1:
            mistake = f"gives {' and '.join(constraints)}" if constraints else "gives none"
            raise ValueError(
                f"structured_outputs {mistake} of {', '.join(STRUCTURES)}; give exactly one."
            )
        if self.think_start is not None and not self.think_end:
            raise ValueError(
                f"structured_outputs.think_start is {self.think_start}, but nothing in think_end "
                "ends what it begins; give both or none."
            )
        return self

    @staticmethod
    def of(value: Any) -> StructuredOutputs | None:
        """Parse an object with these fields, or None."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        return _parse(StructuredOutputs, value, f"an object with one of {', '.join(STRUCTURES)}")


@settings
class Speculation:
    """One request's drafting; None leaves the choice to the engine.

    method: "dflash", "ngram", "dflash+ngram" (prompt lookup in steps where it is expected to be
    accepted further), or "none". num_drafts: drafts verified per step, up to the engine's limit.
    return_drafts: report each step's drafts, rejected ones included. always: draft in every step,
    even where drafting promises less than it costs.
    """

    error_prefix: ClassVar[str] = "speculation."

    method: Method | None = None
    num_drafts: Count | None = option(None, "", "0 turns drafting off.")
    return_drafts: bool = False
    always: bool = False

    @staticmethod
    def of(value: Any) -> Speculation:
        """Parse true, false, {"method": ..., "num_drafts": ...} or None."""
        if isinstance(value, Speculation):
            return value
        if value is None or value is True:
            return Speculation()
        if value is False:
            return Speculation(method="none")
        return _parse(Speculation, value, "true, false or an object with its fields")


@settings
class RepetitionDetection:
    """When an answer that repeats itself ends, with vLLM's names, defaults and meanings.

    The answer ends once its last tokens are one pattern, min_count times in a row. The pattern has
    min_pattern_size to max_pattern_size tokens; 0 as the minimum is 1, and 0 as the maximum
    switches detection off. Raises ValueError.
    """

    error_prefix: ClassVar[str] = "repetition_detection."

    max_pattern_size: Count = option(0, "", "0 switches detection off.")
    min_pattern_size: Count = 0
    min_count: Count = 0

    @model_validator(mode="after")
    def _check_together(self) -> RepetitionDetection:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection.min_pattern_size is {self.min_pattern_size}, above "
                f"max_pattern_size {self.max_pattern_size}; lower the one or raise the other."
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(
                f"repetition_detection.min_count is {self.min_count}, but must be at least 2; "
                "max_pattern_size 0 switches detection off."
            )
        return self

    @property
    def is_on(self) -> bool:
        return self.max_pattern_size > 0

    @staticmethod
    def of(value: Any) -> RepetitionDetection | None:
        """Parse an object with these fields, or None."""
        if value is None or isinstance(value, RepetitionDetection):
            return value
        return _parse(RepetitionDetection, value, "an object with its fields")


TopK = Annotated[int, Field(ge=-1, le=MAX_INT), AfterValidator(lambda count: max(count, 0))]
Strength = Annotated[float, Field(ge=-2, le=2)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


def _as_texts(value: Any) -> Any:
    """Convert None to no texts and a single text to a tuple of one."""
    return as_tuple([value] if isinstance(value, str) else value)


Stops = Annotated[Sequence[Annotated[str, Field(min_length=1)]], BeforeValidator(_as_texts)]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The role of an option of SamplingParams in the engine, and where users can set it.

    effect: a filter narrows the tokens to sample from; penalties and processors change the logits;
    all are off at the option's default. column: the type of its column in the sampler's per-slot
    tables and in `RowParams`. recommended: a checkpoint's generation_config.json may set the
    default. flag: the command line has it. http: every generating endpoint has this field, derived
    from the declaration; if false, the request models write the field, because its JSON has another
    form or the endpoints differ. ollama: Ollama's `options` have it; a text is its name there.
    """

    effect: Literal["filter", "penalty", "processor"] | None = None
    column: type[float] | type[int] | None = None
    recommended: bool = False
    flag: bool = True
    http: bool = True
    ollama: bool | str = False


@settings
class SamplingParams:
    """How tokens are sampled and when an answer stops, with vLLM's names, defaults and meanings.

    A token must pass all three filters: be among the top_k tokens of highest probability, be in the
    smallest set of these with mass >= top_p, and have a probability of min_p times the highest one
    or more. Temperatures below 1e-6 are read as 0, and top_k -1 as 0. Raises ValueError naming a
    value out of range.

    Each option is declared once, here. The sampler's tables, the fields of the APIs, the flags of
    the command line and the pages about them follow from `OPTIONS`.
    """

    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = option(
        1,
        "Answers per prompt, sampled independently even under one seed.",
        facts=Facts(http=False),
    )
    temperature: Annotated[
        float, Field(ge=0, le=100), AfterValidator(lambda value: value if value >= 1e-6 else 0.0)
    ] = option(
        1.0,
        "0 is greedy; 1 is the model's own distribution.",
        "0 is greedy.",
        facts=Facts(column=float, recommended=True, ollama=True),
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = option(
        1.0,
        "Keep the most probable tokens up to this cumulative probability; 1 is off.",
        "1 keeps every token, and temperature 0 is greedy.",
        facts=Facts(effect="filter", column=float, recommended=True, ollama=True),
    )
    top_k: TopK = option(
        0,
        "Keep only the k most probable tokens; 0 or -1 is off.",
        "0 or -1 keeps every token.",
        facts=Facts(effect="filter", column=int, recommended=True, ollama=True),
    )
    min_p: Annotated[float, Field(ge=0, le=1)] = option(
        0.0,
        "Drop tokens below this share of the top token's probability; 0 is off.",
        "0 keeps every token.",
        facts=Facts(effect="filter", column=float, recommended=True, ollama=True),
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = option(
        None,
        "The same seed gives the same tokens, whatever else runs, with and without speculation.",
        "leave it out for the engine's own.",
        facts=Facts(ollama=True),
    )
    max_tokens: Count | None = option(
        16,
        "Maximum new tokens; None: up to the context's end.",
        facts=Facts(http=False, ollama="num_predict"),
    )
    min_tokens: Count = option(
        0,
        "Minimum number of tokens before the answer may end.",
        "0 asks for no minimum.",
        facts=Facts(effect="processor"),
    )
    presence_penalty: Strength = option(
        0.0,
        "Subtracted from the logit of each token already in the answer, -2 to 2; 0 is off.",
        "0 is off.",
        facts=Facts(effect="penalty", ollama=True),
    )
    frequency_penalty: Strength = option(
        0.0,
        "Subtracted from a token's logit for each occurrence in the answer, -2 to 2; 0 is off.",
        "0 is off.",
        facts=Facts(effect="penalty", ollama=True),
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = option(
        1.0,
        "Divides the positive logits of tokens in prompt or answer and multiplies the negative "
        "ones; 1 is off.",
        "1 is off.",
        facts=Facts(effect="penalty", recommended=True, ollama="repeat_penalty"),
    )
    logit_bias: Mapping[Token, Annotated[float, Field(ge=-100, le=100)]] | None = option(
        None,
        "Added to the logits of these token ids, -100 to 100.",
        "map token ids to numbers.",
        facts=Facts(effect="processor", flag=False, http=False, ollama=True),
    )
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = option(
        None,
        "The only token ids that may be generated.",
        "leave it out to allow all.",
        facts=Facts(effect="processor", flag=False, http=False),
    )
    logprobs: Logprobs | None = option(
        None,
        "Return log probabilities of each generated token and of this many top tokens.",
        facts=Facts(flag=False, http=False),
    )
    prompt_logprobs: Logprobs | None = option(
        None, "The same for the prompt's tokens.", facts=Facts(flag=False, http=False)
    )
    logprob_token_ids: Annotated[Tokens, Field(max_length=MAX_NAMED)] = option(
        (),
        "Token ids to return log probabilities of, in place of the top tokens.",
        _TOKENS,
        facts=Facts(flag=False, http=False),
    )
    structured_outputs: Annotated[
        StructuredOutputs | Mapping[str, Any] | None, PlainValidator(StructuredOutputs.of)
    ] = option(
        None,
        "The answer's form: json, json_object, regex, choice or grammar.",
        facts=Facts(flag=False, http=False),
    )
    stop: Stops = option(
        (),
        "Texts that end the answer and are cut off.",
        facts=Facts(http=False, ollama=True),
    )
    stop_token_ids: Tokens = option(
        (), "Token ids that end the answer.", _TOKENS, facts=Facts(http=False)
    )
    include_stop_str_in_output: bool = option(
        False, "Keep the stop text in the answer.", facts=Facts()
    )
    ignore_eos: bool = option(False, "Continue after the model's end tokens.", facts=Facts())
    repetition_detection: Annotated[
        RepetitionDetection | Mapping[str, Any] | None, PlainValidator(RepetitionDetection.of)
    ] = option(
        None,
        "End answers that repeat a pattern of up to max_pattern_size tokens.",
        facts=Facts(flag=False, http=False, ollama=True),
    )
    skip_special_tokens: bool = option(
        True, "Leave special tokens out of the text.", facts=Facts(flag=False)
    )
    speculation: Annotated[
        Speculation | Mapping[str, Any] | bool | None, PlainValidator(Speculation.of)
    ] = option(
        Speculation(),
        "False, or this request's method and num_drafts; None: the engine's default.",
        facts=Facts(flag=False, http=False, ollama=True),
    )

    @model_validator(mode="after")
    def _check_together(self) -> SamplingParams:
        if self.structured_outputs is not None and self.ignore_eos:
            raise ValueError(
                "ignore_eos is True, but the end of structured_outputs ends the answer; leave one "
                "of them out."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; "
                "lower the one or raise the other."
            )
        return self

    @property
    def processes(self) -> bool:
        """Whether a bias, a penalty or min_tokens changes the logits."""
        return self._uses(PENALTIES) or self._uses(PROCESSORS)

    @property
    def filters(self) -> bool:
        """Whether a filter applies."""
        return self.temperature > 0 and self._uses(FILTERS)

    def _uses(self, options: Sequence[SamplingOption]) -> bool:
        """Whether one of the options is not off."""
        return any(getattr(self, option.name) not in (option.default, {}) for option in options)

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True)
class SamplingOption:
    """A field of SamplingParams, for code that handles all options in one way. kind: bool, int or
    float, None for another type. low, high: a number's bounds; above: low itself is not allowed."""

    name: str
    kind: type[bool] | type[int] | type[float] | None
    default: Any
    help: str
    hint: str
    facts: Facts
    low: float
    high: float
    above: bool

    @property
    def ollama_name(self) -> str:
        """Its name in Ollama's options, empty if they do not have it."""
        own = self.name if self.facts.ollama else ""
        return self.facts.ollama if isinstance(self.facts.ollama, str) else own


def _number(annotation: Any) -> tuple[Any, dict[str, float]]:
    """Return a type without None and annotations, and the ge, gt and le of its numbers."""
    if get_origin(annotation) is not Annotated:
        annotated = [part for part in get_args(annotation) if get_origin(part) is Annotated]
        return _number(annotated[0]) if annotated else (annotation, {})
    kind, *notes = get_args(annotation)
    limits: dict[str, float] = {}
    for note in notes:
        for limit in note.metadata if isinstance(note, FieldInfo) else ():
            limits |= {name: getattr(limit, name) for name in _LIMITS if hasattr(limit, name)}
    return kind, limits


def _option(
    name: str, annotation: Any, default: Any, metadata: Mapping[str, Any]
) -> SamplingOption:
    """Return the option that a field declares."""
    kind, limits = _number(annotation)
    return SamplingOption(
        name=name,
        kind=kind if kind in (bool, int, float) else None,
        default=default,
        help=metadata["help"],
        hint=metadata["hint"],
        facts=metadata["facts"],
        low=limits.get("ge", limits.get("gt", 0)),
        high=limits.get("le", 0),
        above="gt" in limits,
    )


_LIMITS = ("ge", "gt", "le")
_HINTS = get_type_hints(SamplingParams, include_extras=True)
OPTIONS = tuple(
    _option(f.name, _HINTS[f.name], f.default, f.metadata) for f in fields(SamplingParams)
)
"""Every option, in the order of the fields."""
FILTERS = tuple(option for option in OPTIONS if option.facts.effect == "filter")
PENALTIES = tuple(option for option in OPTIONS if option.facts.effect == "penalty")
"""In the order of the columns of `Tables.strengths`."""
PROCESSORS = tuple(option for option in OPTIONS if option.facts.effect == "processor")
RECOMMENDED = tuple(option for option in OPTIONS if option.facts.recommended)
"""Options whose default a checkpoint may set."""
