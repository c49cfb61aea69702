"""Load checkpoints into modules. Every tensor is named, checked by shape, and used exactly once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import NotRequired, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from strobe.hub.download import display_name
from strobe.models.architectures import make_target
from strobe.models.checkpoint import Checkpoint
from strobe.models.config_readers.draft_vocabulary import load_target_ids
from strobe.models.config_readers.tensor_names import draft_parts, has_weight
from strobe.models.dflash_drafter import DFlash
from strobe.models.linear import AnyLinear, Linear, LinearView
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.modules import Attention, RMSNorm, RotaryTable
from strobe.models.quantization import gguf_held
from strobe.models.quantization.fp8 import fp8_copy, hold_rows
from strobe.models.quantization.methods import UNUSED, apply_quantization
from strobe.models.quantization.random_tensors import draw_tensor, random_tensors
from strobe.models.quantization.rounding import hold_rounded
from strobe.models.target import EMBEDDING, HEAD, Target
from strobe.models.weight_mapping import (
    NO_TENSORS,
    CheckpointTensors,
    WeightMapping,
    WeightPart,
    mapping_of,
)

logger = logging.getLogger(__name__)

HARMLESS = ("rotary_emb.inv_freq",)
"""Suffixes of tensors that older exporters wrote and that hold no trained values."""

Model = TypeVar("Model", Target, DFlash)
Open = Callable[[Path], Checkpoint] | None
"""Opens a checkpoint; None for random weights."""


def _check_tensors(module: Target | DFlash, checkpoint: Checkpoint) -> WeightMapping:
    """Return the sources of the module's parameters. Raises ValueError for a missing tensor, a
    wrong shape or dtype, and an unused tensor."""
    shapes = checkpoint.shapes
    dtypes = checkpoint.dtypes
    path = checkpoint.source
    mapping = mapping_of(module, shapes)
    tensors = checkpoint.tensors
    mapping = apply_quantization(module, mapping, tensors, module.config.quantization)
    used = set[str]()
    for part in chain.from_iterable(mapping.values()):
        for name, shape in part.sources.items():
            if name not in shapes:
                raise ValueError(
                    f"{path}: tensor {name} is missing; download or save the checkpoint again."
                )
            checkpoint.fit(name, shape, part.stacked, part.blocks.get(name))
            if dtypes[name] not in part.dtypes:
                raise ValueError(
                    f"{path}: tensor {name} holds {dtypes[name]} values, but only "
                    f"{', '.join(part.dtypes)} are supported; use an unquantized checkpoint."
                )
            if name in used:
                raise RuntimeError(f"{name} would be used twice; this is an error in Strobe.")
            used.add(name)
    quantization = module.config.quantization
    harmless = (*HARMLESS, *UNUSED.get(quantization.method, ())) if quantization else HARMLESS
    ignored = (*module.skipped, *(n for n in shapes if n.endswith(harmless)))
    extra = sorted(n for n in shapes if n not in used and not n.startswith(ignored))
    if extra:
        raise ValueError(
            f"{path}: tensor {extra[0]} is not part of this architecture ({len(extra)} such "
            "tensors); loading without it would change the model's mathematics."
        )
    return mapping


class LoadOptions(TypedDict):
    """Where to put the weights and in which dtype. open: see `Open`. uniform: whether random ones
    are uniform, not normal. fp8: hold linear layers in FP8. packed: the format they are packed in
    afterwards; they are loaded in float16 unless it is float32. rounded: the format of
    `quantization.rounding` that linear layers other than experts are rounded to."""

    dtype: torch.dtype
    device: torch.device
    open: NotRequired[Open]
    uniform: NotRequired[bool]
    fp8: NotRequired[bool]
    packed: NotRequired[str | None]
    rounded: NotRequired[str | None]


def _fill(
    module: nn.Module,
    names: Iterable[str],
    write: Callable[[str, Tensor], None],
    options: LoadOptions,
) -> None:
    """Give a module on the meta device its weights, one parameter after another. Linear layers for
    FP8 or codes are converted before the next parameter is read. write: writes a parameter's values
    to its memory."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        meta: Tensor = getattr(owner, leaf)
        layer = (
            owner if isinstance(owner, Linear) and leaf == "weight" and not owner.fixed else None
        )
        is_half = meta.ndim == 2 and layer and options.get("packed") not in (None, "float32")
        dtype = torch.float16 if is_half else options["dtype"]
        if not isinstance(meta, nn.Parameter) or not meta.is_floating_point():
            dtype = meta.dtype
        value = torch.empty(meta.shape, dtype=dtype, device=options["device"])
        write(name, value)
        if layer is not None and options.get("fp8"):
            value = hold_rows(layer, value)
        rounded = options.get("rounded")
        if layer is not None and meta.ndim == 2 and rounded is not None:
            value = hold_rounded(layer, value, rounded)
        if isinstance(meta, nn.Parameter):
            value = nn.Parameter(value, requires_grad=False)
        setattr(owner, leaf, value)


