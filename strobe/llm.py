"""The offline API: prompts in, answers out, by composition over the engine."""

from __future__ import annotations

import itertools
import reprlib
import signal
import threading
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any

from strobe.compat.aliases import translate
from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.outputs import (
    Answer,
    CompletionOutput,
    Metric,
    Prompt,
    RequestOutput,
    StreamDelta,
    metrics_of,
    named,
)
from strobe.request import USUAL, Place, Request
from strobe.sampling_params import SamplingParams
from strobe.step import RequestStart
from strobe.text.tokenizer import Message, Tokenizer
from strobe.warmup.costs import adapt


class LLM:
    """A target and, where there is one, its drafter, ready to answer.

    target: a directory with a Hugging Face checkpoint, or its name on the hub; without one, the
    demo models. draft: the same of its DFlash drafter, or "auto". The other options are
    EngineConfig's fields, or vLLM's names for them (`model`, `speculative_config`, ...). Raises
    ValueError with a hint, before any weight is read where that is possible.
    """

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        *,
        engine: Engine | None = None,
        **options: Any,
    ):
        """engine: one made elsewhere, in place of the options."""
        if engine is None:
            names = {"target": target, "draft": draft}
            given = {n: str(path) for n, path in names.items() if path is not None}
            resolved = resolve(EngineConfig().with_(**translate(given | options).values))
            self.tokenizer = Tokenizer(Path(resolved.config.target))
            engine = Engine(resolved)
            adapt(engine)
        else:
            self.tokenizer = Tokenizer(Path(engine.config.target))
        self.engine = engine
        self._answers: dict[tuple[Hashable, int], tuple[Request, Answer, RequestOutput]] = {}
        self._inboxes: dict[str, deque[StreamDelta]] = {}
        self._numbers = itertools.count()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the target."""
        return self.tokenizer.hf

    def get_metrics(self) -> list[Metric]:
        """Counters since the start, the speculation ones under vLLM's names."""
        return metrics_of(self.engine.stats)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return SamplingParams(**self.engine.resolved.target.sampling)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts. sampling_params: one for all, or one per prompt.

        A prompt that cannot run gets finish_reason "error" and the sentence; the others run.
        """
        jobs = self._jobs(prompts, sampling_params)
        outputs = [self._output() for _ in jobs]
        progress = None
        try:
            for output, (prompt, params) in zip(outputs, jobs, strict=True):
                self._submit(output, prompt, params)
            waiting = {output.request_id: output for output in outputs if not output.finished}
            progress = _progress(len(waiting)) if use_tqdm and waiting else None
            while waiting:
                for delta in self._step():
                    if delta.request_id in waiting and waiting[delta.request_id].finished:
                        del waiting[delta.request_id]
                        if progress is not None:
                            progress.update(1)
        finally:
            if progress is not None:
                progress.close()
            self._drop(outputs)
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
        """Answers to one conversation or several, through the checkpoint's chat template."""
        options: dict[str, Any] = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
        }
        more: Any = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(more, Mapping) or any(name in options for name in more):
            raise ValueError(
                f"chat_template_kwargs is {reprlib.repr(more)}, but must be an object with further "
                "options of the chat template."
            )
        options |= more
        prompts: list[Prompt] = [
            {"messages": c, "options": options} for c in _as_list(messages, Mapping) or [[]]
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """The answer to one prompt as it is made; leaving the loop early aborts it.

        Raises ValueError for a prompt that cannot run.
        """
        ((job, params),) = self._jobs([prompt], sampling_params)
        if isinstance(params, SamplingParams) and params.prompt_logprobs is not None:
            raise ValueError(
                f"prompt_logprobs is {params.prompt_logprobs}, but a stream has no place for them; "
                "use generate(), or leave them out."
            )
        output = self._output()
        inbox = self._inboxes[output.request_id] = deque()
        try:
            self._submit(output, job, params)
            if output.outputs[0].error is not None:
                raise ValueError(output.outputs[0].error)
            while inbox or not output.finished:
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step()
        finally:
            del self._inboxes[output.request_id]
            self._drop([output])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        **template_options: Any,
    ) -> Iterator[StreamDelta]:
        """Like `stream`, for a conversation; template_options go to the chat template."""
        return self.stream({"messages": messages, "options": template_options}, sampling_params)

    def _jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[tuple[Prompt, SamplingParams]]:
        many = _as_list(prompts, Integral)
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [(prompt, params) for prompt in many]
        if not isinstance(params, list | tuple):
            raise ValueError(
                f"sampling_params is {reprlib.repr(params)}; give SamplingParams, or a list with "
                "one for each prompt."
            )
        if len(params) != len(many):
            raise ValueError(
                f"There are {len(many)} prompts and {len(params)} sampling_params; "
                "give one for all, or one for each."
            )
        return list(zip(many, params, strict=True))

    def _output(self) -> RequestOutput:
        return RequestOutput(f"request-{next(self._numbers)}", None, [], [])

    def _submit(self, output: RequestOutput, prompt: Prompt, params: SamplingParams) -> None:
        """Queue a prompt's answers; what cannot run comes back finished, with the sentence."""
        number = output.request_id
        try:
            if not isinstance(params, SamplingParams):
                raise ValueError(
                    f"The sampling parameters of a prompt are {reprlib.repr(params)}, but must be "
                    "SamplingParams."
                )
            prompt, place = _placed(prompt)
            output.prompt, ids = self._encode(prompt)
            output.prompt_token_ids = ids
            requests = self.engine.add_prompt(
                ids, params, key=number, request_id=number, place=place
            )
            for index, request in enumerate(requests):
                answer = Answer(self.tokenizer, params, request_id=number, index=index)
                output.outputs.append(answer.output)
                self._answers[number, index] = request, answer, output
        except ValueError as error:
            answers = params.n if isinstance(params, SamplingParams) else 1
            output.outputs = [
                CompletionOutput(i, finish_reason="error", error=str(error)) for i in range(answers)
            ]

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, where it has one, and its token ids. Raises ValueError."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple):
            return None, _token_ids(prompt)
        given: Any = prompt
        names: set[Any] = set(given) if isinstance(given, Mapping) else set()
        if names == {"prompt_token_ids"} or names == {"prompt_token_ids", "prompt"}:
            return given.get("prompt"), _token_ids(given["prompt_token_ids"])
        if names == {"prompt"}:
            return given["prompt"], self.tokenizer.encode(given["prompt"])
        if names == {"messages", "options"}:
            chat = self.tokenizer.render(given["messages"], **given["options"])
            return chat.text, self.tokenizer.encode_chat(chat)
        raise ValueError(
            f"A prompt is {reprlib.repr(prompt)}, but must be a text, a list of token ids, "
            '{"prompt": text} or {"prompt_token_ids": ids}, with "cache_salt" where wanted.'
        )

    def _step(self) -> list[StreamDelta]:
        """One engine step, and the text it made; streams find theirs in their inboxes, too."""
        assert self.engine.has_work, "an answer is awaited that nobody makes"
        with _uninterrupted():
            deltas = self._advance()
            for delta in deltas:
                if delta.request_id in self._inboxes:
                    self._inboxes[delta.request_id].append(delta)
        return deltas

    def _advance(self) -> list[StreamDelta]:
        deltas: list[StreamDelta] = []
        for event in self.engine.step():
            place = event.key, event.choice
            if place not in self._answers:
                continue
            request, answer, parent = self._answers[place]
            if event.start is not None:
                self._note_prompt(event.start, answer, parent)
            delta = answer.push(event)
            if delta.finished:
                del self._answers[place]
                if event.finish_reason is None:
                    self.engine.finish(request, "stop")
            deltas.append(delta)
        return deltas

    def _note_prompt(self, start: RequestStart, answer: Answer, output: RequestOutput) -> None:
        """What the engine found out about the prompt, once per prompt."""
        if output.num_cached_tokens is None:
            output.num_cached_tokens = start.num_cached
        if answer.params.prompt_logprobs is not None and not answer.output.index:
            output.prompt_logprobs = [
                None if found is None else named(found, self.tokenizer)
                for found in start.prompt_logprobs
            ]

    def _drop(self, outputs: Sequence[RequestOutput]) -> None:
        """Abort what is still running of these, after an exception or an abandoned stream."""
        mine = {output.request_id for output in outputs}
        for place, (request, answer, _) in list(self._answers.items()):
            if answer.request_id not in mine:
                continue
            self.engine.finish(request, "abort")
            answer.output.finish_reason = "abort"
            answer.output.speculation = answer.report
            del self._answers[place]
        for _ in range(self.engine.depth):  # what is in flight for nobody
            if self.engine.has_work and not self._answers:
                self.engine.step()


