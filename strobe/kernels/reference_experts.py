"""Experts as grouped GEMMs, in plain torch.

Legend: T rows, H hidden size, E experts of inner size I, each row routed to k of them, P = T k
pairs of a row and an expert, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GATHERED = 1 << 26
"""Weights that a GEMM over gathered blocks holds at once."""


class Format(Protocol):
    """How weights are stored that are dequantized for each use."""

    def dequantize(self, values: Tensor, scale: Tensor) -> Tensor: ...


class DequantizedExperts(Protocol):
    """Weights [E, N, K] that are dequantized some experts at a time."""

    @property
    def shape(self) -> tuple[int, int, int]: ...

    def dense_experts(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Return the weights of experts first to last - 1 in dtype."""
        ...


class Linear(Protocol):
    """The experts' weights [E, N, K] and biases [E, N]. scale, format: of quantized weights.
    held_experts: weights that stay as stored; then `weight` is [E, 0, 0]."""

    @property
    def weight(self) -> Tensor: ...
    @property
    def bias(self) -> Tensor | None: ...
    @property
    def scale(self) -> Tensor | None: ...
    @property
    def format(self) -> Format | None: ...
    @property
    def held_experts(self) -> DequantizedExperts | None: ...


class Routing(NamedTuple):
    """How logits choose the top_k experts of each row. Their weights are the softmax over the
    chosen logits if `normalized`, otherwise over all, times scale [E] of the experts. held: first
    and number of the experts at hand, if not all; the others add nothing to a row. shared: one more
    expert, which all rows choose; its weight is the sigmoid of the last logit."""

    top_k: int
    normalized: bool = True
    scale: Tensor | None = None
    held: tuple[int, int] | None = None
    shared: bool = False


