"""Checkpoint directories to modules: every tensor named, checked by shape, used exactly once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from strobe.models.config import DraftConfig, TargetConfig
from strobe.models.dflash import DFlash
from strobe.models.formats.fields import read_json
from strobe.models.layers import Attention, RMSNorm, RotaryTable, fused_sources
from strobe.models.registry import make_target
from strobe.models.target import Target

Shapes = Mapping[str, tuple[int, ...]]

HARMLESS = ("rotary_emb.inv_freq",)
"""Endings of tensors that older exporters wrote and that carry no learned value."""

DTYPES = ("F32", "BF16", "F16")
"""Tensor dtypes that are read, under safetensors' names."""


class Checkpoint:
    """The safetensors of one directory, opened but not read.

    Raises ValueError when a file is missing, damaged or cut short.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        for name in _file_names(directory):
            path = directory / name
            if not path.exists():
                raise ValueError(f"{path} does not exist; download or save the checkpoint again.")
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ValueError(
                    f"{path} is damaged or cut short ({error}); download or save it again."
                ) from None
            for key in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                own = key.removeprefix("model.")
                if own in self._files:
                    raise ValueError(
                        f"{path}: tensor {key} is there twice; download or save the checkpoint "
                        "again."
                    )
                self._files[own] = (file, key)

    def dtypes(self) -> dict[str, str]:
        """The tensors' dtypes under safetensors' names."""
        return {n: f.get_slice(k).get_dtype() for n, (f, k) in self._files.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {n: tuple(f.get_slice(k).get_shape()) for n, (f, k) in self._files.items()}

    def read(self, name: str) -> Tensor:
        file, key = self._files[name]
        return file.get_tensor(key)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def _file_names(directory: Path) -> list[str]:
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return ["model.safetensors"]
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise ValueError(
            f"{index} is damaged (weight_map must name a file for each tensor); download or save "
            "the checkpoint again."
        )
    return sorted(set(shards.values()))


def _check(shapes: Shapes, wanted: Shapes, where: Path) -> None:
    for name, shape in wanted.items():
        if name not in shapes:
            raise ValueError(
                f"{where}: tensor {name} is missing; download or save the checkpoint again."
            )
        if shapes[name] != shape:
            raise ValueError(
                f"{where}: tensor {name} has shape {list(shapes[name])}, config.json asks for "
                f"{list(shape)}; weights and config.json must come from one checkpoint."
            )
    extra = sorted(n for n in shapes if n not in wanted and not n.endswith(HARMLESS))
    if extra:
        raise ValueError(
            f"{where}: tensor {extra[0]} is not part of this architecture ({len(extra)} such "
            "tensors); loading without it would change the model's mathematics."
        )


def _source_shapes(module: nn.Module, parts: Shapes) -> Shapes:
    """Checkpoint names and shapes for a module; `parts` gives the row counts of fused products."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, parameter in module.named_parameters():
        sources = fused_sources(name)
        kind = name.rsplit(".", 2)[-2]
        rows = parts.get(kind, (parameter.shape[0],))
        for source, count in zip(sources, rows, strict=True):
            wanted[source] = (count, *parameter.shape[1:])
    return wanted


def _check_tensors(
    module: Target | DFlash, checkpoint: Checkpoint, ignored: tuple[str, ...]
) -> int:
    """Raises ValueError for tensors that do not fit the module; returns its learned values."""
    decoder = module.config.decoder
    kv = decoder.num_kv_heads * decoder.head_dim
    parts = {
        "qkv_proj": (decoder.num_heads * decoder.head_dim, kv, kv),
        "gate_up_proj": (decoder.intermediate_size,) * 2,
    }
    shapes = {n: s for n, s in checkpoint.shapes().items() if n not in ignored}
    wanted = _source_shapes(module, parts)
    _check(shapes, wanted, checkpoint.directory)
    dtypes = checkpoint.dtypes()
    for name in wanted:
        if dtypes[name] not in DTYPES:
            raise ValueError(
                f"{checkpoint.directory}: tensor {name} holds {dtypes[name]} values, but only "
                f"{', '.join(DTYPES)} are supported; use an unquantized checkpoint."
            )
    return sum(math.prod(shape) for shape in wanted.values())


Source = Callable[[str, torch.Size], Tensor]
"""(parameter name, its shape) -> its values on the device."""


def _from(checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> Source:
    """The checkpoint's tensors, one at a time, so that the host never holds them all."""

    def read(name: str, shape: torch.Size) -> Tensor:
        sources = fused_sources(name)
        tensors = [checkpoint.read(source).to(device, dtype) for source in sources]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    return read


def _at_random(device: torch.device, dtype: torch.dtype) -> Source:
    """Weights that only speed can be measured with: normal, or 1 for norms; the same each time."""
    generator = torch.Generator(device).manual_seed(0)

    def make(name: str, shape: torch.Size) -> Tensor:
        value = torch.ones(shape, dtype=dtype, device=device)
        return value if len(shape) == 1 else value.normal_(0.0, 0.02, generator=generator)

    return make


def _fill(module: nn.Module, source: Source) -> None:
    """Give a module made on the meta device its weights."""
    for name, parameter in list(module.named_parameters()):
        value = source(name, parameter.shape)
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


def _meta_target(config: TargetConfig, max_positions: int) -> tuple[Target, tuple[str, ...]]:
    with torch.device("meta"):
        model = make_target(config, max_positions)
    return model, ("lm_head.weight",) if config.tie_embeddings else ()


def check_target_tensors(directory: Path, config: TargetConfig, load_format: str = "auto") -> int:
    """How many learned values there are. Raises ValueError, reading headers only, for tensors that
    do not fit the config."""
    model, ignored = _meta_target(config, 1)
    if load_format == "dummy":
        return sum(parameter.numel() for parameter in model.parameters())
    with Checkpoint(directory) as checkpoint:
        return _check_tensors(model, checkpoint, ignored)


def check_draft_tensors(directory: Path, config: DraftConfig, load_format: str = "auto") -> int:
    """The same for a drafter."""
    nothing = torch.empty(0, device="meta")
    with torch.device("meta"):
        model = DFlash(config, nothing, nothing, 1)
    if load_format == "dummy":
        return sum(parameter.numel() for parameter in model.parameters())
    with Checkpoint(directory) as checkpoint:
        return _check_tensors(model, checkpoint, ())


def load_target(
    directory: Path,
    config: TargetConfig,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    fp8: bool = False,
) -> Target:
    """The target in `directory`, or one of its shape with random weights. fp8: products in FP8.
    Raises ValueError naming a tensor that is not as it should be."""
    model, ignored = _meta_target(config, max_positions)
    if load_format == "dummy":
        _fill(model, _at_random(device, dtype))
    else:
        with Checkpoint(directory) as checkpoint:
            _check_tensors(model, checkpoint, ignored)
            _fill(model, _from(checkpoint, device, dtype))
    _finish(model, device, dtype, fp8)
    return model


def load_draft(
    directory: Path,
    config: DraftConfig,
    target: Target,
    *,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    fp8: bool = False,
) -> DFlash:
    """The drafter in `directory`, or one of its shape, reading the target's embedding and head."""
    with torch.device("meta"):
        model = DFlash(config, target.embed_tokens.weight, target.head_weight, max_positions)
    if load_format == "dummy":
        _fill(model, _at_random(device, dtype))
    else:
        with Checkpoint(directory) as checkpoint:
            _check_tensors(model, checkpoint, ())
            _fill(model, _from(checkpoint, device, dtype))
    _finish(model, device, dtype, fp8)
    return model


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
