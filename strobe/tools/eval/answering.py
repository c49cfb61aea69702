"""Answer all conversations of a data set, several at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from strobe.engine.engine import Engine
from strobe.outputs import AnswerBuilder, CompletionOutput
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.text.tokenizer import Message, Tokenizer
from strobe.tools.bench.rates import synchronize
from strobe.tools.eval.datasets import Sample
from strobe.tools.eval.graders import spoken

_MAX_TURNS = 1000  # per conversation, so that seeds of different samples differ


@dataclass
class Conversation:
    """A sample and the model's answers so far. error: why it could not continue."""

    sample: Sample
    number: int
    answers: list[CompletionOutput] = field(default_factory=list[CompletionOutput])
    prompt_tokens: list[int] = field(default_factory=list[int])
    error: str | None = None

    @property
    def ended(self) -> bool:
        return self.error is not None or len(self.answers) == len(self.sample.turns)

    def messages(self, thinking: bool) -> list[Message]:
        """Return the chat up to the next turn, with answers stripped of thinking."""
        turns: list[Message] = list(self.sample.before)
        for i, turn in enumerate(self.sample.turns[: len(self.answers) + 1]):
            turns.append({"role": "user", "content": turn})
            if i < len(self.answers):
                text = self.answers[i].text
                turns.append({"role": "assistant", "content": spoken(text) if thinking else text})
        return turns


@dataclass
class Run:
    """Every conversation once, in the samples' order, and their total seconds."""

    conversations: list[Conversation]
    seconds: float = 0.0

    @property
    def answers(self) -> list[CompletionOutput]:
        return [answer for talk in self.conversations for answer in talk.answers]

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answers)


class Answering:
    """Answers samples with one engine. thinking: the default for samples without a setting."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, params: SamplingParams, thinking: bool
    ):
        self.engine = engine
        self.tokenizer = tokenizer
        self._params = params
        self._thinking = thinking
        self._running: dict[Hashable, tuple[Request, Conversation, AnswerBuilder]] = {}

    def run(
        self,
        samples: Sequence[Sample],
        count: int,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> Run:
        """Run all conversations, `count` at a time; each next one starts as soon as one has ended.

        on_progress: called with the number that have ended.
        """
        run = Run([Conversation(sample=sample, number=i) for i, sample in enumerate(samples)])
        waiting = deque(run.conversations)
        device = self.engine.resolved.device
        synchronize(device)
        began = time.perf_counter()
        try:
            while waiting or self._running:
                while waiting and len(self._running) < count:
                    self._ask(waiting.popleft())
                if self._running:
                    self._step()
                on_progress(len(samples) - len(waiting) - len(self._running))
        finally:
            self._abort()
        synchronize(device)
        run.seconds = time.perf_counter() - began
        return run

    def _ask(self, talk: Conversation) -> None:
        """Send the next turn to the engine; an invalid prompt ends the conversation."""
        sample = talk.sample
        params = self._params.clone(stop=sample.stop) if sample.stop else self._params
        thinking = self._thinking if sample.thinking is None else sample.thinking
        try:
            if sample.raw:
                prompt = self.tokenizer.encode(sample.turns[0])
            else:
                prompt = self.tokenizer.render_chat(
                    talk.messages(thinking), tools=sample.tools or None, enable_thinking=thinking
                )
            seed = self.engine.config.seed + talk.number * _MAX_TURNS + len(talk.answers)
            request = self.engine.add(prompt, params, seed=seed)
        except ValueError as error:
            talk.error = str(error)
            return
        answer = AnswerBuilder(self.tokenizer, params, request_id=request.id)
        talk.prompt_tokens.append(len(prompt))
        self._running[request.key] = request, talk, answer

    def _step(self) -> None:
        for event in self.engine.step():
            if event.key not in self._running:
                continue
            request, talk, answer = self._running[event.key]
            if not answer.push(event).finished:
                continue
            if event.finish_reason is None:
                self.engine.finish(request, "stop")
            del self._running[event.key]
            talk.error = answer.output.error
            if talk.error is None:
                talk.answers.append(answer.output)
            if not talk.ended:
                self._ask(talk)

    def _abort(self) -> None:
        """Abort running requests, for example after an interrupt."""
        for request, _, _ in self._running.values():
            self.engine.finish(request, "abort")
        self._running.clear()
        while self.engine.has_work:
            self.engine.step()
