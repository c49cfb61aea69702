"""One answer put together from the engine's news: text, cut tokens, log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from strobe.outputs import CompletionOutput, Logprob, SpeculationReport, StreamDelta
from strobe.request import FinishReason, TokenLogprob
from strobe.sampling_params import SamplingParams
from strobe.step import TokenEvent
from strobe.text.tokenizer import Detokenizer, Tokenizer

if TYPE_CHECKING:
    from strobe.engine.engine import Engine


class News(NamedTuple):
    """What one step made of an answer, as `TokenEvent` tells it, with why it ended if it did."""

    tokens: Sequence[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    drafted: int = 0
    accepted: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    error: str | None = None


class Answer:
    """One answer being made; `output` is all of it so far."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        *,
        request_id: str,
        index: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ):
        """stop_ids: tokens that end the answer, the model's own among them."""
        self.tokenizer, self.params, self.request_id = tokenizer, params, request_id
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        self._detokenizer = Detokenizer(
            tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special_tokens=params.skip_special_tokens,
            silent_ids=frozenset() if params.include_stop_str_in_output else stop_ids,
        )

    def push(self, news: News) -> StreamDelta:
        """Take in one step's news. A stop string ends the answer here: the engine does not know."""
        output, reason = self.output, news.finish_reason
        delta = self._detokenizer.push(news.tokens, last=reason is not None)
        made = list(news.tokens[: delta.num_tokens])
        output.token_ids += made
        output.text = self._detokenizer.text
        if delta.stop is not None:
            output.finish_reason, output.stop_reason = "stop", delta.stop
        elif reason is not None:
            output.finish_reason, output.stop_reason = reason, news.stop_reason
            output.error = news.error
        logprobs = list(news.logprobs[: delta.num_tokens])
        if output.logprobs is not None:
            output.logprobs += [named(found, self.tokenizer) for found in logprobs]
            output.cumulative_logprob = sum(
                [found.logprob for found in logprobs], output.cumulative_logprob or 0.0
            )
        accepted = min(news.accepted, len(made))
        return StreamDelta(
            self.request_id,
            output.index,
            delta.text,
            made,
            output,
            pieces=delta.pieces,
            logprobs=logprobs,
            drafted=news.drafted,
            accepted=accepted,
            finished=output.finish_reason is not None,
        )


def receive(engine: Engine, answer: Answer, event: TokenEvent) -> StreamDelta:
    """Give an answer what a step of the engine made of it. The engine is told where a stop string
    ended it, and with the last news comes the report on speculation."""
    request = event.request
    delta = answer.push(
        News(
            event.tokens,
            event.finish_reason,
            request.stop_reason,
            event.drafted,
            event.accepted,
            event.logprobs,
            request.error,
        )
    )
    if delta.finished:
        if event.finish_reason is None:
            engine.finish(request, "stop")
        answer.output.speculation = SpeculationReport.of(request)
    return delta


def named(found: TokenLogprob, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """One token's log probabilities as vLLM gives them: by token id, the token itself first."""
    best = {
        token: Logprob(value, rank, tokenizer.token_text(token))
        for rank, (token, value) in enumerate(found.top, start=1)
    }
    own = Logprob(found.logprob, found.rank, tokenizer.token_text(found.token))
    return {found.token: own, **{t: entry for t, entry in best.items() if t != found.token}}
