"""A verdict brought to the host: the only transfer of a step, and the only wait."""

from __future__ import annotations

import torch

from strobe.request import TokenLogprob
from strobe.runner.upload import download
from strobe.step import HostVerdict, Plan, Scores, Verdict


class Flight:
    """A step under way: its plan, and its verdict on the way to the host."""

    def __init__(self, plan: Plan, verdict: Verdict):
        self.plan = plan
        scores, prompt = verdict.scores, verdict.prompt_scores
        self._verdict = Verdict(
            download(verdict.tokens),
            download(verdict.accepted),
            scores and Scores(*map(download, scores)),
            prompt and Scores(*map(download, prompt)),
        )
        self._landed = None
        if verdict.tokens.device.type == "cuda":
            self._landed = torch.cuda.Event()
            self._landed.record()

    def land(self) -> HostVerdict:
        """Wait for the verdict."""
        if self._landed is not None:
            self._landed.synchronize()
        return to_host(self.plan, self._verdict)


def to_host(plan: Plan, verdict: Verdict) -> HostVerdict:
    """A verdict as lists."""
    accepted: list[int] = verdict.accepted.tolist()
    tokens: list[list[int]] = verdict.tokens.tolist()
    if len(tokens) > len(plan.spans):
        accepted, tokens = accepted[: len(plan.spans)], tokens[: len(plan.spans)]
    kept = [t[: a + 1] for t, a in zip(tokens, accepted, strict=True)]
    if verdict.scores is None and verdict.prompt_scores is None:
        return HostVerdict(kept, accepted)
    logprobs: dict[int, list[TokenLogprob]] = {}
    prompt: dict[int, list[TokenLogprob]] = {}
    if verdict.scores is not None:
        asked = [(i, s.request.sampling.logprobs) for i, s in enumerate(plan.spans) if s.rows]
        sizes = [(i, plan.spans[i].rows, top) for i, top in asked if top is not None]
        rows = Rows(verdict.scores)
        for i, count, top in sizes:
            logprobs[i] = rows.take(kept[i], count, top)
    if verdict.prompt_scores is not None:
        rows = Rows(verdict.prompt_scores)
        for i, span in enumerate(plan.spans):
            if span.scored:
                following = span.request.tokens[span.start + 1 : span.start + 1 + span.scored]
                top = span.request.sampling.prompt_logprobs or 0
                prompt[i] = rows.take(following, span.scored, top)
    return HostVerdict(kept, accepted, logprobs, prompt)


class Rows:
    """Scores as lists, read from the front."""

    def __init__(self, scores: Scores):
        self.values: list[float] = scores.values.tolist()
        self.ranks: list[int] = scores.ranks.tolist()
        self.best: list[list[float]] = scores.top_values.tolist()
        self.ids: list[list[int]] = scores.top_ids.tolist()
        self.next = 0

    def take(self, tokens: list[int], count: int, top: int) -> list[TokenLogprob]:
        """The next `count` rows, of which those of `tokens` are wanted, with `top` best ones."""
        first, self.next = self.next, self.next + count
        return [
            TokenLogprob(
                token,
                self.values[row],
                self.ranks[row],
                tuple(zip(self.ids[row][:top], self.best[row][:top], strict=True)),
            )
            for row, token in enumerate(tokens, start=first)
        ]
