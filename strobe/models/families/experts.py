"""Experts: rows that each go through a few of many MLPs, as grouped GEMMs.

Legend: T rows, H hidden size, E experts of inner size I, each row routed to k of them, P = T k
pairs of a row and an expert, sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.models.config import ExpertShape
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.modules import RMSNorm
from strobe.models.ops.torch_ops import Residual, TorchOps
from strobe.models.weight_mapping import WeightMapping, WeightPart

GATHERED = 1 << 26
"""Weights that a GEMM over gathered blocks holds at once."""

Activate = Callable[[Tensor], Tensor]
"""[..., 2 I] as the first GEMM leaves it -> [..., I]."""


def read_counts(
    fields: Fields,
    count: int | None = None,
    top_k: int | None = None,
    *,
    called: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a row is routed to, which is `called` so;
    count, top_k: where config.json names none. Raises ValueError."""
    count = fields.integer("num_experts", fields.get("num_local_experts", count))
    fields.only("num_local_experts", count, why="it must be num_experts'.")
    top_k = fields.integer(called, top_k)
    if top_k > count:
        raise ValueError(
            f"{fields.path}: {called} is {top_k}, but there are {count} experts; {HINT}"
        )
    return count, top_k


def gated_silu(x: Tensor) -> Tensor:
    """silu(gate) * up, the gates before the ups."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class Router(nn.Module):
    """Which experts a row is routed to, and what each of their results weighs."""

    def __init__(self, hidden_size: int, shape: ExpertShape, *, bias: bool = False):
        super().__init__()
        self.top_k, self.normalized = shape.top_k, shape.normalized
        self.weight = nn.Parameter(torch.empty(shape.count, hidden_size))
        self.bias = nn.Parameter(torch.empty(shape.count)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> weights [T, k] in x's dtype, experts [T, k].

        The largest k of softmax(logits); divided by their sum where the shape says `normalized`,
        which is the softmax over the k largest logits.
        """
        logits = F.linear(x, self.weight, self.bias).float()
        top, experts = logits.topk(self.top_k, dim=-1)
        among = top if self.normalized else logits
        weights = torch.exp(top - among.logsumexp(-1, keepdim=True))
        return weights.to(x.dtype), experts


class Experts(nn.Module):
    """All experts' weights, and their grouped GEMMs in plain torch."""

    def __init__(
        self,
        hidden_size: int,
        shape: ExpertShape,
        activate: Activate = gated_silu,
        *,
        bias: bool = False,
    ):
        super().__init__()
        count, size = shape.count, shape.moe_intermediate_size
        self.activate = activate
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(count, hidden_size, size))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(count, 2 * size)) if bias else None
        self.down_proj_bias = nn.Parameter(torch.empty(count, hidden_size)) if bias else None

    def weight_mapping(self) -> WeightMapping:
        """Most checkpoints have three linear layers of each expert."""
        count, gate_up_size, hidden = self.gate_up_proj.shape
        mapping: WeightMapping = {"gate_up_proj": [], "down_proj": []}
        for e in range(count):
            for i, name in enumerate(("gate_proj", "up_proj")):
                target = e, slice(i * gate_up_size // 2, (i + 1) * gate_up_size // 2)
                mapping["gate_up_proj"].append(
                    WeightPart({f"{e}.{name}.weight": (gate_up_size // 2, hidden)}, target)
                )
            mapping["down_proj"].append(
                WeightPart({f"{e}.down_proj.weight": (hidden, gate_up_size // 2)}, (e,))
            )
        return mapping

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, residual: Tensor) -> Tensor:
        """x, residual [T, H], weights and experts [T, k] -> residual + the weighted results."""
        rows, top_k = experts.shape
        of_pair, order = experts.flatten().sort(stable=True)
        every = torch.arange(self.gate_up_proj.shape[0], device=x.device)
        ends = torch.searchsorted(of_pair, every, right=True, out_int32=True)
        inner = grouped_gemm(x.index_select(0, order // top_k), self.gate_up_proj, ends)
        if self.gate_up_proj_bias is not None:
            inner = inner + self.gate_up_proj_bias.index_select(0, of_pair)
        pairs = grouped_gemm(self.activate(inner), self.down_proj, ends)
        if self.down_proj_bias is not None:
            pairs = pairs + self.down_proj_bias.index_select(0, of_pair)
        # Back in the rows' order, so that each row adds up its own results, always alike.
        expert_outputs = torch.empty_like(pairs).index_copy_(0, order, pairs).view(rows, top_k, -1)
        return torch.baddbmm(residual[:, None], weights[:, None], expert_outputs)[:, 0]


class SparseMLP(nn.Module):
    """A router and its experts, in the place of an MLP. called: the router's name in a
    checkpoint."""

    def __init__(self, router: Router, experts: Experts, *, called: str = "router"):
        super().__init__()
        self.router, self.experts, self.called = router, experts, called

    def weight_mapping(self) -> WeightMapping:
        return {
            f"router.{name}": [WeightPart({f"{self.called}.{name}": tuple(parameter.shape)})]
            for name, parameter in self.router.named_parameters()
        }

    def forward(self, ops: TorchOps, x: Residual, norm: RMSNorm) -> None:
        rows = ops.norm(x.value, norm)
        x.value = ops.experts(rows, self.router(rows), self.experts, x.value)


def grouped_gemm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """x [P, K], weights [E, N, K] -> [P, N]: rows ends[e - 1] .. ends[e] times weights[e].

    ends [E] int32, on x's device: nothing is asked of the host on a GPU.
    """
    if _has_grouped(x):
        return F.grouped_mm(x, weights.transpose(1, 2), offs=ends)
    return blocked_gemm(x, weights, ends)


def _has_grouped(x: Tensor) -> bool:
    """Whether torch has a grouped GEMM that suits: on a GPU its own is one for bfloat16 on
    compute capability 9.0 and 10.x, and elsewhere a loop that waits for the device."""
    if x.shape[1] * x.element_size() % 16:  # rows must begin at such addresses
        return False
    if x.device.type != "cuda":
        return x.device.type == "cpu"
    capability = torch.cuda.get_device_capability(x.device)
    return x.dtype == torch.bfloat16 and capability[0] in (9, 10)


def blocked_gemm(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`grouped_gemm` in operations that every device and dtype has: rows laid out in blocks that
    belong to one expert each, the last of an expert's filled up, times gathered weights.

    There are at most as many blocks as rows, and at most P / B + E (B - 1) / B of B rows each,
    which the host knows without asking for `ends`.
    """
    rows, count = x.shape[0], weights.shape[0]
    size = block_rows(rows, count)
    number = min(rows, (rows + count * (size - 1)) // size)
    ends = ends.long()
    begins = F.pad(ends, (1, 0))[:-1]
    last = torch.cumsum((ends - begins + size - 1) // size, 0)  # block behind an expert's
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
    return torch.cat(parts).flatten(0, 1).index_select(0, place)


def _split(cells: Tensor, expert: Tensor, step: int) -> Iterable[tuple[Tensor, Tensor]]:
    return zip(cells.split(step), expert.split(step), strict=True)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block: about as many as an expert has, a power of two up to 64."""
    size = 1
    while size < 64 and 2 * size * experts <= rows:
        size *= 2
    return size
