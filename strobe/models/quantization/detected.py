"""Load weights in the form in which a checkpoint stores each, and compare it with the config.

A weight is dequantized in float32 while loading and rounded once to the engine's dtype. If weights
are held, linear layers and experts keep theirs as stored, and each product dequantizes them so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from strobe.models.config_readers.tensor_names import names_in_files
from strobe.models.linear import Linear
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization.forms import Form, form_of, read_weight
from strobe.models.quantization.grouped import fill_dequantized
from strobe.models.quantization.held_experts import hold_experts
from strobe.models.quantization.rules import Rules
from strobe.models.quantization.stored import HeldProduct, can_hold, held_bytes, hold_product
from strobe.models.weight_mapping import (
    Blocks,
    Check,
    CheckpointTensors,
    Fill,
    WeightMapping,
    WeightPart,
    copy,
)

logger = logging.getLogger(__name__)


def apply(
    module: nn.Module,
    mapping: WeightMapping,
    tensors: CheckpointTensors,
    quantization: Quantization,
) -> WeightMapping:
    """Dequantize weights when they are read, or hold them. Raises ValueError for a weight that is
    stored in another form than the config says, and for a checkpoint without quantized weights."""
    if not tensors.dtypes:
        return mapping
    linear = {f"{path}.weight": m for path, m in module.named_modules() if isinstance(m, Linear)}
    plain = list[str]()
    quantized = 0
    result: WeightMapping = {}
    for name, parts in mapping.items():
        result[name] = list[WeightPart]()
        forms_of_parts = [_forms(part, tensors, quantization.rules) for part in parts]
        for part, forms in zip(parts, forms_of_parts, strict=True):
            stored = _with_forms(part, forms, tensors) if any(forms.values()) else part
            result[name].append(stored)
            quantized += sum(form is not None for form in forms.values())
            if name in linear:
                plain += [source for source, form in forms.items() if form is None]
        if not quantization.held:
            continue
        is_quantized = all(form is not None for part in forms_of_parts for form in part.values())
        if is_quantized and can_hold(name, linear.get(name), parts):
            result[name] = [_held(linear[name], result[name], forms_of_parts, tensors)]
        elif name in linear and linear[name].weight.ndim == 3:
            path = name.removesuffix(".weight")
            held = hold_experts(path, linear[name], parts, forms_of_parts, tensors)
            result |= held or {}
    if not quantized:
        raise ValueError(
            f"{tensors.source}: quantization_config says {quantization.label}, but no tensor is "
            "quantized; take quantization_config out, or download the checkpoint again."
        )
    _tell_unexpected(plain, quantized, tensors, quantization)
    return result


def describe(quantization: Quantization, decoder: DecoderConfig) -> str:
    """See `Method.describe`."""
    if quantization.held:
        return f"{quantization.label}, kept as stored in linear layers and experts"
    return f"{quantization.label}, dequantized to the engine's dtype while loading"


def experts_format(quantization: Quantization, inputs: int) -> None:
    """See `Method.experts_format`."""
    return


def _forms(part: WeightPart, tensors: CheckpointTensors, rules: Rules) -> dict[str, Form | None]:
    """Return the form of each of a part's tensors, None for an unquantized one."""
    forms: dict[str, Form | None] = {}
    for name, shape in part.sources.items():
        module = name.removesuffix(".weight")
        names = names_in_files(module)
        declared = rules.scheme_of(names)
        form = form_of(name, shape, tensors, declared)
        forms[name] = form
        if form is None:
            continue
        entry = rules.ignores(names)
        if entry is not None:
            raise ValueError(
                f"{tensors.source}: {module} is stored in {form.scheme}, but quantization_config "
                f"says by {entry!r} that it is not quantized; weights and config.json must come "
                "from one checkpoint."
            )
        if declared is not None and not declared.agrees(form.scheme):
            raise ValueError(
                f"{tensors.source}: {module} is stored in {form.scheme}, but quantization_config "
                f"says {declared}; weights and config.json must come from one checkpoint."
            )
    return forms


