"""Start a drafter from the weights of another one, which may have no head yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from strobe.models.config_readers import zlab
from strobe.models.config_readers.detection import DFLASH, Z_LAB, Dialect
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DecoderConfig, DraftConfig
from strobe.tools.train.draft import checkpoint_config, head_fields
from strobe.tools.train.edges import edges_of
from strobe.tools.train.train_settings import DraftShape


def continued_config(shape: DraftShape, start: DraftConfig) -> DraftConfig:
    """Return the config of a drafter that continues another's training: its shape, with the head
    and the MLPs' width of `shape`. Raises ValueError for another shape."""
    masks = start.decoder.masks
    windows = [mask.window for mask in masks if mask.window is not None]
    own = {
        "layers": start.decoder.num_layers,
        "block_size": start.block_size,
        "features": len(start.capture),
        "target_layer_ids": tuple(k - 1 for k in start.capture),
        "mask_token_id": start.mask_token_id,
        "sliding_layers": len(windows),
        "sliding_window": windows[0] if windows else shape.sliding_window,
    }
    usual = DraftShape()
    for name, value in own.items():
        wanted = getattr(shape, name)
        if wanted not in (value, getattr(usual, name)):
            raise ValueError(
                f"draft.{name} is {wanted}, but {value} in the drafter to start from; leave it out."
            )
    backbone = replace(
        start,
        method=DFLASH,
        head=None,
        format=Z_LAB,
        dtype="bfloat16",
        recommended_drafts=None,
    )
    dialect = Dialect(method=DFLASH, format=Z_LAB)
    if zlab.read(checkpoint_config(backbone, {}), Path("config.json"), dialect) != backbone:
        raise ValueError(
            "the drafter to start from has parts that training does not support, such as a "
            "vocabulary or an embedding scale of its own, sinks, or drafts from its anchor; start "
            "from another one, or from none."
        )
    size = shape.intermediate_size or start.decoder.intermediate_size
    if size > start.decoder.intermediate_size:
        raise ValueError(
            f"draft.intermediate_size is {size}, but the drafter to start from has only "
            f"{start.decoder.intermediate_size}; ask for at most that."
        )
    decoder = replace(start.decoder, intermediate_size=size)
    return replace(backbone, decoder=decoder, **head_fields(shape))


def start_from(draft: DFlash, start: DFlash) -> None:
    """Copy the weights of an earlier drafter, which may have no head yet, wider MLPs or longer
    vectors of tokens: then their strongest neurons and components are copied. Raises ValueError if
    the shapes do not fit."""
    method = start.config.method
    if method not in (DFLASH, draft.config.method):
        raise ValueError(
            f"the drafter to start from has a head for {method}, the new one is for "
            f"{draft.config.method}; ask for the same head."
        )
    weights = start.state_dict()
    size = draft.config.decoder.intermediate_size
    if size < start.config.decoder.intermediate_size:
        _narrow(weights, start.config.decoder, size)
    own_edges = edges_of(draft)
    edges = edges_of(start)
    if own_edges is not None and edges is not None and own_edges.rank < edges.rank:
        weights.update(_shorten(start, edges.strongest(own_edges.rank)))
    own = draft.state_dict()
    wrong = [k for k in own if k not in weights and not (method == DFLASH and _is_new(k))]
    wrong += [k for k, v in weights.items() if k not in own or own[k].shape != v.shape]
    if wrong:
        raise ValueError(
            f"the drafter to start from does not fit at {wrong[0]}; it must have the new one's "
            "layers and features, and no embedding or head of its own."
        )
    draft.load_state_dict(weights, strict=False)


def _is_new(name: str) -> bool:
    """Whether only drafters with a head other than DFlash's have the tensor."""
    return name.startswith("draft_head.") or "_conv." in name


def _narrow(weights: dict[str, Tensor], decoder: DecoderConfig, size: int) -> None:
    """Keep `size` neurons of each MLP: those with the largest product of the norms of their three
    vectors, in their order."""
    for layer in range(decoder.num_layers):
        name = f"layers.{layer}.mlp."
        gate, up = weights[f"{name}gate_up_proj.weight"].chunk(2)
        down = weights[f"{name}down_proj.weight"]
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = strength.topk(size).indices.sort().values
        weights[f"{name}gate_up_proj.weight"] = torch.cat([gate[kept], up[kept]])
        weights[f"{name}down_proj.weight"] = down[:, kept]


def _shorten(start: DFlash, kept: Tensor) -> dict[str, Tensor]:
    """Return the weights of the head with only these components of its vectors."""
    weights = dict[str, Tensor]()
    for name, parameter in start.draft_head.named_parameters():
        value = parameter.detach()
        if name.endswith("hidden_projection.weight"):
            value = value[kept]
        elif name.endswith("confidence_head.proj.weight"):
            rows = start.config.decoder.hidden_size
            value = torch.cat([value[:, :rows], value[:, rows:][:, kept]], 1)
        elif parameter.dim() == 2:
            value = value[:, kept]
        weights[f"draft_head.{name}"] = value
    return weights
