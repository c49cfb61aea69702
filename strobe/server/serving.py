"""State shared by all endpoints: the engine's client, the tokenizer, formats, names, metrics."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import re
import reprlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jinja2
import jinja2.meta

from strobe import __version__
from strobe.grammars.rules import ANY_TOKENS
from strobe.request import DEFAULT_SCHEDULING, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.client import EngineClient, Generation
from strobe.server.engine_process.engine_messages import Ready
from strobe.server.engine_process.replicas import Replicas
from strobe.server.generation.api_errors import ApiError, retry_after
from strobe.server.generation.request import Sampling
from strobe.server.generation.retry_estimator import RetryEstimator
from strobe.server.http.guards import Shutdown
from strobe.server.openai.response_store import ResponseStore
from strobe.server.parsers.format_protocols import ReasoningFormat, Tool, ToolFormat
from strobe.server.parsers.formats import REASONING_FORMATS, TOOL_FORMATS, detect
from strobe.server.schema.field_errors import FieldError, FieldNames, counted
from strobe.server.schema.structural_tags import tags_grammar
from strobe.server.server_settings import TEXT_THREADS, ServerConfig
from strobe.server.telemetry.server_metrics import ServerMetrics
from strobe.speculation.shadow.report import ShadowTally
from strobe.text.chat_template import TemplateCapabilities
from strobe.text.tokenizer import Tokenizer

Result = TypeVar("Result")

_KIND_TOKENS = 512
"""Last tokens of a prompt that decide its kind."""
_CODE = re.compile(r"```|^\s*(def|class|import|#include|function|const|public) ", re.MULTILINE)

LATEST = ":latest"
"""The tag that Ollama's clients add to a name without one."""


logger = logging.getLogger(__name__)


class Background(Protocol):
    """Work that the server does besides its requests, such as batches."""

    def resume(self) -> None:
        """Continue the work that a previous run of the server left unfinished."""
        ...

    async def stop(self) -> None:
        """Stop, so that a later run can go on."""
        ...


@dataclass(frozen=True)
class Formats:
    """The served model's formats of tool calls and reasoning; None: it has none."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None

    @staticmethod
    def of(
        settings: ServerConfig, template: str | None, capabilities: TemplateCapabilities
    ) -> Formats:
        """Return the formats that the settings name; "auto" detects them from the chat template.

        capabilities: of the template. One without tools and calls gets both described in the Hermes
        format. Raises ValueError.
        """
        tool_name, reasoning_name = detect(template)
        if tool_name is None and not (capabilities.shows_tools or capabilities.shows_calls):
            tool_name = "hermes"
        tools = _format(settings.tool_call_parser, tool_name, TOOL_FORMATS, "tool_call_parser")
        reasoning = _format(
            settings.reasoning_parser, reasoning_name, REASONING_FORMATS, "reasoning_parser"
        )
        return Formats(tools, reasoning)


def check_parsers(settings: ServerConfig) -> None:
    """Raise ValueError for parsers that do not exist."""
    Formats.of(settings, None, TemplateCapabilities())


def log_tool_form(
    settings: ServerConfig, formats: Formats, capabilities: TemplateCapabilities
) -> None:
    """Log where the model sees a request's tools, and the format of its calls."""
    place = (
        "The chat template shows tools to the model"
        if capabilities.shows_tools
        else "The chat template has no tools, so the system message describes a request's tools to "
        "the model"
    )
    if formats.tools is not None:
        logger.info("%s; its calls are read as %s.", place, formats.tools.name)
    elif settings.tool_call_parser == "auto":
        logger.warning(
            "%s, but the format of its calls is not known, so they are text; name it with "
            "tool_call_parser, one of %s.",
            place,
            ", ".join(TOOL_FORMATS),
        )
    else:
        logger.info("%s; its calls are text, as tool_call_parser is none.", place)


