"""The demo target's own answers to its training prompts, in large batches on one GPU.

The target runs through Strobe's own module with a dense cache: every row of a batch is at the same
slot of the cache, prompts are padded on the left. GEMMs are fp32, keys and values bf16.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from training_data import conversation  # noqa: E402

from scripts.demo_models.tasks import Example  # noqa: E402
from strobe.models.model_config import TargetConfig  # noqa: E402
from strobe.models.target import Target  # noqa: E402
from strobe.tools.train.data import Sample  # noqa: E402

# N rows of a batch, P slots of the prompt, S slots in all, Hq / Hkv heads, D head size.


class DenseCache:
    """An `Attend` over keys and values [L, N, Hkv, S, D] of N rows that advance together.

    filled: number of filled slots; padding [N]: empty slots at each row's start.
    """

    def __init__(self, config: TargetConfig, padding: Tensor, slots: int):
        decoder = config.decoder
        shape = (decoder.num_layers, len(padding), decoder.num_kv_heads, slots, decoder.head_dim)
        self.keys = torch.zeros(shape, device=padding.device, dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)
        self.padding, self.filled = padding, 0
        self._mask: Tensor | None = None

    def open(self, rows: int) -> None:
        """Prepare `rows` more slots of every row; the mask of a prefill is causal."""
        key = torch.arange(self.filled + rows, device=self.padding.device)
        query = torch.arange(self.filled, self.filled + rows, device=self.padding.device)
        visible = (key >= self.padding[:, None])[:, None] & (key <= query[:, None])
        self._mask = (visible | (key == query[:, None]))[:, None]  # padding sees itself
        self.filled += rows

    def keep(self, rows: Tensor) -> None:
        """Drop all other rows."""
        self.padding = self.padding[rows]
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        count, dtype = len(self.padding), q.dtype
        q, k, v = (
            x.to(self.keys.dtype).view(count, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)
        )
        rows, groups = q.shape[2], q.shape[1] // k.shape[1]
        start, end = self.filled - rows, self.filled
        self.keys[layer, :, :, start:end], self.values[layer, :, :, start:end] = k, v
        k, v = self.keys[layer, :, :, :end], self.values[layer, :, :, :end]
        if rows == 1:  # the query heads of a group are rows of one GEMM
            out = F.scaled_dot_product_attention(
                q.unflatten(1, (-1, groups)).squeeze(3), k, v, attn_mask=self._mask
            ).flatten(1, 2)[:, :, None]
        else:
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)
        return out.transpose(1, 2).reshape(count * rows, -1).to(dtype)


def sample(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Choose tokens [N] from logits [N, V]: the argmax at temperature 0, else a Gumbel sample."""
    noise = torch.empty_like(logits).exponential_(generator=generator).log_()
    return (logits - temperature[:, None] * noise).argmax(-1)


@torch.inference_mode()
def answer(
    target: Target,
    prompts: list[list[int]],
    temperatures: list[float],
    *,
    max_tokens: int,
    seed: int,
) -> list[list[int]]:
    """Answer one batch of prompts; each answer ends with its end token or after max_tokens."""
    device = target.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    length = max(map(len, prompts))
    padding = torch.tensor([length - len(p) for p in prompts], device=device)
    ids = torch.tensor([[0] * (length - len(p)) + p for p in prompts], device=device)
    temperature = torch.tensor(temperatures, device=device)
    ends = torch.tensor(target.config.eos_ids, device=device)
    cache = DenseCache(target.config, padding, length + max_tokens)
    rows = torch.arange(len(prompts), device=device)
    output_ids = torch.zeros(len(prompts), max_tokens, dtype=torch.int64, device=device)
    done = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    cache.open(length)
    positions = (torch.arange(length, device=device) - padding[:, None]).clamp(min=0)
    hidden, _ = target(ids.flatten(), positions.flatten(), cache)
    hidden = hidden.view(len(prompts), length, -1)[:, -1]
    for step in range(max_tokens):
        tokens = sample(target.head(hidden), temperature, generator)
        output_ids[rows, step] = tokens.where(~done, -1)
        done |= torch.isin(tokens, ends)
        if step % 16 == 15:
            left = (~done).nonzero()[:, 0]
            if not len(left):
                break
            if len(left) < 0.8 * len(done):
                cache.keep(left)
                rows, tokens, done = rows[left], tokens[left], done[left]
                temperature = temperature[left]
        cache.open(1)
        hidden, _ = target(tokens, cache.filled - 1 - cache.padding, cache)
    results: list[list[int]] = []
    stops = set(target.config.eos_ids)
    for row in output_ids.tolist():
        end = next((i for i, token in enumerate(row) if token in stops), max_tokens - 1)
        results.append(row[: end + 1])
    return results


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the expected length of the answer (the reference answer's length)."""

    ids: list[int]
    guess: int


def render(tokenizer: Any, messages: Any, tools: Any, thinking: bool) -> list[int]:
    """Render the prompt of a chat as the server does."""
    text = tokenizer.apply_chat_template(
        list(messages),
        tools=list(tools) or None,
        add_generation_prompt=True,
        enable_thinking=thinking,
        tokenize=False,
    )
    return tokenizer.encode(text, add_special_tokens=False)


def example_prompt(tokenizer: Any, example: Example) -> list[int]:
    """Render the prompt of one task."""
    return render(tokenizer, example.messages, example.tools, example.thinking)


def _share(work: tuple[str, str, int]) -> list[Prompt]:
    from transformers import AutoTokenizer

    seed, folder, count = work
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng = random.Random(seed)
    prompts: list[Prompt] = []
    for _ in range(count):
        messages, tools, thinking = conversation(rng)
        last = messages[-1]
        text = str(last.get("reasoning_content", "")) + str(last["content"])
        guess = len(tokenizer.encode(text, add_special_tokens=False))
        prompts.append(Prompt(render(tokenizer, messages[:-1], tools, thinking), guess))
    return prompts


def training_prompts(folder: Path, count: int, *, seed: int, workers: int) -> list[Prompt]:
    """Return training prompts in both thinking modes, determined by `seed` and `workers`."""
    share = -(-count // workers)
    work = [(f"draft {seed} {i}", str(folder), share) for i in range(workers)]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        return [prompt for part in pool.map(_share, work) for prompt in part]


def training_samples(
    target: Target, prompts: list[Prompt], *, max_tokens: int, batch: int, seed: int
) -> list[Sample]:
    """Return the target's answers: two in three greedy, the others at temperature 0.7 or 1."""
    rng = random.Random(seed)
    # Batches of similar prompt and answer lengths: little padding, few idle rows.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i].ids) // 64, prompts[i].guess))
    samples: list[Sample] = []
    for start in range(0, len(order), batch):
        part = [prompts[i].ids for i in order[start : start + batch]]
        temperatures = [rng.choice((0.0, 0.0, 0.0, 0.0, 0.7, 1.0)) for _ in part]
        output_ids = answer(target, part, temperatures, max_tokens=max_tokens, seed=seed + start)
        samples += [Sample.of(p, a) for p, a in zip(part, output_ids, strict=True) if len(a) > 1]
    return samples