def _fill_at_random(module: Target | DFlash, options: LoadOptions) -> None:
    """Fill with random weights, with a fixed seed."""
    generator = torch.Generator(options["device"]).manual_seed(0)
    uniform = options.get("uniform", False)

    mapping, tensors = _random_mapping(module)

    def draw(name: str, value: Tensor) -> None:
        parts = mapping[name]
        if any(source in tensors.dtypes for part in parts for source in part.sources):
            for part in parts:
                _draw_stored(value[part.at], part, tensors, generator)
            return
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        stored = owner.format if isinstance(owner, Linear) else None
        if stored is None or leaf not in ("weight", "scale"):
            _draw_plain(value, generator, uniform=uniform)
        elif leaf == "weight":
            stored.fill_random(value, generator)
        else:
            stored.fill_scale(value)

    _fill(module, mapping, draw, options)


def _draw_stored(
    value: Tensor, part: WeightPart, tensors: CheckpointTensors, generator: torch.Generator
) -> None:
    """Fill a part of a parameter from random tensors of a quantized checkpoint."""

    def draw(source: str) -> Tensor:
        if source in tensors.dtypes:
            return draw_tensor(source, tensors, generator)
        plain = torch.empty(part.sources[source], device=value.device)
        _draw_plain(plain, generator, uniform=False)
        return plain

    part.fill(value, *map(draw, part.sources))


def _draw_plain(value: Tensor, generator: torch.Generator, *, uniform: bool) -> None:
    """Fill a parameter with random values for measurements of speed: normal, and 1 for norms; or
    uniform, all within 0.001 of 0."""
    if uniform and value.is_floating_point():
        value.uniform_(-1e-3, 1e-3, generator=generator)
    elif value.ndim == 1 or not value.is_floating_point():
        value.fill_(1)
    else:
        value.normal_(0.0, 0.02, generator=generator)


def _random_mapping(module: Target | DFlash) -> tuple[WeightMapping, CheckpointTensors]:
    """Return the mapping of a checkpoint that has all that its config says, and its quantized
    tensors if layers keep them as stored."""
    quantization = module.config.quantization
    mapping = mapping_of(module)
    tensors = NO_TENSORS
    if quantization is not None and quantization.held:
        if quantization.method == gguf_held.METHOD:
            raise ValueError(
                "weight_dtype is 'stored' and load_format draws random weights, but these have no "
                "codes for a GGUF file; use weight_dtype auto."
            )
        tensors = random_tensors(module, mapping, quantization)
    return apply_quantization(module, mapping, tensors, quantization), tensors


def _read_tensors(module: Target | DFlash, checkpoint: Checkpoint, options: LoadOptions) -> None:
    """Read the checkpoint's tensors in file order. A progress bar is shown if stderr is a terminal,
    unless loading is logged, another display is live or TQDM_DISABLE is set."""
    from tqdm.auto import tqdm

    from strobe.terminal.progress import Progress

    mapping = _check_tensors(module, checkpoint)
    quantization = module.config.quantization
    if quantization is not None and quantization.held and checkpoint.types:
        logger.info("%s: %s", checkpoint.source, gguf_held.describe(mapping, checkpoint.tensors))
    checkpoint.check_values(chain.from_iterable(mapping.values()))
    order_of = {name: i for i, name in enumerate(checkpoint.shapes)}
    order = sorted(mapping, key=lambda name: order_of[next(iter(mapping[name][0].sources))])
    total = sum(map(checkpoint.bytes_of, order_of))
    started = time.perf_counter()
    with tqdm(
        total=total,
        desc=f"Loading {display_name(checkpoint.source)}",
        unit="B",
        unit_scale=True,
        delay=2.0,  # seconds
        leave=False,
        dynamic_ncols=True,
        disable=logger.isEnabledFor(logging.INFO) or Progress.num_live > 0 or None,
    ) as bar:

        def write(name: str, value: Tensor) -> None:
            for part in mapping[name]:
                checkpoint.fill(value[part.at], part)
                bar.update(sum(map(checkpoint.bytes_of, part.sources)))

        _fill(module, order, write, options)
    if quantization is not None and quantization.activations:
        logger.info(
            "%s: the config rounds activations, too, but they stay in %s.",
            checkpoint.source,
            str(options["dtype"]).removeprefix("torch."),
        )
    seconds = max(time.perf_counter() - started, 1e-3)
    size = total / 1e9
    rate = f"{seconds:.1f} s, {size / seconds:.2f} GB/s"
    logger.info("loaded %.2f GB from %s in %s", size, checkpoint.source, rate)


