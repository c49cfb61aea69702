"""The endpoint /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fastapi import Request

from strobe.request import TokenLogprob
from strobe.server.generation import reply
from strobe.server.generation.logprobs import prompt_logprobs
from strobe.server.generation.prepare import shadow_warnings
from strobe.server.generation.reply import Event
from strobe.server.generation.run import (
    ChoiceState,
    GenerationJob,
    Progress,
    PromptRun,
    usage,
)
from strobe.server.openai.chunks import ChunkCodec, last_fields, reports_usage
from strobe.server.openai.infill_prompt import end_ids, infill_ids
from strobe.server.openai.protocol.completion_request import CompletionRequest
from strobe.server.openai.protocol.infill_request import InfillRequest
from strobe.server.openai.protocol.response_bodies import (
    Completion,
    CompletionChoice,
    CompletionHead,
    CompletionLogprobs,
)
from strobe.server.openai.step_report import step_of
from strobe.server.parsers.segment import Plain
from strobe.server.schema.field_errors import FieldError
from strobe.server.serving import Serving
from strobe.text.detokenizer import TextStream


@dataclass(frozen=True)
class Prompt:
    """A prompt as text and as token ids."""

    text: str
    ids: list[int]


class Started(NamedTuple):
    """Prompts that the engine has."""

    name: str
    request_id: str
    deadline: reply.Deadline
    prompts: list[Prompt]
    runs: list[PromptRun]


async def completions(
    serving: Serving, request: CompletionRequest, http: Request
) -> CompletionCodec:
    """Answer POST /v1/completions."""
    started = await start(serving, request, http)
    return CompletionCodec(serving, request, started, reply.wants_report(http, request))


async def start(
    serving: Serving, request: CompletionRequest | InfillRequest, http: Request
) -> Started:
    """Submit the request's prompts. Raises FieldError and others of `to_api_error`."""
    runs: list[PromptRun] = []
    try:
        name = serving.name(request.model)
        deadline = reply.Deadline(serving, request.timeout)
        sampling = request.sampling
        arguments = sampling.arguments(serving.sampling_defaults)
        structured = serving.with_token_ids(arguments.get("structured_outputs"))
        params = serving.params({**arguments, "structured_outputs": structured}, sampling.names)
        if request.gap is not None:
            params = params.clone(stop_token_ids=(*params.stop_token_ids, *end_ids(serving)))
        count = len(request.prompts())
        serving.check_room(count * params.n, count)
        async with deadline():
            prompts = [
                await _prompt(serving, request, raw_prompt) for raw_prompt in request.prompts()
            ]
        request_id = request.request_id or http.scope["state"]["request_id"]
        serving.check_room(count * params.n, count)
        arrived_at = http.scope["state"]["arrived_at"]
        for i, prompt in enumerate(prompts):
            job_id = request_id if len(prompts) == 1 else f"{request_id}-{i}"
            if sampling.thinking_budget is not None:
                limited = serving.constraint(structured, prompt.text, sampling)
                params = params.clone(structured_outputs=limited)
            job = GenerationJob(
                prompt_ids=prompt.ids,
                params=params,
                request_id=job_id,
                parser=Plain,
                names=sampling.engine_names,
                started_at=arrived_at,
                scheduling=sampling.scheduling,
            )
            runs.append(PromptRun(serving, job))
    except Exception:  # whatever failed: nobody will read the prompts that already run
        for run in runs:
            run.close()
        raise
    return Started(name=name, request_id=request_id, deadline=deadline, prompts=prompts, runs=runs)