def _format(
    name: str, detected: str | None, formats: Mapping[str, Result], option: str
) -> Result | None:
    if name == "auto":
        return formats[detected] if detected is not None else None
    if name == "none":
        return None
    if name not in formats:
        raise ValueError(f"{option} is {name!r}; name auto, none or {', '.join(formats)}.")
    return formats[name]


@dataclass
class Serving:
    """State of one server, shared by its endpoints."""

    settings: ServerConfig
    client: EngineClient | Replicas
    tokenizer: Tokenizer
    names: tuple[str, ...]
    root: str
    chat_template: str | None
    formats: Formats
    metrics: ServerMetrics
    shutdown: Shutdown = field(default_factory=Shutdown)
    created: int = field(default_factory=lambda: int(time.time()))
    retry_estimator: RetryEstimator = field(default_factory=RetryEstimator)
    shadow: ShadowTally = field(default_factory=ShadowTally)
    background: list[Background] = field(default_factory=list[Background])
    handling: int = 0
    """Number of requests whose handlers are running."""

    def __post_init__(self) -> None:
        self.responses = ResponseStore(self.settings.response_memory)
        self._text_threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="strobe-text")
        self._longest_token = max(map(len, self.tokenizer.fast.get_vocab()), default=1)
        self.template_reads = _variables(self.chat_template or self.tokenizer.hf.chat_template)

    @property
    def facts(self) -> Ready:
        """The engine's facts. Raises ApiError while it starts or restarts and after its
        end."""
        if self.client.facts is None or self.client.dead:
            raise ApiError(503, self.client.state, code="engine_not_ready", headers=retry_after(5))
        return self.client.facts

    @functools.cached_property
    def fingerprint(self) -> str:
        """The responses' `system_fingerprint`: a digest of the version, the engine's settings and
        its device. Raises ApiError before the engine is ready for the first time."""
        facts = self.facts
        text = f"{__version__} {self.client.config} {facts.device} {facts.dtype}"
        return f"fp_{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:12]}"

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Arguments of SamplingParams that apply where a request has none: the checkpoint's and
        the server's."""
        repetition_detection = self.settings.repetition_detection
        if repetition_detection is None:
            return dict(self.facts.sampling)
        return {**self.facts.sampling, "repetition_detection": repetition_detection}

    @property
    def busy(self) -> bool:
        """Whether a request is still being answered."""
        return bool(self.handling or self.client.num_open)

    def name(self, requested: str | None) -> str:
        """Return the model's name for the response. Raises ApiError if it is not served."""
        if requested is None:
            return self.names[0]
        if requested not in self.names and requested.endswith(LATEST):
            requested = requested.removesuffix(LATEST)
        if requested not in self.names:
            raise ApiError(
                404,
                f"The model {requested[:200]!r} is not served here; ask for "
                f"{' or '.join(self.names)}.",
                code="model_not_found",
                field="model",
            )
        return requested

    def template(self, requested: str | None) -> str | None:
        """Return the chat template that replaces the checkpoint's. Raises FieldError for a
        request's template unless the server trusts them."""
        if requested is not None and not self.settings.trust_request_chat_template:
            raise FieldError(
                "chat_template is set, but this server does not run templates of its clients; "
                "leave it out, or start the server with --trust-request-chat-template.",
                "chat_template",
                "unsupported_parameter",
            )
        return requested or self.chat_template

    def check_length(self, text: str, field: str, keep: int | None = None) -> None:
        """Reject a text that cannot fit the context, before encoding it: one with more characters
        than `max_model_len` of the longest tokens. keep: truncation, which disables the check.
        Raises FieldError."""
        max_chars = self.facts.max_model_len * self._longest_token
        if keep is None and len(text) > max_chars:
            raise FieldError(
                f"The prompt has {len(text)} characters, but the context of "
                f"{self.facts.max_model_len} tokens holds at most {max_chars}; shorten it.",
                field,
                "context_length_exceeded",
            )

    def prompt_kind(self, prompt_ids: Sequence[int], params: SamplingParams) -> str:
        """Return the kind of a prompt, under which shadow mode counts it: "structured" with a
        grammar, "code" if the end of the text has some, else "text"."""
        if params.structured_outputs is not None:
            return "structured"
        text = self.tokenizer.hf.decode(list(prompt_ids[-_KIND_TOKENS:]))
        return "code" if _CODE.search(text) else "text"

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run slow work, such as encoding, in a thread instead of on the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        request_id: str,
        scheduling: SchedulingOptions = DEFAULT_SCHEDULING,
    ) -> Generation:
        """Submit a prompt to the engine. Raises ApiError if the queue is full."""
        self.check_room(params.n)
        return self.client.submit(prompt_ids, params, request_id, scheduling)

    def check_room(self, answers: int, prompts: int = 1) -> None:
        """Check that the queue has room for so many answers to so many prompts. Raises
        ApiError if it is full, FieldError if they never fit."""
        max_requests = self.facts.max_num_seqs + self.settings.max_waiting
        if answers > max_requests and prompts > 1:
            raise FieldError(
                f"prompt holds {prompts} prompts, which ask for {answers} answers, but this server "
                f"takes at most {max_requests} at once; send fewer prompts in one request.",
                "prompt",
            )
        if answers > max_requests:
            raise FieldError(
                f"The request asks for {answers} answers, but this server takes at most "
                f"{max_requests} at once; ask for fewer.",
                "n",
            )
        if answers > max_requests - self.client.num_open:
            raise ApiError(
                429,
                f"The queue is full: {counted(self.client.num_open, 'answer')} in progress or "
                "waiting; try again later.",
                code="queue_full",
                headers=retry_after(self.retry_estimator.retry_after(self.client.num_open)),
            )

    def params(self, arguments: Mapping[str, Any], names: FieldNames) -> SamplingParams:
        """Return sampling parameters. names: of the API's fields. Raises FieldError."""
        try:
            return SamplingParams(**arguments)
        except ValueError as error:
            raise names.option_error(str(error)) from None

    def fit(
        self, ids: list[int], limit: tuple[str, int | None], keep: int | None, field: str
    ) -> list[int]:
        """Return the prompt, truncated to its last `keep` tokens if set; -1: to all that fit.

        limit: the name and value of the field whose tokens must fit too. field: the prompt's field.
        Raises FieldError if the prompt is empty or does not fit the context with its answer.
        """
        max_length = self.facts.max_model_len
        name, max_new_tokens = limit
        if keep is not None:
            room = max(1, max_length - max(max_new_tokens or 1, 1)) if keep == -1 else keep
            ids = ids[-room:]
        if not ids:
            raise FieldError("The prompt is empty; give it at least one token.", field)
        size = self.facts.vocab_size
        if max(ids) >= size:
            raise FieldError(
                f"The prompt holds token id {max(ids)}, but the vocabulary has ids 0 to "
                f"{size - 1}.",
                field,
            )
        if len(ids) >= max_length:
            raise FieldError(
                f"The prompt has {counted(len(ids), 'token')}, but the context holds "
                f"{max_length} with the answer; shorten it.",
                field,
                "context_length_exceeded",
            )
        if max_new_tokens is not None and len(ids) + max_new_tokens > max_length:
            raise FieldError(
                f"The prompt has {counted(len(ids), 'token')} and {name} is {max_new_tokens}, "
                f"but the context holds {max_length}; shorten the prompt or lower {name}.",
                name,
                "context_length_exceeded",
            )
        return ids

    def marker_ids(self, text: str) -> list[int]:
        """Return the token ids of a marker."""
        return list(self.tokenizer.fast.encode(text, add_special_tokens=False).ids)

    def constraint(
        self, structured: Mapping[str, Any] | None, prompt: str, sampling: Sampling
    ) -> Mapping[str, Any] | None:
        """Return structured output that applies after the reasoning, if the prompt allows any, and
        that limits the reasoning as `sampling` says. Raises FieldError."""
        form = self.formats.reasoning
        max_thinking = sampling.thinking_budget
        if form is None or (structured is None and max_thinking is None):
            return structured
        limited = {
            **({"grammar": ANY_TOKENS} if structured is None else structured),
            "think_end": self.marker_ids(form.end),
            "max_thinking": max_thinking,
            "prefix": form.gap,
        }
        if form.whole_answer or form.opened_by(prompt):
            return limited
        if prompt.rstrip().endswith(form.end):
            return structured
        start = self.marker_ids(form.start)
        if len(start) == 1:
            return {**limited, "think_start": start[0]}
        if max_thinking is not None:
            budget = sampling.names["thinking_token_budget"]
            raise FieldError(
                f"{budget} is {max_thinking}, but this model's reasoning begins with several "
                "tokens, for which there is no limit; leave it out.",
                budget,
                "unsupported_parameter",
            )
        return structured

    def with_token_ids(self, structured: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return structured output whose structural tags are a grammar of this model's tokens.
        Raises FieldError."""
        if structured is None or "structural_tag" not in structured:
            return structured
        return {"grammar": tags_grammar(structured["structural_tag"], self.added_tokens)}

    @functools.cached_property
    def added_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that the tokenizer adds to its vocabulary, by their texts."""
        added = self.tokenizer.fast.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items()}

    def call_grammar(self, tools: list[Tool], *, parallel: bool) -> Mapping[str, Any]:
        """Return structured output that forces a call of one of the tools. Raises FieldError if
        the model's call format is unknown."""
        form = self.formats.tools
        if form is None:
            raise FieldError(
                "tool_choice forces a call, but this model has no known format of calls; start the "
                "server with tool_call_parser, or ask for tool_choice auto.",
                "tool_choice",
                "unsupported_parameter",
            )
        return {"grammar": self._calls(form, tools, parallel)}

    def allow_tool_calls(
        self, structured: Mapping[str, Any], tools: list[Tool], *, parallel: bool
    ) -> Mapping[str, Any]:
        """Return structured output that also allows a call of one of the tools."""
        form = self.formats.tools
        if form is None or form.whole_answer or not tools:
            return structured
        return {**structured, "alternative": self._calls(form, tools, parallel)}

    def _calls(self, form: ToolFormat, tools: list[Tool], parallel: bool) -> str:
        try:
            enforced = [tool.enforceable() for tool in tools]
            return form.grammar(enforced, parallel=parallel, added_tokens=self.added_tokens)
        except ValueError as error:
            raise FieldError(str(error), "tools") from None
        except (TypeError, AttributeError, LookupError, RecursionError):
            raise FieldError(
                "tools has a schema in which a keyword's value is not of the kind that JSON Schema "
                "asks for, or which is nested too deeply; correct the schema.",
                "tools",
            ) from None


def _variables(template: object) -> Collection[str] | None:
    """Return the variables that a chat template reads, None if it cannot be parsed."""
    if not isinstance(template, str):
        return None
    try:
        parsed = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except jinja2.TemplateError:
        return None
    return jinja2.meta.find_undeclared_variables(parsed)


def read_template(path_or_text: str | None) -> str | None:
    """Return the chat template in a file, or the argument if it is a template's text. Raises
    ValueError."""
    if path_or_text is None or "{" in path_or_text:
        return path_or_text
    try:
        return Path(path_or_text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"chat_template is {reprlib.repr(path_or_text)}, which is neither a file that can be "
            f"read nor a template ({error})."
        ) from None


def check_template(tokenizer: Tokenizer, template: str) -> None:
    """Raise ValueError for a chat template that does not compile."""
    try:
        tokenizer.chat_text([{"role": "user", "content": "Hello"}], chat_template=template)
    except ValueError as error:
        if isinstance(error.__cause__, jinja2.TemplateSyntaxError):
            line = error.__cause__.lineno
            message = " ".join(str(error.__cause__).split())
            raise ValueError(
                f"The chat template does not compile (line {line}): {message.rstrip('.')}."
            ) from None
