"""Even routing: every row's experts drawn uniformly, instead of by random weights, which prefer
some experts and read fewer of them than a trained model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from strobe.models.families.experts import Router
from strobe.models.families.gemma4 import Gemma4Router
from strobe.models.model_config import DecoderConfig
from strobe.models.ops.torch_ops import TorchOps

_SHIFT = 131
"""Rows of the table by which a layer's draw is shifted from the previous layer's."""


def check_experts(decoder: DecoderConfig) -> None:
    """Raise ValueError if the model has no experts to route to."""
    if decoder.experts is None:
        raise ValueError(
            "routing is 'even', but these shapes have no experts; leave routing out, or name "
            "shapes with experts."
        )


def route_evenly(model: nn.Module, max_rows: int) -> None:
    """Replace the logits of all routers by seeded noise, which depends on the layer and on the
    row's place in the batch. A router still computes its own logits, for their cost."""
    routers = [layer for layer in model.modules() if isinstance(layer, Router | Gemma4Router)]
    count = len(routers)
    size = routers[0].linear.weight.shape[0]
    noise = torch.Generator().manual_seed(0)
    draw = torch.randn(max_rows + _SHIFT * count, size, generator=noise)
    draw = draw.to(routers[0].weight)
    for layer, router in enumerate(routers):
        router.logits = _EvenLogits(router, draw[layer * _SHIFT :])


class _EvenLogits:
    def __init__(self, router: Router | Gemma4Router, draw: Tensor):
        self.own = router.logits
        self.draw = draw

    def __call__(self, ops: TorchOps, x: Tensor) -> Tensor:
        rows, columns = self.own(ops, x).shape
        return self.draw[:rows, :columns]
