"""Shapes of a model's GEMMs, for tune_kernels.py."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn

from strobe.models import load
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.linear import Linear, LinearView
from strobe.models.quantization.kernel_weights import join_all
from strobe.tools.bench import published_shapes

_ADDED = ("o_proj", "out_proj", "down_proj")
"""Layers whose outputs are added to the residual stream."""


def gemm_shapes(target: str, draft: str | None = None) -> list[str]:
    """Return the shapes of the linear layers and heads of a directory's target and drafter, or of
    published shapes with a name, as tune_kernels.py takes them: "NxK:fusion"."""
    with ExitStack() as stack:
        if target in published_shapes.NAMES:
            target, draft = stack.enter_context(published_shapes.directories(target))
        model = load._meta_target(load_target_config(Path(target)), 1)
        join_all(model)
        names = _shapes(model)
        vocabulary, hidden = model.output.weight.shape
        names += [f"{vocabulary}x{hidden}:argmax", f"{vocabulary}x{hidden}"]
        if draft is not None:
            shared = model.embed_tokens.weight, model.output.weight
            config = load_draft_config(Path(draft))
            drafter = load._meta_draft(Path(draft), config, 1, shared, None)
            names += _shapes(drafter)
            layers = map(config.decoder.shape_of, range(config.decoder.num_layers))
            context = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
            names.append(f"{context}x{config.decoder.hidden_size}")
    return list(dict.fromkeys(names))


def _shapes(model: nn.Module) -> list[str]:
    """Return the shapes of layers other than experts and heads; joined ones only together."""
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
                names.append(_name(path.rpartition(".")[2], weight))
    return names


def _views(module: nn.Module) -> list[LinearView]:
    """Return what `JoinsLinears.join` has made."""
    joined = getattr(module, "joined", None)
    return [joined] if isinstance(joined, LinearView) else list(joined or ())


def _storage(weight: torch.Tensor) -> int:
    return weight.untyped_storage()._cdata


def _name(layer: str, weight: torch.Tensor) -> str:
    fusion = ":residual" if layer in _ADDED else ":gated" if layer == "gate_up_proj" else ""
    return f"{weight.shape[0]}x{weight.shape[1]}{fusion}"