def _held(
    linear: Linear,
    parts: Sequence[WeightPart],
    forms: Sequence[Mapping[str, Form | None]],
    tensors: CheckpointTensors,
) -> WeightPart:
    """Return the tensors that a layer is to hold, as a part that fills nothing."""
    sources: dict[str, tuple[int, ...]] = {}
    blocks: dict[str, Blocks] = {}
    checks: dict[str, Check] = {}
    dtypes = set[str]()
    for part in parts:
        sources |= part.sources
        blocks |= part.blocks
        checks |= part.checks
        dtypes |= {*part.dtypes}
    own = [(name, form) for part in forms for name, form in part.items() if form is not None]
    product = hold_product(linear, sum(held_bytes(form, tensors) for _, form in own))
    return WeightPart(
        sources=sources,
        fill=partial(_hold, product=product, forms=[form for _, form in own]),
        dtypes=tuple(sorted(dtypes)),
        stacked=parts[0].stacked,
        blocks=blocks,
        checks=checks,
    )


def _hold(out: Tensor, *tensors: Tensor, product: HeldProduct, forms: Sequence[Form]) -> None:
    """Let a layer hold the stored tensors on the device of `out`, which is empty."""
    rest = iter(tensors)
    product.parts = tuple(read_weight(form, rest, out.device).copied() for form in forms)


def _tell_unexpected(
    plain: Sequence[str],
    quantized: int,
    tensors: CheckpointTensors,
    quantization: Quantization,
) -> None:
    """Log which layers of a checkpoint are not quantized although the config says so. quantized:
    number of quantized ones."""
    if not tensors.source:
        return
    rules = quantization.rules
    unexpected = list[str]()
    for module in (name.removesuffix(".weight") for name in plain):
        names = names_in_files(module)
        if rules.scheme_of(names) and not rules.may_ignore(names):
            unexpected.append(module)
    if unexpected:
        logger.warning(
            "%s: %d of %d layers are stored unquantized, although quantization_config says "
            "otherwise, and are used as they are; the first is %s.",
            tensors.source,
            len(unexpected),
            len(unexpected) + quantized,
            unexpected[0],
        )


def _with_forms(
    part: WeightPart, forms: Mapping[str, Form | None], tensors: CheckpointTensors
) -> WeightPart:
    sources: dict[str, tuple[int, ...]] = {}
    blocks = dict(part.blocks)
    checks = dict(part.checks)
    for name, form in forms.items():
        sources |= {name: part.sources[name]} if form is None else form.sources
        blocks |= {} if form is None else form.blocks
        checks |= {} if form is None else form.checks
    dtypes = {tensors.dtypes[name] for name in sources if name in tensors.dtypes}
    fill = partial(_fill, fill=part.fill, forms=forms)
    return part._replace(
        sources=sources,
        fill=fill,
        dtypes=(*part.dtypes, *sorted(dtypes.difference(part.dtypes))),
        blocks=blocks,
        checks=checks,
    )


def _fill(out: Tensor, *tensors: Tensor, fill: Fill, forms: Mapping[str, Form | None]) -> None:
    """Dequantize the stored tensors, then fill."""
    if fill is copy and len(forms) == 1:
        (form,) = forms.values()
        assert form is not None
        fill_dequantized(out, read_weight(form, iter(tensors), out.device))
    else:
        fill(out, *_values(out, tensors, forms))


def _values(
    out: Tensor, tensors: Sequence[Tensor], forms: Mapping[str, Form | None]
) -> Iterator[Tensor]:
    """Yield the values of a part's weights in the dtype of out."""
    rest = iter(tensors)
    for form in forms.values():
        if form is None:
            yield next(rest)
            continue
        stored = read_weight(form, rest, out.device)
        value = torch.empty(stored.shape, dtype=out.dtype, device=out.device)
        fill_dequantized(value, stored)
        yield value
