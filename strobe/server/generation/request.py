"""A client's request, independent of the API that it uses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import PrivateAttr

from strobe.request import DEFAULT_SCHEDULING, SchedulingOptions
from strobe.server.schema.base import FieldWarnings, RequestModel
from strobe.server.schema.field_errors import FieldError, FieldNames
from strobe.server.schema.structured_output import Constraint, unenforced
from strobe.server.schema.tools import NO_TOOLS, Toolbox

_CONFLICT = "is set together with a tool_choice that forces a call"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are sampled, and when they end.

    options: the other arguments of SamplingParams that the client sent. thinking_budget: the
    maximum number of reasoning tokens, None without a limit. names: this API's names of fields.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    max_tokens: int | None = None
    constraint: Constraint | None = None
    thinking_budget: int | None = None
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING
    names: FieldNames = field(default_factory=FieldNames)

    @property
    def min_tokens(self) -> int:
        return self.options.get("min_tokens", 0)

    @property
    def needed(self) -> tuple[str, int | None]:
        """The name and value of the field whose tokens must fit the context after the prompt."""
        if self.max_tokens is None and self.min_tokens:
            return self.names["min_tokens"], self.min_tokens
        return self.names["max_tokens"], self.max_tokens

    @property
    def constraint_field(self) -> str:
        """The name of the field that constrains the answer."""
        source = "structured_outputs" if self.constraint is None else self.constraint.source
        return self.names[source]

    @property
    def engine_names(self) -> FieldNames:
        """This API's names of the fields in the engine's errors."""
        return FieldNames({**self.names, "structured_outputs": self.constraint_field})

    @property
    def structured_outputs(self) -> Mapping[str, Any] | None:
        """The constraint as an argument of SamplingParams."""
        if self.constraint is None:
            return None
        return {self.constraint.kind: self.constraint.value}

    def arguments(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of SamplingParams. defaults: values of arguments that the
        client did not send."""
        arguments = {**defaults, **self.options, "max_tokens": self.max_tokens}
        if self.constraint is not None:
            arguments["structured_outputs"] = self.structured_outputs
        return arguments

    def check(self, warnings: FieldWarnings) -> None:
        """Check fields that depend on each other. Raises FieldError."""
        names = self.names
        limits = [self.constraint_field] if self.constraint is not None else []
        if self.thinking_budget is not None:
            limits.append(names["thinking_token_budget"])
        if limits and self.options.get("ignore_eos"):
            raise FieldError(
                f"ignore_eos is true together with {limits[0]}, whose end is the answer's end; "
                "leave one of them out.",
                "ignore_eos",
            )
        if self.constraint is not None and self.constraint.source != "bad_words":
            self._warn_of_constraint(self.constraint, warnings)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = names["max_tokens"]
            raise FieldError(
                f"min_tokens is {self.min_tokens}, above {limit} {self.max_tokens}; lower "
                f"min_tokens or raise {limit}.",
                "min_tokens",
            )

    def _warn_of_constraint(self, constraint: Constraint, warnings: FieldWarnings) -> None:
        source = self.constraint_field
        if self.min_tokens:
            warnings.append(f"min_tokens has no effect where {source} is at its end.")
        if self.options.get("allowed_token_ids") is not None:
            warnings.append(
                f"allowed_token_ids has no effect where it leaves nothing that {source} allows."
            )
        warnings.extend(
            f"{source} has a schema with the keyword {name}, which is not enforced."
            for name in unenforced(constraint)
        )


