"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field
from pydantic.config import JsonDict

from strobe.sampling_params import MAX_ANSWERS, MAX_NAMED
from strobe.server.generation.request import GenerationRequest, Sampling
from strobe.server.openai.protocol.conversation import Conversation
from strobe.server.schema.base import FieldWarnings, StreamOptions
from strobe.server.schema.field_errors import FieldError, FieldNames
from strobe.server.schema.messages import Messages
from strobe.server.schema.sampling_fields import (
    LogprobCount,
    MaxTokens,
    SamplingFields,
    check_top_logprobs,
)
from strobe.server.schema.structured_output import ResponseFormat
from strobe.server.schema.template_fields import Effort
from strobe.server.schema.tools import ChatToolChoice, make_toolbox
from strobe.server.schema.values import Bounds, Ids, Int
from strobe.validation import MAX_INT

NOT_ZERO: JsonDict = {"not": {"const": 0}}

NamedIds = Annotated[tuple[int, ...], Ids(max_items=MAX_NAMED)]
NAMED_IDS = (
    f"With logprobs: up to {MAX_NAMED} token ids whose log probabilities are returned at each "
    "position of the answer, in place of the top tokens."
)


class ChatCompletionRequest(SamplingFields, Conversation):
    """The body of POST /v1/chat/completions."""

    schema_key: ClassVar[str] = "chat"

    messages: Messages = Field(
        description="The conversation: objects with `role` and `content`, a string or a list of "
        "text parts."
    )
    n: Annotated[Int, Bounds(low=1, high=MAX_ANSWERS, hint="ask for one answer or more")] = Field(
        1, description="Number of answers, sampled independently even with one seed."
    )
    max_completion_tokens: MaxTokens | None = Field(
        None,
        description="Maximum number of tokens to generate, reasoning included; default: as many "
        "as fit.",
    )
    max_tokens: MaxTokens | None = Field(None, description="Older name of max_completion_tokens.")
    logprobs: bool = Field(False, description="Return log probabilities of the answer's tokens.")
    top_logprobs: LogprobCount | None = Field(
        None, description="With logprobs: number of top tokens per position, 0 to 20."
    )
    logprob_token_ids: NamedIds = Field((), description=NAMED_IDS)
    prompt_logprobs: LogprobCount | None = Field(
        None,
        description="Return the log probabilities of the prompt's tokens and of this many top "
        "tokens per position, 0 to 20; not in a stream.",
    )
    response_format: ResponseFormat | None = Field(
        None,
        description="`text`, `json_object`, or `json_schema` with `json_schema.schema`, which is "
        "always enforced strictly.",
    )
    tool_choice: ChatToolChoice | None = Field(
        None,
        description="`none`, `auto`, `required`, a function by name, or `allowed_tools`; default: "
        "`auto` if there are tools. With `none` the prompt contains no tools.",
    )
    parallel_tool_calls: bool = Field(
        True,
        description="Allow several calls in one answer. With `required`, only if the request sets "
        "it to true; a function by name is called once.",
    )
    reasoning_effort: Effort | None = Field(
        None,
        description="Passed to the chat template; `none` also sets its enable_thinking to false.",
    )
    include_reasoning: bool = Field(
        True, description="false leaves `reasoning_content` and `reasoning` out of the response."
    )
    stream_options: StreamOptions | None = Field(
        None, description="With stream: `include_usage` and `continuous_usage_stats`."
    )
    echo: bool = Field(
        False,
        description="Begin the answer with the last message, if it is the assistant's or the "
        "prompt ends with it: `add_generation_prompt` is false or `continue_final_message` true.",
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
        False, description="Return `prompt_token_ids` and each choice's `token_ids`."
    )

    def check(self) -> None:
        super().check()
        check_stream(self.stream, self.stream_options, self.prompt_logprobs)
        check_truncation(self.truncate_prompt_tokens)
        if (
            self.max_tokens is not None
            and self.max_completion_tokens is not None
            and self.max_tokens != self.max_completion_tokens
        ):
            raise FieldError(
                f"max_tokens is {self.max_tokens}, but max_completion_tokens is "
                f"{self.max_completion_tokens}; give one of them.",
                "max_tokens",
            )
        check_top_logprobs(self.top_logprobs, self.logprobs)
        top = ("top_logprobs", self.top_logprobs) if self.logprobs else None
        check_named_ids(self.logprob_token_ids, top, "true", self._warnings)
        self._sampling = self._read_sampling()
        self._generation = GenerationRequest(
            messages=[message.for_template() for message in self.messages],
            toolbox=make_toolbox(self.tools, self.tool_choice, self._warnings),
            parallel_tool_calls=(
                self.parallel_tool_calls if self.is_set("parallel_tool_calls") else None
            ),
            template=self.template_options(self.reasoning_effort),
            sampling=self._sampling,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            model=self.model,
            request_id=self.request_id,
            timeout=self.timeout,
        )

    def _read_sampling(self) -> Sampling:
        options: dict[str, Any] = {"n": self.n}
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
            options["logprob_token_ids"] = self.logprob_token_ids
        if self.prompt_logprobs is not None:
            options["prompt_logprobs"] = self.prompt_logprobs
        names = FieldNames()
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return self.read_sampling(
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            names=names,
            options=options,
        )

    @property
    def echo_text(self) -> str:
        """The text that `echo` puts before the answer: the last message's, if it is the assistant's
        or the prompt ends with it."""
        last = self.generation.messages[-1]
        starts_answer = self.add_generation_prompt and not self.continue_final_message
        if not self.echo or (starts_answer and last["role"] != "assistant"):
            return ""
        return last["content"] or ""


def check_named_ids(
    ids: tuple[int, ...], top: tuple[str, int | None] | None, hint: str, warnings: FieldWarnings
) -> None:
    """Check logprob_token_ids. top: the field that sets the number of top tokens, and its value;
    None without logprobs. hint: a value of logprobs. Raises FieldError."""
    name = "logprob_token_ids"
    if ids and top is None:
        raise FieldError(f"{name} is set without logprobs; set logprobs to {hint}.", name)
    if ids and top is not None and top[1]:
        warnings.append(f"{top[0]} has no effect: {name} names the tokens.")


def check_stream(
    stream: bool,
    options: StreamOptions | None,
    prompt_logprobs: int | None,
) -> None:
    """Check the fields that need or exclude a stream. Raises FieldError."""
    if options is not None and not stream:
        raise FieldError(
            "stream_options is set without stream; set stream to true.", "stream_options"
        )
    if stream and prompt_logprobs is not None:
        raise FieldError(
            f"prompt_logprobs is {prompt_logprobs} together with stream, which has no place for "
            "them; set stream to false.",
            "prompt_logprobs",
        )


def check_truncation(tokens: int | None) -> None:
    """Reject truncation to an empty prompt. Raises FieldError."""
    if tokens == 0:
        raise FieldError(
            "truncate_prompt_tokens is 0, which keeps no token; give 1 or more, or -1 for all that "
            "fit.",
            "truncate_prompt_tokens",
        )