class Gate(NamedTuple):
    """Of the outputs of gate and up. clamped: gpt-oss's; gate and up outputs take turns, gates are
    at most `limit`, ups within [-limit, limit]."""

    name: Literal["silu", "gelu_tanh", "clamped"]
    limit: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., 2 I] -> [..., I]."""
        if self.name == "clamped":
            return clamped_swiglu(x, ALPHA, self.limit)
        return gated(_FUNCTIONS[self.name], x)


ALPHA = 1.702
"""Slope of the clamped activation's sigmoid."""
_FUNCTIONS = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def gated(activation: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """x [..., 2 I], gate outputs and then up outputs -> activation(gate) * up."""
    gate, up = x.chunk(2, -1)
    return activation(gate) * up


def clamped_swiglu(x: Tensor, alpha: float, limit: float) -> Tensor:
    """x [..., 2 I], gate and up values interleaved -> (up + 1) gate sigmoid(alpha gate). Gates are
    clamped to at most `limit`, ups to [-limit, limit] (gpt-oss model card, arXiv 2508.10925)."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def route(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> weights [T, k] in the logits' dtype, experts [T, k]; with a shared expert,
    logits [T, E + 1] -> [T, k + 1].

    Normalized weights, divided by their sum, equal the softmax over the k largest logits. Experts
    are numbered from the first at hand; all others have the number after the last.
    """
    values = logits.float()
    if routing.shared:
        weights, ids = route(logits[:, :-1], routing._replace(shared=False))
        share = values[:, -1:].sigmoid()
        last = logits.shape[1] - 1
        return torch.cat([weights, share.to(weights)], 1), F.pad(ids, (0, 1), value=last)
    top, ids = values.topk(routing.top_k, dim=-1)
    normalizer = top if routing.normalized else values
    weights = torch.exp(top - normalizer.logsumexp(-1, keepdim=True))
    if routing.scale is not None:
        weights = weights * routing.scale.index_select(0, ids.flatten()).view_as(weights)
    if routing.held is not None:
        first, count = routing.held
        ids = ids - first
        ids.masked_fill_((ids < 0) | (ids >= count), count)
    return weights.to(logits.dtype), ids


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Linear,
    down: Linear,
    activate: Callable[[Tensor], Tensor],
    residual: Tensor | None,
    *,
    complete: bool = True,
) -> Tensor:
    """x, residual [T, H] or None for 0, weights and expert ids [T, k] -> residual + the weighted
    outputs of each row's experts, down(activate(gate_up(x))). complete: whether all ids are below
    E."""
    of_pair, order = ids.flatten().sort(stable=True)
    every = torch.arange(gate_up.weight.shape[0], device=x.device)
    ends = torch.searchsorted(of_pair, every, right=True, out_int32=True)
    inner = _linear(x.index_select(0, order // ids.shape[1]), gate_up, of_pair, ends)
    pairs = _linear(activate(inner), down, of_pair, ends)
    # Back in the rows' order, so that each row always adds up its own results in the same order.
    outputs = torch.empty_like(pairs).index_copy_(0, order, pairs).view(*ids.shape, -1)
    if not complete:
        outputs.masked_fill_((ids == every.shape[0])[..., None], 0)
    if residual is None:
        return torch.bmm(weights[:, None], outputs)[:, 0]
    return torch.baddbmm(residual[:, None], weights[:, None], outputs)[:, 0]


def _linear(x: Tensor, linear: Linear, of_pair: Tensor, ends: Tensor) -> Tensor:
    dequantize = _dequantize(linear, x.dtype)
    if dequantize is None:
        y = grouped_gemm(x, linear.weight, ends)
    else:
        shape = linear.weight.shape if linear.held_experts is None else linear.held_experts.shape
        y = _dequantized_gemm(x, (shape[0], shape[1], x.shape[1]), dequantize, ends)
    if linear.bias is None:
        return y
    return y + linear.bias.index_select(0, of_pair.clamp(max=linear.bias.shape[0] - 1))


def _dequantize(linear: Linear, dtype: torch.dtype) -> Callable[[int, int], Tensor] | None:
    """Return what dequantizes experts first to last - 1; None if weights are not quantized."""
    held = linear.held_experts
    if held is not None:
        return partial(held.dense_experts, dtype=dtype)
    stored = linear.format
    scale = linear.scale
    if stored is None or scale is None:
        return None
    return lambda first, last: stored.dequantize(linear.weight[first:last], scale[first:last]).to(
        dtype
    )


def _dequantized_gemm(
    x: Tensor,
    shape: tuple[int, int, int],
    dequantize: Callable[[int, int], Tensor],
    ends: Tensor,
) -> Tensor:
    """`grouped_gemm` of quantized weights [E, N, K]. A few experts are dequantized at a time, so
    that memory never holds them all; on a CPU one at a time, if a row chose it."""
    count, outputs, inputs = shape
    on_cpu = x.device.type == "cpu"
    begins = F.pad(ends, (1, 0))
    step = 1 if on_cpu else max(GATHERED // (outputs * inputs), 1)
    rows = torch.arange(x.shape[0], device=x.device)
    y = x.new_zeros(x.shape[0], outputs)
    for first in range(0, count, step):
        last = min(first + step, count)
        begin = begins[first]
        end = ends[last - 1]
        if on_cpu and begin == end:
            continue
        # The rows of these experts first, so that no value of `ends` is needed on the host.
        turned = x.index_select(0, (rows + begin) % x.shape[0])
        product = grouped_gemm(turned, dequantize(first, last), ends[first:last] - begin)
        product = product.index_select(0, (rows - begin) % x.shape[0])
        inside = ((rows >= begin) & (rows < end))[:, None]
        y = torch.where(inside, product, y)
    return y


def grouped_gemm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [P, K], weights [E, N, K] -> [P, N]: rows ends[e - 1] .. ends[e] times weights[e]; rows
    past the last end may be anything.

    ends [E] int32, on x's device, so that a GPU does not wait for the host.
    """
    if has_grouped(x):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return blocked_gemm(x, weights, ends)


def has_grouped(x: Tensor) -> bool:
    """Whether torch's grouped GEMM serves: on a GPU it is a kernel for bfloat16 on compute
    capability 9.0 and 10.x, and otherwise a loop that waits for the device."""
    if x.shape[1] * x.element_size() % 16:  # rows must be aligned to 16 bytes
        return False
    if x.device.type != "cuda":
        return x.device.type == "cpu"
    capability = torch.cuda.get_device_capability(x.device)
    return x.dtype == torch.bfloat16 and capability[0] in (9, 10)


def blocked_gemm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`grouped_gemm` by operations that every device and dtype has: rows in blocks of one expert
    each, each expert's last block padded, times gathered weights.

    The number of blocks is bounded by the rows and by P / B + E (B - 1) / B, for blocks of B
    rows, so the host needs no value of `ends`.
    """
    rows = x.shape[0]
    count = weights.shape[0]
    size = block_rows(rows, count)
    number = min(rows, (rows + count * (size - 1)) // size)
    ends = ends.long()
    begins = F.pad(ends, (1, 0))[:-1]
    last = torch.cumsum((ends - begins + size - 1) // size, 0)  # the block after each expert's
    first = F.pad(last, (1, 0))[:-1]
    blocks = torch.arange(number, device=x.device)
    expert = torch.searchsorted(last, blocks, right=True).clamp(max=count - 1)
    start = begins[expert] + (blocks - first[expert]) * size
    cells = (start[:, None] + torch.arange(size, device=x.device)).clamp(max=rows - 1)
    step = max(GATHERED // (weights.shape[1] * weights.shape[2]), 1)
    parts = [
        torch.bmm(x[row_slice], weights[expert_slice].transpose(1, 2))
        for row_slice, expert_slice in _split(cells, expert, step)
    ]
    row = torch.arange(rows, device=x.device)
    owner = torch.searchsorted(ends, row, right=True).clamp(max=count - 1)
    place = first[owner] * size + row - begins[owner]
    places = torch.cat(parts).flatten(0, 1)
    return places.index_select(0, place.clamp(max=places.shape[0] - 1))


def _split(cells: Tensor, expert: Tensor, step: int) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(cells.split(step), expert.split(step), strict=True)


def block_rows(rows: int, experts: int) -> int:
    """Return the rows of a block: an expert's average, as a power of two up to 64."""
    size = 1
    while size < 64 and 2 * size * experts <= rows:
        size *= 2
    return size