def _as_list(given: Any, part: type) -> list[Any]:
    """Several things as a list; what begins with a `part` of one, or is no list, is one thing."""
    items: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    return [given] if items and isinstance(items[0], part) else items


def _placed(prompt: Any) -> tuple[Any, Place]:
    """A prompt without its cache_salt, and how it stands to others by that. Raises ValueError."""
    if not isinstance(prompt, Mapping) or "cache_salt" not in prompt:
        return prompt, USUAL
    rest: dict[Any, Any] = dict(prompt)
    salt = rest.pop("cache_salt")
    if not isinstance(salt, str) or not salt:
        raise ValueError(
            f"cache_salt is {reprlib.repr(salt)}, but must be a text that is not empty."
        )
    return rest, Place(salt=salt)


def _token_ids(ids: Any) -> list[int]:
    """Whole numbers as a list of int. Raises ValueError for anything else."""
    if isinstance(ids, str | bytes | Mapping) or not isinstance(ids, Iterable):
        raise ValueError(f"A prompt's token ids are {reprlib.repr(ids)}, but must be a list.")
    listed: list[Any] = list(ids)
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(
                f"A prompt holds {reprlib.repr(token)}, which is not a token id; give whole "
                "numbers."
            )
    return [int(token) for token in listed]


@contextmanager
def _uninterrupted() -> Generator[None]:
    """Ctrl-C waits for the end of the block, since half a step would leave half a state."""
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pressed:
            raise KeyboardInterrupt


def _progress(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