async def _prompt(
    serving: Serving, request: CompletionRequest | InfillRequest, raw_prompt: str | list[int]
) -> Prompt:
    tokenizer = serving.tokenizer
    gap = request.gap
    field = request.prompt_field

    def infilled(ids: list[int]) -> list[int]:
        return ids if gap is None else infill_ids(serving, ids, gap)

    def read() -> Prompt:
        if isinstance(raw_prompt, str):
            try:
                serving.check_length(raw_prompt, field, request.truncate_prompt_tokens)
                special = request.add_special_tokens
                first = tokenizer.encode("", add_special_tokens=special and gap is not None)
                ids = tokenizer.encode(raw_prompt, add_special_tokens=special and gap is None)
            except FieldError:
                raise
            except ValueError as error:
                raise FieldError(str(error), field) from None
            return Prompt(raw_prompt, [*first, *infilled(ids)])
        size = serving.facts.vocab_size
        valid_ids = [token for token in raw_prompt if token < size]
        text = tokenizer.decode(valid_ids, skip_special_tokens=False)
        return Prompt(text, infilled(raw_prompt))

    prompt = await serving.in_thread(read)
    ids = serving.fit(prompt.ids, request.sampling.needed, request.truncate_prompt_tokens, field)
    if len(ids) < len(prompt.ids):
        text = await serving.in_thread(lambda: tokenizer.decode(ids, skip_special_tokens=False))
        return Prompt(text, ids)
    return prompt


class CompletionCodec(ChunkCodec):
    """A text completion, whole or streamed; chunks of several prompts are interleaved."""

    def __init__(
        self,
        serving: Serving,
        request: CompletionRequest,
        started: Started,
        report: bool,
    ):
        super().__init__(started.runs, started.deadline)
        self.serving = serving
        self.request = request
        self.prompts = started.prompts
        self.report = report
        self.warnings = [*request.warnings(), *shadow_warnings(serving, request.sampling)]
        self.head: CompletionHead = {
            "id": f"cmpl-{started.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": started.name,
            "system_fingerprint": serving.fingerprint,
        }
        self._logprobs: dict[tuple[int, int], LogprobsBuilder] = {}

    def body(self) -> Completion:
        choices: list[CompletionChoice] = []
        for place, run in enumerate(self.runs):
            for choice in _best_choices(run.choices, self.request.n):
                choices.append(self._choice(place, choice, len(choices)))
        return {
            **self.head,
            "choices": choices,
            "usage": usage(self.runs),
            **reply.extras(self.runs, self.report, self.warnings),
        }

    def _choice(self, place: int, choice: ChoiceState, index: int) -> CompletionChoice:
        request = self.request
        run = self.runs[place]
        prompt = self.prompts[place]
        text = (prompt.text if request.echo else "") + choice.output.text
        entry: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.output.finish_reason,
            "stop_reason": choice.output.stop_reason,
        }
        if request.logprobs is not None:
            entry["logprobs"] = self._logprobs[place, choice.index].since(0)
        if request.prompt_logprobs is not None and run.prompt_logprobs is not None:
            entry["prompt_logprobs"] = prompt_logprobs(
                [
                    entry and entry._replace(top=entry.top[: request.prompt_logprobs])
                    for entry in run.prompt_logprobs
                ],
                self.serving.tokenizer,
            )
        if request.return_token_ids:
            entry["token_ids"] = choice.output.token_ids
            entry["prompt_token_ids"] = prompt.ids
        return entry

    def _prompt_part(self, run: PromptRun, prompt: Prompt) -> LogprobsBuilder:
        """Return the prompt's tokens and their log probabilities, for echo."""
        parts = LogprobsBuilder()
        tokenizer = self.serving.tokenizer
        count = self.request.logprobs
        entries = run.prompt_logprobs or [None] * len(prompt.ids)
        stream = TextStream(tokenizer, skip_special_tokens=False)
        pieces = [stream.step(token) for token in prompt.ids]
        pieces[-1] += stream.end()
        parts.offset = len(prompt.text) - sum(map(len, pieces))  # of a start token, which it lacks
        for token, text, entry in zip(prompt.ids, pieces, entries, strict=True):
            scored = entry or TokenLogprob(token=token, logprob=0.0, rank=1)
            scored = scored._replace(top=scored.top[:count])
            parts.add([scored], [text], self, first=entry is None)
        return parts

    def delta(self, place: int, steps: Sequence[Progress]) -> list[Event]:
        chunks = [self._chunk(place, progress) for progress in steps]
        return [chunk for chunk in chunks if chunk is not None]

    def end(self) -> list[Event]:
        if not reports_usage(self.report, self.request.stream_options):
            return []
        last: Completion = {**self.head, **last_fields(self.runs)}
        return [last]

    def _chunk(self, place: int, progress: Progress) -> Completion | None:
        """Return a chunk, None if there is nothing to send."""
        request = self.request
        prompt = self.prompts[place]
        options = request.stream_options
        choice = progress.choice
        delta = progress.delta
        text = delta.text
        first = (place, choice.index) not in self._logprobs
        if first:
            self._logprobs[place, choice.index] = LogprobsBuilder()
            if request.echo:
                text = prompt.text + text
        entry: CompletionChoice = {
            "index": place * request.n + choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": choice.output.finish_reason if progress.finished else None,
        }
        if progress.finished:
            entry["stop_reason"] = choice.output.stop_reason
        if request.logprobs is not None:
            if first and request.echo:
                self._logprobs[place, choice.index] = self._prompt_part(self.runs[place], prompt)
            parts = self._logprobs[place, choice.index]
            num_sent = 0 if first else len(parts.tokens)
            parts.add(delta.logprobs, delta.pieces, self)
            entry["logprobs"] = parts.since(num_sent) if len(parts.tokens) > num_sent else None
        if request.return_token_ids:
            entry["token_ids"] = delta.token_ids
            if first:
                entry["prompt_token_ids"] = prompt.ids
        if self.report:
            entry["step"] = step_of(delta, self.serving.tokenizer)
        chunk: Completion = {**self.head, "choices": [entry]}
        if first and self.warnings:
            chunk["warnings"] = self.warnings
        if options is not None and options.include_usage:
            chunk["usage"] = usage(self.runs) if options.continuous_usage_stats else None
        filled = text or progress.finished or entry["logprobs"] or len(entry) > 4 or first
        return chunk if filled else None


