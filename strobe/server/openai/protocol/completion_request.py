"""The request of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from strobe.sampling_params import MAX_ANSWERS
from strobe.server.openai.protocol.chat_request import (
    NAMED_IDS,
    NOT_ZERO,
    NamedIds,
    check_named_ids,
    check_stream,
    check_truncation,
)
from strobe.server.openai.protocol.infill_request import Gap
from strobe.server.schema.base import StreamOptions
from strobe.server.schema.field_errors import HERE, FieldError, FieldNames
from strobe.server.schema.sampling_fields import LogprobCount, SamplingFields
from strobe.server.schema.structured_output import ResponseFormat
from strobe.server.schema.values import Bounds, Ids, Int, Value, check_int, is_int
from strobe.validation import MAX_INT

_SOME_IDS = Ids(min_items=1)

Prompt = str | list[int]
"""A prompt as a text or as token ids."""


@dataclass(frozen=True)
class Prompts(Value):
    """A prompt or a list of prompts, read as a list. texts: they may be texts."""

    texts: bool = True

    def parse(self, value: Any) -> list[Prompt]:
        if isinstance(value, str) and self.texts:
            return [value]
        if isinstance(value, list | tuple) and value:
            if is_int(check_int(value[0])):
                return [list(_SOME_IDS.parse(value))]
            if isinstance(value[0], list | tuple):
                return [list(_SOME_IDS.parse(v, f"{HERE}[{i}]")) for i, v in enumerate(value)]
            if self.texts and all(isinstance(item, str) for item in value):
                return list(value)
        must = "a string, a list of strings, " if self.texts else ""
        raise FieldError.of_value(
            HERE, value, f"{must}a list of token ids, or a list of such lists"
        )

    def shown(self) -> dict[str, Any]:
        ids = _SOME_IDS.shown()
        prompts = [ids, {"type": "array", "minItems": 1, "items": ids}]
        if self.texts:
            text = {"type": "string"}
            prompts = [text, {"type": "array", "minItems": 1, "items": text}, *prompts]
        return {"anyOf": prompts}


Count = Annotated[Int, Bounds(low=1, high=MAX_ANSWERS, hint="ask for one answer or more")]


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    schema_key: ClassVar[str] = "completions"
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[list[Prompt], Prompts()] | None = Field(
        None, description="A string, a list of strings, token ids, or a list of lists of token ids."
    )
    prompt_token_ids: Annotated[list[Prompt], Prompts(texts=False)] | None = Field(
        None, description="Token ids instead of prompt."
    )
    n: Count = Field(
        1, description="Number of answers per prompt, sampled independently even with one seed."
    )
    best_of: Count | None = Field(
        None,
        description="Number of answers to generate per prompt; the n with the highest mean log "
        "probability per token are returned. Not in a stream, unless equal to n.",
    )
    max_tokens: Annotated[Int, Bounds(low=0, high=MAX_INT, hint="leave it out for 16")] = Field(
        16,
        description="Maximum number of tokens to generate; with echo or prompt_logprobs, 0 returns "
        "the prompt alone.",
    )
    logprobs: LogprobCount | None = Field(
        None,
        description="Return the log probabilities of the answer's tokens and of this many top "
        "tokens per position, 0 to 20; with echo, also for the prompt.",
    )
    logprob_token_ids: NamedIds = Field((), description=NAMED_IDS)
    prompt_logprobs: LogprobCount | None = Field(
        None,
        description="Return the log probabilities of the prompt's tokens and of this many top "
        "tokens per position, 0 to 20; not in a stream.",
    )
    echo: bool = Field(False, description="Begin the text with the prompt.")
    suffix: str | None = Field(
        None,
        description="The answer is the text between prompt and suffix; for models with tokens "
        "that mark it, such as `<|fim_middle|>`.",
    )
    response_format: ResponseFormat | None = Field(
        None,
        description="`text`, `json_object`, or `json_schema` with `json_schema.schema`, which is "
        "always enforced strictly.",
    )
    stream_options: StreamOptions | None = Field(
        None, description="With stream: `include_usage` and `continuous_usage_stats`."
    )
    add_special_tokens: bool = Field(
        True, description="Add the tokenizer's special tokens to a string prompt."
    )
    truncate_prompt_tokens: (
        Annotated[Int, Bounds(low=-1, high=MAX_INT, hint="-1 keeps all that fit")] | None
    ) = Field(
        None,
        description="Keep only the last N tokens of the prompt; -1: as many as fit.",
        json_schema_extra=NOT_ZERO,
    )
    return_tokens_as_token_ids: bool = Field(
        False, description="Write tokens in log probabilities as `token_id:ID`."
    )
    return_token_ids: bool = Field(
        False, description="Return each choice's `prompt_token_ids` and `token_ids`."
    )

    def check(self) -> None:
        super().check()
        self._check_prompts()
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        check_truncation(self.truncate_prompt_tokens)
        top = None if self.logprobs is None else ("logprobs", self.logprobs)
        check_named_ids(self.logprob_token_ids, top, "0", self._warnings)
        others = ("echo", "prompt_logprobs", "truncate_prompt_tokens")
        if self.suffix and (names := [n for n in others if getattr(self, n)]):
            raise FieldError(
                f"{names[0]} is set together with suffix, which precedes the answer as well; leave "
                "one of them out.",
                names[0],
            )
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise FieldError(
                "max_tokens is 0, which makes no token; ask for 1 or more, or set echo to true for "
                "the prompt.",
                "max_tokens",
            )
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        self._sampling = self.read_sampling(
            self.max_tokens, names=FieldNames(), options=self._options()
        )

    def _check_best_of(self, best_of: int) -> None:
        if best_of < self.n:
            raise FieldError(
                f"best_of is {best_of}, below n {self.n}; raise it or lower n.", "best_of"
            )
        if self.stream and best_of > self.n:
            raise FieldError(
                f"best_of is {best_of} together with stream, but the best are only known at the "
                "end; set stream to false.",
                "best_of",
            )

    def _check_prompts(self) -> None:
        if self.prompt is not None and self.prompt_token_ids is not None:
            raise FieldError(
                "prompt_token_ids is set together with prompt; give one of them.",
                "prompt_token_ids",
            )
        if self.prompt is None and self.prompt_token_ids is None:
            raise FieldError(
                "prompt is missing; the request needs it.", "prompt", "missing_required_parameter"
            )

    def prompts(self) -> list[Prompt]:
        """Each prompt, a text or token ids."""
        return self.prompt or self.prompt_token_ids or []

    @property
    def gap(self) -> Gap | None:
        """The text to fill in between prompt and suffix."""
        return Gap(field="suffix", suffix=self.suffix) if self.suffix else None

    @property
    def answers(self) -> int:
        """Number of answers to generate per prompt, of which `n` are returned."""
        return self.n if self.best_of is None else self.best_of

    def _options(self) -> dict[str, Any]:
        """Return arguments of SamplingParams, with logprobs if best_of needs them to choose."""
        options: dict[str, Any] = {"n": self.answers}
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
            options["logprob_token_ids"] = self.logprob_token_ids
        elif self.answers > self.n:
            options["logprobs"] = 0
        prompt_counts = [count for count in (self.prompt_logprobs,) if count is not None]
        if self.echo and self.logprobs is not None:
            prompt_counts.append(self.logprobs)
        if prompt_counts:
            options["prompt_logprobs"] = max(prompt_counts)
        return options
