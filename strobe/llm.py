"""The offline API: prompts in, answers out, by composition over the engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.config import EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.engine.stats import Metric
from strobe.outputs import (
    CompletionOutput,
    Prompt,
    RequestOutput,
    SpeculationReport,
    StreamDelta,
)
from strobe.request import Request, SamplingParams
from strobe.text.tokenizer import Detokenizer, Message, Tokenizer


@dataclass
class _Answer:
    """One answer being made: the engine's request and its text."""

    request: Request
    detokenizer: Detokenizer
    output: CompletionOutput
    parent: RequestOutput


class LLM:
    """A target and, where there is one, its drafter, ready to answer.

    target: a directory with a Hugging Face checkpoint; without one, the pair in the box. draft: a
    directory with its DFlash drafter. The other options are EngineConfig's fields. Raises
    ValueError with the sentence that mends it, before any weight is read where that is possible.
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
            config = EngineConfig(
                target=str(target or ""), draft=str(draft) if draft is not None else None
            )
            resolved = resolve(config.with_(**options).located())
            self.tokenizer = Tokenizer(Path(resolved.config.target))
            engine = Engine(resolved)
        else:
            self.tokenizer = Tokenizer(Path(engine.config.target))
        self.engine = engine
        self._answers: dict[Request, _Answer] = {}
        self._numbers = itertools.count()

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the target."""
        return self.tokenizer.hf

    def get_metrics(self) -> list[Metric]:
        """Counters since the start, the speculation ones under vLLM's names."""
        return self.engine.stats.metrics()

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
        outputs = [self._submit(prompt, params) for prompt, params in jobs]
        waiting = sum(not output.finished for output in outputs)
        progress = _progress(waiting) if use_tqdm else None
        try:
            while self.engine.has_work:
                for delta, parent in self._step():
                    if progress is not None and delta.finished and parent.finished:
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
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Any = messages if several else [messages]
        options = dict(
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            **(chat_template_kwargs or {}),
        )
        prompts: list[Prompt] = [{"messages": c, "options": options} for c in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        """The answer to one prompt as it is made; leaving the loop early aborts it.

        Raises ValueError for a prompt that cannot run.
        """
        ((job, params),) = self._jobs([prompt], sampling_params)
        output = self._submit(job, params)
        if output.outputs[0].error is not None:
            raise ValueError(output.outputs[0].error)
        try:
            while not output.finished:
                for delta, parent in self._step():
                    if parent is output:
                        yield delta
        finally:
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
        single = isinstance(prompts, str | dict) or (
            bool(prompts) and isinstance(prompts[0], int)
        )
        many: list[Any] = [prompts] if single else list(prompts)
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [(prompt, params) for prompt in many]
        if len(params) != len(many):
            raise ValueError(
                f"There are {len(many)} prompts and {len(params)} sampling_params; "
                "give one for all, or one for each."
            )
        return list(zip(many, params, strict=True))

    def _submit(self, prompt: Prompt, params: SamplingParams) -> RequestOutput:
        """Queue a prompt's answers; what cannot run comes back finished, with the sentence."""
        number = f"request-{next(self._numbers)}"
        output = RequestOutput(number, None, [], [])
        first: Request | None = None
        try:
            output.prompt, output.prompt_token_ids = self._encode(prompt)
            for index in range(params.n):
                request = self.engine.add(
                    output.prompt_token_ids,
                    params,
                    sibling=index,
                    seed=None if first is None else first.seed,
                    request_id=number if params.n == 1 else f"{number}-{index}",
                )
                first = first or request
                answer = CompletionOutput(index)
                output.outputs.append(answer)
                detokenizer = Detokenizer(
                    self.tokenizer,
                    stop=params.stop,
                    include_stop=params.include_stop_str_in_output,
                    min_tokens=params.min_tokens,
                    skip_special_tokens=params.skip_special_tokens,
                    silent_ids=(
                        frozenset() if params.include_stop_str_in_output else request.stop_ids
                    ),
                )
                self._answers[request] = _Answer(request, detokenizer, answer, output)
        except ValueError as error:
            output.outputs = [
                CompletionOutput(i, finish_reason="error", error=str(error))
                for i in range(params.n)
            ]
        return output

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return prompt["prompt"], self.tokenizer.encode(prompt["prompt"])
            if "messages" in prompt:
                options = prompt.get("options", {})
                return None, self.tokenizer.render_chat(prompt["messages"], **options)
        elif isinstance(prompt, list) and all(isinstance(token, int) for token in prompt):
            return None, list(prompt)
        raise ValueError(
            f"A prompt of type {type(prompt).__name__} cannot be read; give a text, a list of "
            'token ids, {"prompt": text} or {"prompt_token_ids": ids}.'
        )

    def _step(self) -> list[tuple[StreamDelta, RequestOutput]]:
        """One engine step, and the text it made."""
        news: list[tuple[StreamDelta, RequestOutput]] = []
        for request, tokens, reason in self.engine.step():
            answer = self._answers.get(request)
            if answer is None:
                continue
            output = answer.output
            delta = answer.detokenizer.push(tokens, last=reason is not None)
            output.token_ids += tokens[: delta.num_tokens]
            output.text = answer.detokenizer.text
            if delta.stop is not None:
                self.engine.finish(request, "stop")
                output.finish_reason, output.stop_reason = "stop", delta.stop
            elif reason is not None:
                output.finish_reason, output.stop_reason = reason, request.stop_reason
            if output.finish_reason is not None:
                output.speculation = SpeculationReport.of(request)
                del self._answers[request]
            made = tokens[: delta.num_tokens]
            news.append(
                (
                    StreamDelta(answer.parent.request_id, output.index, delta.text, made, output),
                    answer.parent,
                )
            )
        return news

    def _drop(self, outputs: Sequence[RequestOutput]) -> None:
        """Abort what is still running of these, after an exception or an abandoned stream."""
        mine = {id(output) for output in outputs}
        for answer in [a for a in self._answers.values() if id(a.parent) in mine]:
            self.engine.finish(answer.request, "abort")
            answer.output.finish_reason = "abort"
            answer.output.speculation = SpeculationReport.of(answer.request)
            del self._answers[answer.request]
        while self.engine.has_work and not self._answers:
            self.engine.step()


def _progress(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
