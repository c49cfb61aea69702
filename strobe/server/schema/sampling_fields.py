"""Sampling and stop fields, shared by every endpoint that generates. Those of sampling follow from
`SamplingParams`: a new option is declared there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, ValidatorFunctionWrapHandler, create_model

from strobe.request import SchedulingOptions
from strobe.sampling_params import OPTIONS, SamplingOption
from strobe.server.generation.request import Sampling
from strobe.server.schema.base import RequestModel, RequestObject
from strobe.server.schema.field_errors import (
    HERE,
    FieldError,
    FieldNames,
    short_json,
)
from strobe.server.schema.sampling_objects import RepetitionField, SpeculationField, to_argument
from strobe.server.schema.structured_output import (
    SOURCES,
    AnswerFormat,
    Choices,
    SchemaOrText,
    StructuredOutputs,
    read_constraint,
)
from strobe.server.schema.values import (
    Bounds,
    Ids,
    Int,
    Must,
    Rule,
    SomeText,
    Texts,
    TokenIds,
    Value,
)
from strobe.validation import MAX_INT

MAX_TIMEOUT = 86400.0
"""Seconds."""


class TokenBiases(Value):
    """A JSON object of token ids and biases, read as {token id: bias}."""

    def parse(self, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping):
            raise FieldError.of_value(
                HERE, value, "an object from token ids to numbers from -100 to 100"
            )
        biases: dict[int, float] = {}
        for key, bias in value.items():
            text = str(key)
            if not (text.isascii() and text.isdigit()) or len(text) > 9:
                raise FieldError(
                    f"{HERE} has the key {short_json(text)}, but its keys must be token ids; "
                    "/tokenize gives them.",
                    HERE,
                )
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not number or not -100 <= bias <= 100:
                raise FieldError.of_value(
                    f"{HERE}.{text}", bias, "a number from -100 to 100", "0 changes nothing"
                )
            biases[int(text)] = float(bias)
        return biases

    def shown(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }


class PrintableId(Rule):
    """A text that a header and a line of the log can hold."""

    def read(self, value: object, inner: ValidatorFunctionWrapHandler) -> object:
        text = inner(value)
        if not (0 < len(text) <= 128 and text.isascii() and text.isprintable()):
            raise FieldError.of_value(HERE, text, "a string of 1 to 128 printable ASCII characters")
        return text

    def shown(self) -> dict[str, Any]:
        return {"pattern": "^[ -~]{1,128}$"}


MaxTokens = Annotated[Int, Bounds(low=1, high=MAX_INT, hint="leave it out for all that fit")]
LogprobCount = Annotated[Int, Bounds(low=0, high=20, hint="0 gives the sampled token alone")]

BOUNDS = {
    option.name: Bounds(
        low=option.low,
        high=option.high,
        hint=option.hint.removesuffix("."),
        above=option.above,
    )
    for option in OPTIONS
    if option.kind in (int, float)
}
"""Bounds of the sampling options that are numbers."""


def _declared_field(option: SamplingOption) -> tuple[Any, Any]:
    """Return a request field's type and default for a sampling option. Without a default of its
    own, the field may be null and the model's default applies."""
    kind: Any = Int if option.kind is int else option.kind
    if option.name in BOUNDS:
        kind = Annotated[kind, BOUNDS[option.name]]
    if option.facts.recommended or option.default is None:
        return kind | None, Field(None, description=option.help)
    return kind, Field(option.default, description=option.help)


class _ModelField(RequestModel):
    model: str | None = Field(
        None, description="The served model's name, as listed by /v1/models. Optional."
    )


if TYPE_CHECKING:

    class DeclaredFields(_ModelField):
        """The fields that follow from the declarations in SamplingParams; here, those that the
        server's code reads."""

        seed: int | None
        min_tokens: int
        ignore_eos: bool

else:
    DeclaredFields = create_model(
        "DeclaredFields",
        __base__=_ModelField,
        **{option.name: _declared_field(option) for option in OPTIONS if option.facts.http},
    )


