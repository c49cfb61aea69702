"""Shapes of a model's GEMMs and of its experts, for tune_kernels.py.

target, draft: directories, or the name of published shapes as the target. ranks: the shapes of one
rank of so many.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from strobe.models import weight_loading
from strobe.models.architectures import load_draft_config, load_target_config, make_target
from strobe.models.families.experts import Experts
from strobe.models.linear import Linear, LinearView
from strobe.models.model_config import DraftConfig
from strobe.models.quantization.kernel_weights import join_all
from strobe.models.target import Target
from strobe.parallel.split import Split
from strobe.tools.bench import published_shapes

_ADDED = ("o_proj", "out_proj", "down_proj")
"""Layers whose outputs are added to the residual stream."""


class ExpertsShape(NamedTuple):
    """inner: their inner size; top_k: experts per row; gate: its name; bias: whether they have
    biases."""

    name: str
    count: int
    hidden: int
    inner: int
    top_k: int
    gate: str
    bias: bool


def gemm_shapes(target: str, draft: str | None = None, ranks: int = 1) -> list[str]:
    """Return the shapes of linear layers and heads as tune_kernels.py takes them: "NxK:fusion"."""
    with _rank_models(target, draft, ranks) as (model, config):
        join_all(model)
        names = _shapes(model, ranks)
        vocabulary, hidden = model.output.weight.shape
        names += [f"{vocabulary}x{hidden}:argmax", f"{vocabulary}x{hidden}"]
        if config is not None:
            drafter = weight_loading._meta_draft(
                Path(),
                config,
                1,
                None,
                embedding=model.embed_tokens.weight,
                head=model.output.weight,
            )
            names += _shapes(drafter, ranks)
            layers = map(config.decoder.shape_of, range(config.decoder.num_layers))
            context = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
            names.append(f"{context}x{config.decoder.hidden_size}")
    return list(dict.fromkeys(names))


def experts_shape(target: str, ranks: int = 1) -> ExpertsShape:
    """Return the shape of a layer's experts. Raises ValueError if the target has none."""
    with _rank_models(target, None, ranks) as (model, _):
        for layer in (module for module in model.modules() if isinstance(module, Experts)):
            shape = model.config.decoder.experts
            assert shape is not None
            hidden, bias = layer.down_proj.out_features, layer.gate_up_proj.bias is not None
            sizes = layer.count, hidden, layer.size, shape.top_k
            return ExpertsShape(target, *sizes, layer.gate.name, bias)
    raise ValueError(f"{target} has no experts; leave out `experts`.")


@contextmanager
def _rank_models(
    target: str, draft: str | None, ranks: int
) -> Generator[tuple[Target, DraftConfig | None]]:
    """Yield a rank's target without weights, and the config of its drafter."""
    if target in published_shapes.NAMES:
        with published_shapes.directories(target) as (target, draft):
            with _rank_models(target, draft, ranks) as models:
                yield models
            return
    config = draft and load_draft_config(Path(draft))
    split = Split(0, ranks, ranks)
    target_part, draft_part = split.split(load_target_config(Path(target)), config or None)
    with torch.device("meta"):
        model = make_target(target_part, max_positions=1)
    yield model, draft_part


def _shapes(model: nn.Module, ranks: int) -> list[str]:
    """Return the shapes of layers other than experts and heads; joined ones only together."""
    added = _ADDED if ranks == 1 else ()  # ranks add up their outputs first
    joined = [view for module in model.modules() for view in _views(module)]
    parts = {_storage(view.weight) for view in joined}
    names = [_name("", view.weight) for view in joined if view.weight.ndim == 2]
    for path, module in model.named_modules():
        router = getattr(module, "linear", None)
        if isinstance(router, LinearView):
            names.append(_name("", router.weight))
        elif isinstance(module, Linear) and not path.endswith("lm_head"):
            weight = module.weight
            if weight.ndim == 2 and _storage(weight) not in parts:
                names.append(_name(path.rpartition(".")[2], weight, added))
    return names


def _views(module: nn.Module) -> list[LinearView]:
    """Return what `JoinsLinears.join` has made."""
    joined = getattr(module, "joined", None)
    return [joined] if isinstance(joined, LinearView) else list(joined or ())


def _storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage()._cdata


def _name(layer: str, weight: torch.Tensor, added: tuple[str, ...] = ()) -> str:
    fusion = ":residual" if layer in added else ":gated" if layer == "gate_up_proj" else ""
    return f"{weight.shape[0]}x{weight.shape[1]}{fusion}"
