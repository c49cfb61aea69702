"""Mixtures of experts: each row passes through a few of many MLPs.

Legend: T rows, H hidden size, E experts of inner size I, k experts per row.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strobe.kernels.reference_experts import Gate, Routing
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.linear import Linear, LinearView
from strobe.models.model_config import ExpertShape
from strobe.models.modules import RMSNorm
from strobe.models.ops.torch_ops import ExpertsLayer, ForwardRows, Residual, TorchOps
from strobe.models.weight_mapping import WeightMapping, WeightPart


def read_counts(
    fields: Fields,
    count: int | None = None,
    top_k: int | None = None,
    *,
    called: str = "num_experts_per_tok",
) -> tuple[int, int]:
    """Return the number of experts per layer and per row. count, top_k: defaults. called: the key
    of the latter. Raises ValueError."""
    count = fields.integer("num_experts", fields.get("num_local_experts", count))
    fields.only("num_local_experts", count, why="it must be num_experts'.")
    top_k = fields.integer(called, top_k)
    if top_k > count:
        raise ValueError(
            f"{fields.path}: {called} is {top_k}, but there are {count} experts; {HINT}"
        )
    return count, top_k


SILU = Gate("silu")


class Router(nn.Module):
    """Chooses the experts of each row and the weights of their outputs. joined: with an output for
    a shared expert, and then outputs that nobody reads."""

    def __init__(self, hidden_size: int, shape: ExpertShape, *, bias: bool = False):
        super().__init__()
        self.top_k = shape.top_k
        self.normalized = shape.normalized
        self.weight = nn.Parameter(torch.empty(shape.count, hidden_size))
        self.bias = nn.Parameter(torch.empty(shape.count)) if bias else None
        self.joined: LinearView | None = None

    @property
    def linear(self) -> LinearView:
        return self.joined or LinearView(weight=self.weight, bias=self.bias)

    @property
    def routing(self) -> Routing:
        return Routing(top_k=self.top_k, normalized=self.normalized, shared=self.joined is not None)

    def logits(self, ops: TorchOps, x: Tensor) -> Tensor:
        """x [T, H] -> [T, E], or [T, E + 1] with a shared expert."""
        return ops.linear(x, self.linear)[:, : self.weight.shape[0] + 1]


class Experts(nn.Module):
    """The experts of a layer that the model holds, the `first` to `first + count`."""

    def __init__(
        self,
        hidden_size: int,
        shape: ExpertShape,
        gate: Gate = SILU,
        *,
        bias: bool = False,
    ):
        super().__init__()
        self.size = shape.moe_intermediate_size
        self.gate = gate
        self.held = shape.held
        self.first, self.count = shape.held or (0, shape.count)
        both = {"gate_proj": self.size, "up_proj": self.size}
        outputs = 2 * self.size if gate.name == "clamped" else both  # which take turns
        self.gate_up_proj = Linear(hidden_size, outputs, bias=bias, experts=self.count)
        self.down_proj = Linear(
            self.size,
            hidden_size,
            bias=bias,
            experts=self.count,
            split="inputs" if shape.held is None else "experts",
        )

    def layer(self, routing: Routing) -> ExpertsLayer:
        """Return what `ops.experts` reads."""
        routing = routing._replace(held=self.held)
        return ExpertsLayer(
            routing=routing,
            gate_up=self.gate_up_proj,
            down=self.down_proj,
            gate=self.gate,
        )

    def weight_mapping(self) -> WeightMapping:
        """Most checkpoints have three linear layers per expert. Biases are stacked."""
        size = self.size
        hidden = self.down_proj.out_features
        gate_up = list[WeightPart]()
        down = list[WeightPart]()
        for e in range(self.count):
            for first, name in ((0, "gate_proj"), (size, "up_proj")):
                sources = {f"{self.first + e}.{name}.weight": (size, hidden)}
                gate_up.append(WeightPart(sources=sources, at=(e, slice(first, first + size))))
            sources = {f"{self.first + e}.down_proj.weight": (hidden, size)}
            down.append(WeightPart(sources=sources, at=(e,)))
        biases = {"gate_up_proj": (self.count, 2 * size), "down_proj": (self.count, hidden)}
        stacked = {
            f"{name}.bias": [WeightPart(sources={f"{name}_bias": shape})]
            for name, shape in biases.items()
        }
        return {"gate_up_proj.weight": gate_up, "down_proj.weight": down, **stacked}


class SparseMLP(nn.Module):
    """A router and its experts, in place of an MLP. called: the router's name in checkpoints."""

    def __init__(self, router: Router, experts: Experts, *, called: str = "router"):
        super().__init__()
        self.router = router
        self.experts = experts
        self.called = called

    def weight_mapping(self) -> WeightMapping:
        shapes = {name: tuple(weight.shape) for name, weight in self.router.named_parameters()}
        return {
            f"router.{name}": [WeightPart(sources={f"{self.called}.{name}": shape})]
            for name, shape in shapes.items()
        }

    @property
    def layer(self) -> ExpertsLayer:
        return self.experts.layer(self.router.routing)

    def forward(self, ops: TorchOps, x: Residual, norm: RMSNorm, rows: ForwardRows) -> None:
        y = ops.norm(x.value, norm)
        x.value = ops.experts(y, self.router.logits(ops, y), self.layer, onto=x.value, rows=rows)
