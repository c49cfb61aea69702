"""Checkpoint directories to modules: every tensor named, checked by shape, used exactly once."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from strobe.models.checkpoint import Checkpoint
from strobe.models.config import DraftConfig, TargetConfig
from strobe.models.dflash import DFlash
from strobe.models.layers import Attention, RMSNorm, RotaryTable
from strobe.models.pieces import Pieces, pieces_of
from strobe.models.registry import make_target
from strobe.models.target import Target

HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that older exporters wrote and that carry no learned value."""

Model = TypeVar("Model", Target, DFlash)


def _check(module: Target | DFlash, checkpoint: Checkpoint) -> Pieces:
    """What the module's parameters are made of. Raises ValueError for a tensor that is missing, of
    another shape or dtype, or that nothing is made of."""
    shapes, dtypes, where = checkpoint.shapes(), checkpoint.dtypes(), checkpoint.directory
    pieces, used = pieces_of(module), set[str]()
    for piece in chain.from_iterable(pieces.values()):
        for name, shape in piece.sources.items():
            if name not in shapes:
                raise ValueError(
                    f"{where}: tensor {name} is missing; download or save the checkpoint again."
                )
            if shapes[name] != shape:
                raise ValueError(
                    f"{where}: tensor {name} has shape {list(shapes[name])}, config.json asks for "
                    f"{list(shape)}; weights and config.json must come from one checkpoint."
                )
            if dtypes[name] not in piece.dtypes:
                raise ValueError(
                    f"{where}: tensor {name} holds {dtypes[name]} values, but only "
                    f"{', '.join(piece.dtypes)} are supported; use an unquantized checkpoint."
                )
            assert name not in used, f"{name} is used twice"
            used.add(name)
    passed = (*module.skipped, *(n for n in shapes if n.endswith(HARMLESS)))
    extra = sorted(n for n in shapes if n not in used and not n.startswith(passed))
    if extra:
        raise ValueError(
            f"{where}: tensor {extra[0]} is not part of this architecture ({len(extra)} such "
            "tensors); loading without it would change the model's mathematics."
        )
    return pieces


Make = Callable[[str, Tensor], None]
"""(parameter name, its memory on the device) -> its values are there."""


def _from(checkpoint: Checkpoint, pieces: Pieces) -> Make:
    """The checkpoint's tensors, one at a time, so that the host never holds them all."""

    def make(name: str, value: Tensor) -> None:
        for piece in pieces[name]:
            piece.fill(value[piece.at], *map(checkpoint.read, piece.sources))

    return make


def _at_random(device: torch.device) -> Make:
    """Weights that only speed can be measured with: normal, or 1 for norms; the same each time."""
    generator = torch.Generator(device).manual_seed(0)

    def make(name: str, value: Tensor) -> None:
        if value.ndim == 1:
            value.fill_(1)
        else:
            value.normal_(0.0, 0.02, generator=generator)

    return make


def _fill(module: nn.Module, make: Make, device: torch.device, dtype: torch.dtype) -> None:
    """Give a module made on the meta device its weights."""
    for name, parameter in list(module.named_parameters()):
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        value = torch.empty(parameter.shape, dtype=kind, device=device)
        make(name, value)
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, nn.Parameter(value, requires_grad=False))


def _lay_out_by_input(module: nn.Module) -> None:
    """Store weights with more outputs than inputs column by column: the values are the same, and a
    CPU's product of one row reads them up to three times as fast (head of 2,048 x 192: 58 us
    against 171)."""
    for parameter in module.parameters():
        if parameter.ndim == 2 and parameter.shape[0] > parameter.shape[1]:
            parameter.data = parameter.data.t().contiguous().t()


def _finish(module: nn.Module, device: torch.device, dtype: torch.dtype, fp8: bool) -> None:
    """Lay out, fuse what is fused, and freeze."""
    module.to(device)
    module.requires_grad_(False)
    if device.type == "cpu":
        _lay_out_by_input(module)
    for part in module.modules():
        if isinstance(part, RotaryTable):
            part.dtype = dtype
        if isinstance(part, RMSNorm):
            part.fuse()
    for part in module.modules():
        if isinstance(part, Attention):
            part.fuse()
        if isinstance(part, DFlash) and not fp8:
            part.join()
    if fp8:
        quantize(module)


