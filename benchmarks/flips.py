"""How often rounding changes a sampled token: exponential race and inverse CDF compared.

    python benchmarks/flips.py [--prompts 24] [--tokens 120] [--temperatures 1 2]

The demo target answers held-out prompts. Its logits at every token of the answers are computed in
fp32 in two ways, and from these the exact probability that both give different tokens under the
same noise. The two ways are:

    head    the head's GEMM, summed in two opposite orders
    model   the whole answer in one forward, and one token at a time

For normalized weights p and q:

    race    1 - sum_i 1 / sum_j max(p_j / p_i, q_j / q_i): of exponentials E_j, i wins both races
            if E_i / p_i <= E_j / p_j and E_i / q_i <= E_j / q_j for all j, so if E_j >= E_i m_ij
            with m_ij = max(p_j / p_i, q_j / q_i), and as m_ii = 1, that is 1 / sum_j m_ij (Moulton
            and Jiang, arXiv 1809.04052; tests/unit/test_sampling_state.py counts it)
    CDF     1 - sum_i |[P_i-1, P_i) and [Q_i-1, Q_i)|, of the cumulative probabilities P and Q
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

import strobe
from strobe import LLM, SamplingParams
from strobe.config import DEMO_MODELS
from strobe.tools.demo_comparison import choose_examples, prompts_of

Floats = NDArray[np.float64]


def weights(logits: Tensor, temperature: float) -> Floats:
    """Return the weights of an exponential race, [R, V], rounded as in `sampler.sample_rows`."""
    scale = torch.tensor(temperature).reciprocal()
    scores = (logits - logits.amax(-1, keepdim=True)) * scale
    weights = scores.double().exp()
    return (weights / weights.sum(-1, keepdim=True)).numpy()


def race_flips(p: Floats, q: Floats) -> Floats:
    """Return the probability that the race's token differs, [R]. Sorted by q_j / p_j, the maximum
    is the first ratio up to a point and the second after it."""
    order = np.argsort(q / p, axis=1, kind="stable")
    p, q = np.take_along_axis(p, order, 1), np.take_along_axis(q, order, 1)
    below = p.cumsum(1)
    above = q[:, ::-1].cumsum(1)[:, ::-1] - q
    return 1 - (1 / (below / p + above / q)).sum(1)


def cdf_flips(logits: Tensor, other_logits: Tensor, temperature: float) -> Floats:
    """Return the probability that the inverse CDF's token differs, [R], rounded as in the former
    sampler: softmax in fp32, cumulative sums in fp64."""
    ends = []
    for each_logits in (logits, other_logits):
        cumulated = (each_logits / temperature).softmax(-1).cumsum(-1, dtype=torch.float64).numpy()
        ends.append(cumulated / cumulated[:, -1:])
    upper = np.minimum(*ends)
    lower = np.pad(np.maximum(*ends), ((0, 0), (1, 0)))[:, :-1]
    return 1 - np.maximum(upper - lower, 0).sum(1)


@torch.inference_mode()
def both_ways(model: Any, prompt: list[int], answer: list[int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the logits [R, V] of the answer's rows, computed in two ways, by comparison."""
    ids = torch.tensor([[*prompt, *answer]])
    hidden = model.model(ids).last_hidden_state[0, len(prompt) - 1 : -1]
    head = model.lm_head.weight
    batched = hidden @ head.T
    pairs = {"head": (batched, hidden.flip(-1) @ head.flip(-1).T)}
    out = model.model(ids[:, : len(prompt)], use_cache=True)
    rows = [out.last_hidden_state[0, -1:] @ head.T]
    for token in answer[:-1]:
        out = model.model(
            torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True
        )
        rows.append(out.last_hidden_state[0] @ head.T)
    return pairs | {"model": (batched, torch.cat(rows))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 2.0])
    options = parser.parse_args()
    print(
        f"{datetime.date.today()}, {platform.machine()} {platform.processor()}, {os.cpu_count()} "
        f"cores, strobe {strobe.__version__}, torch {torch.__version__}, numpy {np.__version__}"
    )
    llm = LLM(method="none", device="cpu")
    prompts = prompts_of(llm, choose_examples(options.prompts))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODELS / "target", dtype=torch.float32)
    for temperature in options.temperatures:
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=options.tokens)
        flips: dict[str, list[tuple[Floats, Floats]]] = {"head": [], "model": []}
        for output in llm.generate(prompts, params):
            answer = output.outputs[0].token_ids
            pairs = both_ways(model, list(output.prompt_token_ids), list(answer))
            for name, (first_logits, second_logits) in pairs.items():
                race = race_flips(
                    weights(first_logits, temperature), weights(second_logits, temperature)
                )
                flips[name].append((race, cdf_flips(first_logits, second_logits, temperature)))
        for name, rows in flips.items():
            race, cdf = (np.concatenate(column) for column in zip(*rows, strict=True))
            print(
                f"temperature {temperature}, {name}: {len(race)} tokens; flips per token: race "
                f"{race.mean():.2e}, inverse CDF {cdf.mean():.2e}, {cdf.mean() / race.mean():.1f} "
                "times as many"
            )


if __name__ == "__main__":
    main()
