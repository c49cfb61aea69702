"""The offline API: prompts in, answers out, by composition over the engine."""

from __future__ import annotations

import itertools
import logging
import re
import reprlib
import signal
import threading
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from strobe.compat.aliases import translate
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.outputs import (
    AnswerBuilder,
    CompletionOutput,
    Metric,
    Prompt,
    RequestOutput,
    StreamDelta,
    collect_metrics,
    logprobs_by_token,
)
from strobe.ranks.leader import start_engine
from strobe.request import DEFAULT_SCHEDULING, Request, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.step import RequestStart
from strobe.text.tokenizer import Message, Tokenizer
from strobe.warmup.cost_measurement import measure_costs

if TYPE_CHECKING:
    from tqdm import tqdm
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class LLM:
    """A target and, optionally, its drafter, ready to answer.

    target: a directory with a Hugging Face checkpoint, or its name on the hub; by default the demo
    models. draft: the same for its drafter, or "auto". The other options are EngineConfig's
    fields, or vLLM's names for them (`model`, `speculative_config`, ...). Raises ValueError with a
    hint, before any weight is read if possible.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        engine: Engine | None = None,
        **options: object,
    ):
        """engine: an existing engine, in place of the options."""
        if engine is None:
            names = {"target": target, "draft": draft}
            paths = {n: str(path) for n, path in names.items() if path is not None}
            config = EngineConfig().with_(**translate(paths | options).values)
            if config.shadow:
                raise ValueError(
                    "shadow is True, but only a server reports its scores; start strobe serve "
                    "--shadow, or leave shadow out."
                )
            resolved = resolve(config)
            self.tokenizer = Tokenizer(Path(resolved.config.target))
            engine = start_engine(resolved)
            measure_costs(engine)
        else:
            self.tokenizer = Tokenizer(Path(engine.config.target))
        self.engine = engine
        self._answers: dict[tuple[Hashable, int], tuple[Request, AnswerBuilder, RequestOutput]] = {}
        self._inboxes: dict[str, deque[StreamDelta]] = {}
        self._numbers = itertools.count()
        self._logged: set[str] = set()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the target's transformers tokenizer."""
        return self.tokenizer.hf

    def get_metrics(self) -> list[Metric]:
        """Return the counters since the start, under vLLM's names where vLLM has one."""
        return collect_metrics(self.engine.stats)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint's generation_config.json
        recommends."""
        return SamplingParams(**self.engine.resolved.target.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Return answers in the order of the prompts. sampling_params: one for all, or one per
        prompt.

        A prompt that cannot run gets finish_reason "error" and a sentence; the others run.
        """
        prompt_params = self._pair_params(prompts, sampling_params)
        outputs = [self._output() for _ in prompt_params]
        progress = None
        try:
            for output, (prompt, params) in zip(outputs, prompt_params, strict=True):
                self._submit(output, prompt, params)
            waiting = {output.request_id: output for output in outputs if not output.finished}
            progress = _progress(len(waiting)) if use_tqdm and waiting else None
            while waiting:
                for output in self._step():
                    if waiting.pop(output.request_id, None) and progress is not None:
                        progress.update(1)
        finally:
            if progress is not None:
                progress.close()
            self._abort(outputs)
        return outputs

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the checkpoint's chat template."""
        options: dict[str, Any] = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
        }
        extra = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(extra, Mapping) or any(name in options for name in extra):
            raise ValueError(
                f"chat_template_kwargs is {reprlib.repr(extra)}, but must be an object with "
                "further options of the chat template."
            )
        options |= extra
        prompts: list[Prompt] = [
            {"messages": c, "options": options} for c in _as_list(messages, Mapping) or [[]]
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamDelta]:
        """Yield the answer to one prompt as it is generated; leaving the loop early aborts it.

        Raises ValueError for a prompt that cannot run.
        """
        ((single_prompt, params),) = self._pair_params([prompt], sampling_params)
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs is {params.prompt_logprobs}, but a stream has no place for them; "
                "use generate(), or leave them out."
            )
        output = self._output()
        inbox = self._inboxes[output.request_id] = deque()
        try:
            self._submit(output, single_prompt, params)
            if output.outputs[0].error is not None:
                raise ValueError(output.outputs[0].error)
            while inbox or not output.finished:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step()
        finally:
            del self._inboxes[output.request_id]
            self._abort([output])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_options: object,
    ) -> Generator[StreamDelta]:
        """Like `stream`, for a conversation; template_options go to the chat template."""
        return self.stream({"messages": messages, "options": template_options}, sampling_params)

    def _pair_params(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Prompt, SamplingParams]]:
        prompt_list = _as_list(prompts, Integral)
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [(prompt, params) for prompt in prompt_list]
        if not isinstance(params, list | tuple):
            raise ValueError(
                f"sampling_params is {reprlib.repr(params)}; give SamplingParams, or a list with "
                "one for each prompt."
            )
        if len(params) != len(prompt_list):
            raise ValueError(
                f"There are {len(prompt_list)} prompts and {len(params)} sampling_params; "
                "give one for all, or one for each."
            )
        return list(zip(prompt_list, params, strict=True))

    def _output(self) -> RequestOutput:
        return RequestOutput(
            request_id=f"request-{next(self._numbers)}",
            prompt=None,
            prompt_token_ids=[],
            outputs=[],
        )

    def _submit(self, output: RequestOutput, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt's answers; a prompt that cannot run comes back finished, with the
        sentence."""
        number = output.request_id
        try:
            if not isinstance(params, SamplingParams):
                raise ValueError(
                    f"The sampling parameters of a prompt are {reprlib.repr(params)}, but must be "
                    "SamplingParams."
                )
            prompt, scheduling = _scheduling_of(prompt)
            output.prompt, ids = self._encode(prompt)
            output.prompt_token_ids = ids
            requests = self.engine.add_prompt(
                ids, params, key=number, request_id=number, scheduling=scheduling
            )
            for index, request in enumerate(requests):
                answer = AnswerBuilder(self.tokenizer, params, request_id=number, index=index)
                output.outputs.append(answer.output)
                self._answers[number, index] = request, answer, output
        except ValueError as error:
            answers = params.n if isinstance(params, SamplingParams) else 1
            output.outputs = [
                CompletionOutput(index=i, finish_reason="error", error=str(error))
                for i in range(answers)
            ]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Return a prompt's text, if it has one, and its token ids. Raises ValueError."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple):
            return None, _token_ids(prompt)
        fields = prompt if isinstance(prompt, Mapping) else {}
        names = set(fields)
        if names == {"prompt_token_ids"} or names == {"prompt_token_ids", "prompt"}:
            return fields.get("prompt"), _token_ids(fields["prompt_token_ids"])
        if names == {"prompt"}:
            return fields["prompt"], self.tokenizer.encode(fields["prompt"])
        if names == {"messages", "options"}:
            chat = self.tokenizer.render(fields["messages"], **fields["options"])
            self._log_once(chat.warnings)
            return chat.text, self.tokenizer.encode_chat(chat)
        raise ValueError(
            f"A prompt is {reprlib.repr(prompt)}, but must be a text, a list of token ids, "
            '{"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" where wanted.'
        )

    def _log_once(self, sentences: Sequence[str]) -> None:
        """Log sentences that were not logged before."""
        for sentence in sentences:
            if sentence not in self._logged:
                self._logged.add(sentence)
                logger.warning("%s", sentence)

    def _step(self) -> list[RequestOutput]:
        """Run one engine step; return the prompts whose answers are complete. Streams find their
        text in their inboxes."""
        assert self.engine.has_work, "an answer is awaited that nobody makes"
        with _uninterrupted():
            return self._advance()

    def _advance(self) -> list[RequestOutput]:
        finished: list[RequestOutput] = []
        for event in self.engine.step():
            key = event.key, event.sibling
            if key not in self._answers:
                continue
            request, answer, parent = self._answers[key]
            if event.start is not None:
                self._record_prompt(event.start, answer, parent)
            inbox = self._inboxes.get(parent.request_id)
            if inbox is not None:
                inbox.append(answer.push(event))
            elif answer.params.stop:
                answer.push(event)
            else:
                answer.collect(event)
            if answer.output.finish_reason is not None:
                del self._answers[key]
                if event.finish_reason is None:
                    self.engine.finish(request, "stop")
                if parent.finished:
                    finished.append(parent)
        return finished

    def _record_prompt(
        self, start: RequestStart, answer: AnswerBuilder, output: RequestOutput
    ) -> None:
        """Record the engine's facts about the prompt, once per prompt."""
        if output.num_cached_tokens is None:
            output.num_cached_tokens = start.num_cached
        if answer.params.prompt_logprobs is not None and not answer.output.index:
            output.prompt_logprobs = [
                None if logprob is None else logprobs_by_token(logprob, self.tokenizer)
                for logprob in start.prompt_logprobs
            ]

    def _abort(self, outputs: Sequence[RequestOutput]) -> None:
        """Abort the requests that are still running, after an exception or an abandoned
        stream."""
        request_ids = {output.request_id for output in outputs}
        for key, (request, answer, _) in list(self._answers.items()):
            if answer.request_id not in request_ids:
                continue
            self.engine.finish(request, "abort")
            if not answer.output.text:
                answer.output.text = answer.decode()
            answer.output.finish_reason = "abort"
            answer.output.speculation = answer.report
            del self._answers[key]
        for _ in range(self.engine.max_in_flight):  # what is in flight for nobody
            if self.engine.has_work and not self._answers:
                self.engine.step()


def _as_list(value: object, item_type: type) -> list[Any]:
    """Return a list of things. A list that starts with an `item_type` is one thing, as is anything
    that is not a list."""
    items: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
    return [value] if items and isinstance(items[0], item_type) else items


def _scheduling_of(prompt: Prompt) -> tuple[Prompt, SchedulingOptions]:
    """Split a prompt into the prompt itself and its scheduling options (cache_salt). Raises
    ValueError."""
    if not isinstance(prompt, Mapping) or "cache_salt" not in prompt:
        return prompt, DEFAULT_SCHEDULING
    rest = dict(prompt)
    salt = rest.pop("cache_salt")
    if not isinstance(salt, str) or not salt or re.search("[\ud800-\udfff]", salt):
        raise ValueError(
            f"cache_salt is {reprlib.repr(salt)}, but must be a text of one or more whole Unicode "
            "characters."
        )
    return rest, SchedulingOptions(cache_salt=salt)


def _token_ids(ids: object) -> list[int]:
    """Convert whole numbers to a list of int. Raises ValueError for anything else."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ValueError(f"A prompt's token ids are {reprlib.repr(ids)}, but must be a list.")
    items: list[Any] = list(ids)
    for token in items:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(
                f"A prompt holds {reprlib.repr(token)}, which is not a token id; give whole "
                "numbers."
            )
    return [int(token) for token in items]


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Delay Ctrl-C to the end of the block, since half a step would leave inconsistent state."""
    default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not default_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt


def _progress(total: int) -> tqdm[NoReturn]:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