def _meta_target(config: TargetConfig, max_positions: int) -> Target:
    with torch.device("meta"):
        return make_target(config, max_positions)


def _meta_draft(
    config: DraftConfig, max_positions: int, embedding: Tensor, head_weight: Tensor
) -> DFlash:
    with torch.device("meta"):
        return DFlash(config, embedding, head_weight, max_positions)


def check_target_tensors(directory: Path, config: TargetConfig, load_format: str = "auto") -> int:
    """How many learned values there are. Raises ValueError, reading headers only, for tensors that
    do not fit the config."""
    return _checked(_meta_target(config, 1), directory, load_format)


def check_draft_tensors(directory: Path, config: DraftConfig, load_format: str = "auto") -> int:
    """The same for a drafter."""
    nothing = torch.empty(0, device="meta")
    return _checked(_meta_draft(config, 1, nothing, nothing), directory, load_format)


def _checked(module: Target | DFlash, directory: Path, load_format: str) -> int:
    if load_format != "dummy":
        with Checkpoint(directory) as checkpoint:
            _check(module, checkpoint)
    return sum(parameter.numel() for parameter in module.parameters())


class Place(TypedDict):
    """Where and how weights are held. load_format: "dummy" for random ones; fp8: products in
    FP8."""

    dtype: torch.dtype
    device: torch.device
    load_format: NotRequired[str]
    fp8: NotRequired[bool]


def load_target(
    directory: Path, config: TargetConfig, *, max_positions: int, **place: Unpack[Place]
) -> Target:
    """The target in `directory`, or one of its shape with random weights. Raises ValueError naming
    a tensor that is not as it should be."""
    return _load(_meta_target(config, max_positions), directory, **place)


def load_draft(
    directory: Path,
    config: DraftConfig,
    target: Target,
    *,
    max_positions: int,
    **place: Unpack[Place],
) -> DFlash:
    """The drafter in `directory`, or one of its shape, reading the target's embedding and head."""
    shared = target.embed_tokens.weight, target.head_weight
    return _load(_meta_draft(config, max_positions, *shared), directory, **place)


def _load(
    module: Model,
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    fp8: bool = False,
) -> Model:
    if load_format == "dummy":
        _fill(module, _at_random(device), device, dtype)
    else:
        with Checkpoint(directory) as checkpoint:
            pieces = _check(module, checkpoint)
            _fill(module, _from(checkpoint, pieces), device, dtype)
    _finish(module, device, dtype, fp8)
    return module


def quantize(module: nn.Module) -> None:
    """Turn every product of the module into FP8. Embeddings and heads keep their dtype; but a
    drafter, which decides no answer, gets a copy of its target's head in FP8, where it needs but
    the largest logit and cuBLAS takes as many rows (a multiple of 16)."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) and name != "lm_head":
            rows, scale = fp8_rows(part.weight)
            part.register_buffer("scale", scale, persistent=False)
            part.weight = nn.Parameter(rows, requires_grad=False)
    if isinstance(module, DFlash) and module.plain_head and len(module.head_weight) % 16 == 0:
        module.fp8_head = fp8_rows(module.head_weight)


def fp8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> rows in FP8 (e4m3, Micikevicius et al., arXiv 2209.05433) and a scale for
    each, [N] float32: the largest value of a row becomes 448, the largest there is."""
    largest = torch.cat([some.abs().amax(1) for some in weight.split(4096)]).float()
    scale = torch.where(largest > 0, largest / 448.0, 1.0)
    rows = [
        (some.float() / of[:, None]).to(torch.float8_e4m3fn)
        for some, of in zip(weight.split(4096), scale.split(4096), strict=True)
    ]
    return torch.cat(rows), scale