def _meta_target(directory: Path, config: TargetConfig, max_positions: int, open: Open) -> Target:
    """Return the target on the meta device. The weights decide whether its head is the embedding,
    as in transformers: a head in the checkpoint that differs from the embedding is used, whatever
    the config says, and an equal one is not loaded."""
    shapes: Mapping[str, tuple[int, ...]] = {}
    source = EMBEDDING
    if open is not None:
        checkpoint = open(directory)
        shapes = checkpoint.shapes
        if EMBEDDING in shapes and has_weight("lm_head", shapes):
            is_tied = HEAD in shapes and checkpoint.equal(EMBEDDING, HEAD)
            config = replace(config, tie_embeddings=is_tied)
    if config.tie_embeddings and EMBEDDING not in shapes and HEAD in shapes:
        source = HEAD
    with torch.device("meta"):
        target = make_target(config, max_positions)
    target.embedding_source = source
    return target


def _meta_draft(
    directory: Path,
    config: DraftConfig,
    max_positions: int,
    open: Open,
    *,
    embedding: Tensor,
    head: AnyLinear,
) -> DFlash:
    """Return the drafter on the meta device. embedding, head: the target's."""
    own_tensors, skipped = draft_parts(open and open(directory).shapes, config, directory)
    with torch.device("meta"):
        module = DFlash(
            config,
            embedding=embedding,
            head=head,
            max_positions=max_positions,
            own_tensors=own_tensors,
        )
    module.skipped = skipped
    return module


def _check(module: Model, directory: Path, open: Open, *, values: bool) -> Model:
    if open is None:
        _random_mapping(module)
        return module
    checkpoint = open(directory)
    mapping = _check_tensors(module, checkpoint)
    if values:
        checkpoint.check_values(chain.from_iterable(mapping.values()))
    return module


def check_target_tensors(
    directory: Path, config: TargetConfig, open: Open = Checkpoint, *, values: bool = False
) -> Target:
    """Return the target on the meta device. Raises ValueError, after reading headers only, for
    tensors that do not fit the config. Only a head next to an embedding is compared with it.
    values: whether scales, zeros and groups of quantized weights are read and checked, too, as
    before loading."""
    return _check(_meta_target(directory, config, 1, open), directory, open, values=values)


def check_draft_tensors(
    directory: Path, config: DraftConfig, open: Open = Checkpoint, *, values: bool = False
) -> DFlash:
    """Return the drafter on the meta device; see `check_target_tensors`. Of a reduced head the
    token ids are read, too."""
    nothing = torch.empty(0, device="meta")
    head = LinearView(weight=nothing)
    module = _meta_draft(directory, config, 1, open, embedding=nothing, head=head)
    _check(module, directory, open, values=values)
    if open is not None and config.draft_vocab_size is not None:
        load_target_ids(open(directory), config)
    return module


def load_target(
    directory: Path, config: TargetConfig, *, max_positions: int, **options: Unpack[LoadOptions]
) -> Target:
    """Load the target, or give one of its shape random weights. Raises ValueError that names the
    wrong tensor."""
    module = _meta_target(directory, config, max_positions, options.get("open", Checkpoint))
    if config.tie_embeddings and not module.config.tie_embeddings:
        logger.warning(
            "%s: tie_word_embeddings is true, but lm_head.weight differs from the embedding, so "
            "the head in the checkpoint is used.",
            directory,
        )
    module = _load(module, directory, options)
    _find_at_once(module)
    return module


def load_draft(
    directory: Path,
    config: DraftConfig,
    target: Target,
    *,
    max_positions: int,
    **options: Unpack[LoadOptions],
) -> DFlash:
    """Load the drafter, or give one of its shape random weights. It shares the target's embedding
    and head unless it has its own."""
    if config.embedding_scale is None:
        config = replace(config, embedding_scale=target.config.embedding_scale)
    module = _meta_draft(
        directory,
        config,
        max_positions,
        options.get("open", Checkpoint),
        embedding=target.embed_tokens.weight,
        head=target.output,
    )
    module = _load(module, directory, options)
    module.fold()
    _find_at_once(module)
    if options.get("fp8") and module.head_in_fp8:
        module.fp8_head = fp8_copy(module.output.dense(options["dtype"]))
    if config.draft_vocab_size is not None:
        ids = torch.arange(config.draft_vocab_size)
        if options.get("open", Checkpoint):
            ids = load_target_ids(Checkpoint(directory), config)
        module.target_ids = ids.to(options["device"])
    return module


def _load(module: Model, directory: Path, options: LoadOptions) -> Model:
    """Fill the module, fold what is computed once, and freeze it."""
    if open := options.get("open", Checkpoint):
        _read_tensors(module, open(directory), options)
    else:
        _fill_at_random(module, options)
    module.to(options["device"])
    module.requires_grad_(False)
    for submodule in module.modules():
        if isinstance(submodule, RotaryTable):
            submodule.dtype = options["dtype"]
        if isinstance(submodule, RMSNorm | Attention):
            submodule.fold()
    return module


def _find_at_once(module: Model) -> None:
    """Let attributes find submodules at once, not by nn.Module's own search."""
    for submodule in module.modules():
        submodule.__dict__.update(submodule.named_children())
