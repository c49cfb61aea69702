"""Near ties of routers: experts that rounding may swap, which changes log probabilities by tenths.

In a target with experts, a row whose k-th and next router logits are nearly equal has two right
results. transformers' model in float64, with the tokens given, says which rows are such, and what
both results are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

ROUTER_TIE = 1e-5
"""Router logits this close may swap places by rounding in float32; most are tenths apart."""
CLOSE = 2e-3
"""Rounding of log probabilities in float32 beside those of float64."""


class Row(NamedTuple):
    """A row of a router: its weight's name, and the row's place in the sequence."""

    router: str
    row: int


class Routers:
    """The routers of transformers' model of a target, in float64."""

    def __init__(self, target: Path):
        self.model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64)
        self.model.set_experts_implementation("eager")
        config = self.model.config.get_text_config()
        count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", 0)
        top = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", 0)
        self.top = int(top)
        self.weights = {
            name: weight
            for name, weight in self.model.named_parameters()
            if weight.dim() == 2 and len(weight) == count and ("gate" in name or "router" in name)
        }

    def logprobs(self, tokens: Sequence[int], swapped: Row | None = None) -> Tensor:
        """Return the log probabilities after each token, [tokens, V]; swapped: a row whose last
        expert is the next one instead."""
        with self._watch({}, swapped), torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0]
        return logits.log_softmax(-1)

    def ties(self, tokens: Sequence[int]) -> list[Row]:
        """Return the rows whose last expert and the next one nearly tie."""
        logits: dict[str, Tensor] = {}
        with self._watch(logits, None), torch.no_grad():
            self.model(torch.tensor([tokens]))
        rows: list[Row] = []
        for name, values in logits.items():
            best = values.sort(-1, descending=True).values
            gaps = best[:, self.top - 1] - best[:, self.top]
            rows += [Row(name, row) for row in (gaps < ROUTER_TIE).nonzero().flatten().tolist()]
        return rows

    @contextmanager
    def _watch(self, logits: dict[str, Tensor], swapped: Row | None) -> Iterator[None]:
        """Record the router logits [tokens, experts] of a run; swap two of them in one row."""
        linear = functional.linear
        names = {id(weight): name for name, weight in self.weights.items()}

        def watched(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            result = linear(rows, weight, bias)
            name = names.get(id(weight))
            if name is None:
                return result
            values = result.clone().view(-1, result.shape[-1])
            if swapped is not None and swapped.router == name:
                order = values[swapped.row].argsort(descending=True)
                pair = order[[self.top - 1, self.top]]
                values[swapped.row, pair] = values[swapped.row, pair.flip(0)]
            logits[name] = values
            return values.view_as(result)

        with mock.patch.object(functional, "linear", watched):
            yield


def explained_by_experts(
    target: Path, tokens: Sequence[int], at: int, logprobs: tuple[float, float]
) -> bool:
    """Whether both log probabilities of token `at` are right: one as routed in float64, the other
    with a near tie of a router swapped, in either order."""
    routers = Routers(target)
    if not routers.weights:
        return False
    choices = [routers.logprobs(tokens[:at])[-1, tokens[at]].item()]
    for row in routers.ties(tokens[:at]):
        choices.append(routers.logprobs(tokens[:at], row)[-1, tokens[at]].item())
    return all(any(abs(value - choice) < CLOSE for choice in choices) for value in logprobs)
