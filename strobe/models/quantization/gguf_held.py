"""Layers that keep the codes of a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from strobe.models.linear import Linear
from strobe.models.quantization.gguf_codes import CODES
from strobe.models.quantization.grouped import GroupWeight
from strobe.models.quantization.held_experts import HeldExperts
from strobe.models.quantization.stored import HeldProduct, can_hold, hold_product
from strobe.models.weight_mapping import CheckpointTensors, WeightMapping, WeightPart, copy

METHOD = "gguf"
"""Name of the method in a config, which files do not have."""


def hold(module: nn.Module, mapping: WeightMapping, tensors: CheckpointTensors) -> WeightMapping:
    """Let linear layers and experts on the meta device keep their codes where they can; return the
    mapping to these. mapping: of the same module, to dequantized tensors."""
    linears = {f"{path}.weight": m for path, m in module.named_modules() if isinstance(m, Linear)}
    result: WeightMapping = {}
    for name, parts in mapping.items():
        result[name] = parts
        linear = linears.get(name)
        sources = {source: shape for part in parts for source, shape in part.sources.items()}
        if linear is None or not all(
            _has_codes(source, shape, tensors) for source, shape in sources.items()
        ):
            continue
        if linear.weight.ndim == 3:
            result[name] = _held_experts(linear, parts, tensors) or parts
        elif can_hold(name, linear, parts):
            product = hold_product(linear, _nbytes(sources, tensors))
            fill = partial(_hold, product=product)
            part = WeightPart(sources=sources, fill=fill, stacked=parts[0].stacked, as_codes=True)
            result[name] = [part]
    return result


def describe(mapping: WeightMapping, tensors: CheckpointTensors) -> str:
    """Describe which quantized tensors keep their codes, and why others do not."""
    held = Counter[str]()
    rest = Counter[str]()
    for part in (part for parts in mapping.values() for part in parts):
        for kind, source in ((tensors.types.get(s), s) for s in part.sources):
            if kind is not None and part.as_codes:
                held[kind] += 1
            elif kind is not None:
                rest[f"{kind}, {_reason(source, kind, tensors)}"] += 1
    text = f"{held.total()} tensors keep their codes"
    if held:
        text += f" ({', '.join(f'{count} in {kind}' for kind, count in held.most_common())})"
    if rest:
        reasons = "; ".join(f"{count} in {reason}" for reason, count in rest.most_common())
        text += f"; {rest.total()} are dequantized: {reasons}"
    return f"{text}."


def _reason(source: str, kind: str, tensors: CheckpointTensors) -> str:
    """Return why a tensor does not keep its codes."""
    if kind not in CODES:
        return "whose values come from tables of several"
    if source not in tensors.coded:
        return "whose order llama.cpp changed"
    return "of embeddings or of layers that cannot keep codes"


def _has_codes(source: str, shape: tuple[int, ...], tensors: CheckpointTensors) -> bool:
    """Whether a tensor of the shape, perhaps a rank's part, can be read as codes."""
    if source not in tensors.coded or len(shape) != 2:
        return False
    is_whole = tensors.shapes[source][1] == shape[1]
    return is_whole or shape[1] % CODES[tensors.types[source]].group == 0


def _nbytes(sources: Mapping[str, tuple[int, ...]], tensors: CheckpointTensors) -> int:
    """Return the bytes in memory of the codes of tensors."""
    sizes = [
        prod(shape) * CODES[tensors.types[source]].bits_per_value / 8
        for source, shape in sources.items()
    ]
    return int(sum(sizes))


def _hold(out: Tensor, *weights: GroupWeight, product: HeldProduct) -> None:
    """Let a layer hold the codes on the device of `out`, which is empty."""
    product.parts = tuple(weight.to(out.device) for weight in weights)


def _held_experts(
    linear: Linear, parts: Sequence[WeightPart], tensors: CheckpointTensors
) -> list[WeightPart] | None:
    """Let experts keep their codes if all are of one type; return their parts, else None."""
    if not all(part.fill is copy and len(part.sources) == 1 for part in parts):
        return None
    sources = [source for part in parts for source in part.sources.items()]
    if len({(tensors.types[source], shape) for source, shape in sources}) > 1:
        return None
    count, outputs, inputs = linear.weight.shape
    experts = HeldExperts((count, outputs, inputs), _nbytes(dict(sources), tensors))
    linear.held_experts = experts
    empty = torch.empty(count, 0, 0, dtype=linear.weight.dtype, device=linear.weight.device)
    linear.weight = nn.Parameter(empty, requires_grad=False)
    return [
        WeightPart(
            sources=dict([source]),
            fill=partial(_hold_expert, experts=experts, index=index, count=len(sources)),
            as_codes=True,
        )
        for index, source in enumerate(sources)
    ]


def _hold_expert(
    out: Tensor, weight: GroupWeight, *, experts: HeldExperts, index: int, count: int
) -> None:
    """Put the codes of weight number `index` of `count` in their place."""
    experts.put(weight.to(out.device), index, count)