class SamplingFields(DeclaredFields):
    """The shared fields. The endpoint's `check` reads `_sampling` with `read_sampling`."""

    logit_bias: Annotated[dict[int, float], TokenBiases()] | None = Field(
        None, description="Added to the logits of these token ids, -100 to 100."
    )
    allowed_token_ids: (
        Annotated[tuple[int, ...], Ids(min_items=1, hint="leave it out for all")] | None
    ) = Field(None, description="Only these token ids may be generated.")
    stop: Texts = Field(
        (), description="A string, or up to 64 strings, that end the answer. They are cut from it."
    )
    bad_words: Texts = Field(
        (),
        description="Up to 64 strings that the answer must not contain, not even within a word. "
        "They do not constrain reasoning.",
    )
    thinking_token_budget: (
        Annotated[Int, Bounds(low=-1, high=MAX_INT, hint="-1 sets no limit")] | None
    ) = Field(
        None,
        description="Maximum number of tokens of the reasoning, which then ends; -1: no limit.",
    )
    stop_token_ids: TokenIds = Field((), description="Token ids that end the answer.")
    repetition_detection: RepetitionField | None = Field(
        None,
        description="End the answer when its last tokens are one pattern, `min_count` times in a "
        "row: an object with `max_pattern_size` and `min_pattern_size` (tokens of the pattern; a "
        "maximum of 0 is off) and `min_count` (2 or more). Default: the server's `--max-repeats`.",
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="Constrains the answer: exactly one of `json` (a schema), `json_object: true`, "
        "`regex`, `choice` (a list of strings), `grammar` (Lark or EBNF) and `structural_tag`.",
    )
    guided_json: SchemaOrText | None = Field(None, description="Same as `structured_outputs.json`.")
    guided_regex: SomeText | None = Field(None, description="Same as `structured_outputs.regex`.")
    guided_choice: Choices | None = Field(None, description="Same as `structured_outputs.choice`.")
    guided_grammar: SomeText | None = Field(
        None, description="Same as `structured_outputs.grammar`."
    )
    regex: SomeText | None = Field(None, description="Same as `structured_outputs.regex`.")
    ebnf: SomeText | None = Field(None, description="Same as `structured_outputs.grammar`.")
    json_schema: SchemaOrText | None = Field(None, description="Same as `structured_outputs.json`.")
    stream: bool = Field(False, description="Stream the answer as server-sent events.")
    request_id: Annotated[str, PrintableId()] | None = Field(
        None, description="The request's id in the response and the log; default: X-Request-Id."
    )
    timeout: (
        Annotated[
            float,
            Bounds(low=0, high=MAX_TIMEOUT, hint="leave it out for the server's own", above=True),
        ]
        | None
    ) = Field(None, description="Seconds after which the request ends with an error.")
    speculation: SpeculationField | None = Field(
        None,
        description="false, true, or an object with `method`, `num_drafts` (drafts per step), "
        "`return_drafts` and `always` (draft in every step, even where it does not pay); "
        "default: the server's settings. It never changes the answer.",
    )
    priority: Annotated[Int, Bounds(low=-MAX_INT, high=MAX_INT, hint="0 is usual")] = Field(
        0, description="Requests with a lower number run first and are preempted last."
    )
    cache_salt: (
        Annotated[
            str,
            Field(min_length=1),
            Must(
                "a string of one or more characters",
                "leave it out to share cached prefixes with all requests",
            ),
        ]
        | None
    ) = Field(None, description="Only requests with the same salt share cached prefixes.")
    include_speculation: bool = Field(
        False, description="Report speculation statistics in the response."
    )

    _sampling: Sampling = PrivateAttr()

    def read_sampling(
        self,
        max_tokens: int | None,
        *,
        names: FieldNames,
        options: Mapping[str, Any],
        answer_format: AnswerFormat | None = None,
        thinking_budget: int | None = None,
    ) -> Sampling:
        """Return the sampling of these fields and of the ones that the endpoints have in different
        forms. options: arguments of SamplingParams; names: this API's names. Raises FieldError."""
        constraints = {name: getattr(self, name) for name in SOURCES if self.is_set(name)}
        if answer_format is not None:
            constraints["response_format"] = answer_format
        budget = self.thinking_token_budget if thinking_budget is None else thinking_budget
        sampling = Sampling(
            options={**sent_arguments(self, SAME_NAME), **options},
            max_tokens=max_tokens,
            constraint=read_constraint(constraints, names),
            thinking_budget=None if budget == -1 else budget,
            scheduling=SchedulingOptions(self.priority, self.cache_salt or ""),
            names=names,
        )
        sampling.check(self._warnings)
        return sampling

    @property
    def sampling(self) -> Sampling:
        """The request's sampling."""
        return self._sampling


def check_top_logprobs(top_logprobs: int | None, logprobs: bool) -> None:
    """Reject a number of top tokens that has no effect. Raises FieldError."""
    if top_logprobs and not logprobs:
        raise FieldError(
            f"top_logprobs is {top_logprobs} without logprobs; set logprobs to true.",
            "top_logprobs",
        )


def sent_arguments(request: RequestObject, names: Collection[str]) -> dict[str, Any]:
    """Return the arguments of SamplingParams that the client sent in fields of these names."""
    return {name: to_argument(getattr(request, name)) for name in names if request.is_set(name)}


SAME_NAME = tuple(
    option.name
    for option in OPTIONS
    if option.name in SamplingFields.model_fields and option.name != "structured_outputs"
)
"""Fields that SamplingParams takes as they are."""