class LogprobsBuilder:
    """Builds the `logprobs` object of /v1/completions, token by token."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.values: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []
        self.offset = 0

    def add(
        self,
        entries: list[TokenLogprob],
        pieces: list[str],
        codec: CompletionCodec,
        *,
        first: bool = False,
    ) -> None:
        """Add tokens and their texts. first: a prompt's first token, which has no logprob."""
        for entry, piece in zip(entries, pieces, strict=True):
            self.tokens.append(self._name(entry.token, codec))
            self.values.append(None if first else entry.logprob)
            best: dict[str, float] = {}  # tokens of the same text share its highest value
            for token, value in (*entry.top, (entry.token, entry.logprob)):
                name = self._name(token, codec)
                best[name] = max(value, best.get(name, value))
            self.top.append(None if first else best)
            self.offsets.append(max(self.offset, 0))
            self.offset += len(piece)

    @staticmethod
    def _name(token: int, codec: CompletionCodec) -> str:
        if codec.request.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return codec.serving.tokenizer.token_text(token)

    def since(self, start: int) -> CompletionLogprobs:
        """Return the object of the tokens after the first `start`."""
        return {
            "tokens": self.tokens[start:],
            "token_logprobs": self.values[start:],
            "top_logprobs": self.top[start:],
            "text_offset": self.offsets[start:],
        }


def _best_choices(choices: list[ChoiceState], count: int) -> list[ChoiceState]:
    """Return the `count` answers of the highest mean log probability per token, sorted if any are
    left out."""
    if len(choices) == count:
        return choices

    def mean(choice: ChoiceState) -> float:
        num_tokens = len(choice.output.token_ids)
        return (choice.output.cumulative_logprob or 0.0) / max(num_tokens, 1)

    return sorted(choices, key=mean, reverse=True)[:count]