@dataclass(frozen=True, kw_only=True)
class TemplateOptions:
    """Options of the chat template. source: a template in the place of the model's own; effort: of
    the reasoning; add_special_tokens: add the tokenizer's to the rendered prompt."""

    source: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False

    @property
    def effort_variables(self) -> dict[str, Any]:
        """The template's variables that the effort sets."""
        if self.effort is None:
            return {}
        variables: dict[str, Any] = {"reasoning_effort": self.effort}
        if self.effort == "none":
            variables["enable_thinking"] = False
        return variables


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A conversation to answer. Raises FieldError for fields that contradict each other.

    messages: as chat templates read them. parallel_tool_calls: None if the client did not say.
    truncate_prompt_tokens: number of prompt tokens to keep, -1 for all that fit. raw_prompt:
    the whole prompt, to which the chat template is not applied. clamp_max_tokens: lower max_tokens
    to what fits the context, with a warning.
    """

    messages: list[dict[str, Any]]
    toolbox: Toolbox = NO_TOOLS
    parallel_tool_calls: bool | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)
    sampling: Sampling = field(default_factory=Sampling)
    truncate_prompt_tokens: int | None = None
    raw_prompt: str | None = None
    clamp_max_tokens: bool = False
    model: str | None = None
    request_id: str | None = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        self._check_forced_call()
        self._check_effort()

    @property
    def names(self) -> FieldNames:
        """This API's names of fields."""
        return self.sampling.names

    @property
    def engine_names(self) -> FieldNames:
        """This API's names of the fields in the engine's errors."""
        if self.toolbox.choice.forced:
            return FieldNames({**self.names, "structured_outputs": "tools"})
        return self.sampling.engine_names

    @property
    def structured_outputs(self) -> Mapping[str, Any] | None:
        """The constraint of an answer in text, None if a call is forced in its place."""
        return None if self.toolbox.choice.forced else self.sampling.structured_outputs

    @property
    def allows_several_calls(self) -> bool:
        """Whether an answer may have several calls. A model whose calls are forced tends to repeat
        them, so `required` is one call unless the client asks for several."""
        choice = self.toolbox.choice
        if self.parallel_tool_calls is None:
            return not choice.forced
        return self.parallel_tool_calls and choice.name is None

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables for the chat template."""
        return {**self.template.variables, **self.template.effort_variables}

    def template_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `Tokenizer.render`, without the messages."""
        template = self.template
        continues = template.continue_final_message
        options: dict[str, Any] = {
            "tools": list(self.toolbox.tools) or None,
            "chat_template": template.source,
            "add_generation_prompt": template.add_generation_prompt and not continues,
        }
        if continues:
            options["continue_final_message"] = True
        return options | self.template_variables

    def warnings(self, template_reads: Collection[str] | None) -> list[str]:
        """Return a sentence for each field without effect on this prompt. template_reads: the
        variables that the chat template reads, None if unknown."""
        sentences: list[str] = []
        if template_reads is not None:
            sentences += [
                f"{self._variable(name)} has no effect: the chat template does not read it."
                for name in self.template.variables
                if name not in template_reads
            ]
            effort = self.template.effort_variables
            if effort and not set(effort) & set(template_reads):
                name = self.names["reasoning_effort"]
                sentences.append(f"{name} has no effect: the chat template does not read it.")
        if self.toolbox.choice.mode == "auto":
            sentences += [
                f"{path} has no effect: a schema is held where tool_choice forces a call."
                for path in self.toolbox.strict
            ]
        return sentences

    def with_messages(self, messages: list[dict[str, Any]]) -> GenerationRequest:
        """Return the request with another conversation."""
        return replace(self, messages=messages)

    def _variable(self, name: str) -> str:
        return self.names[f"chat_template_kwargs.{name}"]

    def _check_forced_call(self) -> None:
        """Reject a constraint together with a forced call, except a format of the answer, which
        clients send with every request and which only applies to answers in text."""
        constraint = self.sampling.constraint
        if self.toolbox.choice.forced and constraint is not None:
            source = constraint.source
            if source != "response_format":
                raise FieldError(f"{source} {_CONFLICT}; leave one of them out.", source)

    def _check_effort(self) -> None:
        for name, value in self.template.effort_variables.items():
            if self.template.variables.get(name, value) != value:
                effort = self.names["reasoning_effort"]
                raise FieldError(
                    f"{effort} is {self.template.effort}, but {self._variable(name)} says "
                    "otherwise; leave one of them out.",
                    effort,
                )


class ConversationRequest(RequestModel):
    """A request with a conversation. Its `check` sets `_generation`."""

    _generation: GenerationRequest = PrivateAttr(
        default_factory=lambda: GenerationRequest(messages=[])
    )

    @property
    def generation(self) -> GenerationRequest:
        """The request in the form that all APIs share."""
        return self._generation

    def warnings(self, template_reads: Collection[str] | None = None) -> list[str]:
        """One sentence for each field without effect; see `GenerationRequest.warnings`."""
        sentences = [*super().warnings(), *self._generation.warnings(template_reads)]
        return list(dict.fromkeys(sentences))
