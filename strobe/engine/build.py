"""From settings to the parts of an engine: checks first, then weights, then memory."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from strobe.attention.recurrent import RecurrentBackend
from strobe.config import EngineConfig, Limits, resolve_limits
from strobe.engine.device import Choice, backends, choose
from strobe.hub.download import fetch_weights
from strobe.hub.locate import located
from strobe.kv.pages import PagePool
from strobe.kv.states import StateStore
from strobe.kv.store import KVSpec, KVStore
from strobe.models.config import DecoderConfig, DraftConfig, TargetConfig
from strobe.models.config_readers.pair import check_pair
from strobe.models.dflash import DFlash
from strobe.models.load import (
    check_draft_tensors,
    check_target_tensors,
    load_draft,
    load_target,
    weight_bytes,
)
from strobe.models.ops import make_ops
from strobe.models.registry import load_draft_config, load_target_config
from strobe.models.target import Target
from strobe.runner.graphs import CUDARecorder, Eager, Graphs
from strobe.runner.memory import plan_pages, scratch_bytes
from strobe.runner.picking import PickingState
from strobe.runner.runner import ModelRunner
from strobe.runner.shapes import Shapes
from strobe.runner.state import DecodeState
from strobe.sampling.grammar import Grammars
from strobe.spec.base import Proposer, ProposerSet
from strobe.spec.dflash import DFlashProposer
from strobe.spec.ngram import NgramProposer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """What the settings and the checkpoints' configs come to, before any weight is read. scratch:
    bytes that steps take on a GPU beside weights and KV cache."""

    config: EngineConfig
    target: TargetConfig
    draft: DraftConfig | None
    method: str
    limits: Limits
    device: torch.device
    dtype: torch.dtype
    choice: Choice
    scratch: int


@dataclass
class Parts:
    """The parts that Engine composes."""

    runner: ModelRunner
    proposers: ProposerSet
    state: DecodeState
    picking: PickingState
    graphs: Graphs | Eager
    pool: PagePool
    stores: dict[str, KVStore]
    states: StateStore | None = None


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a CUDA GPU where there is one. Raises ValueError."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if kind == "cpu":
        return torch.device(kind)
    index, count = int(number or 0), torch.cuda.device_count()
    if index >= count:
        mend = f"ask for cuda:0 to cuda:{count - 1}" if count else "ask for cpu"
        raise ValueError(f"device is {name!r}, but this machine has {count} CUDA devices; {mend}.")
    return torch.device(kind, index)


def pick_dtype(name: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is float32 on a CPU and the checkpoint's own on a GPU."""
    if name == "auto":
        name = "float32" if device.type == "cpu" else checkpoint
    return getattr(torch, name)


def resolve(config: EngineConfig) -> Resolved:
    """Read and check configs and tensor headers. Raises ValueError with the sentence to mend it."""
    config = located(config.check())
    target_path = Path(config.target)
    target = load_target_config(target_path)
    config = _cacheable(config, target)
    draft = None
    if config.draft is None and draws(config):
        raise ValueError(
            "draft_sample_method is 'probabilistic', but no drafter is loaded; name one with "
            "draft, or leave draft_sample_method out."
        )
    if config.draft is not None:
        draft = load_draft_config(Path(config.draft), target_path)
        check_pair(draft, target, Path(config.draft))
    method = config.method or ("dflash" if draft is not None else "none")
    device = pick_device(config.device)
    if config.gpu_memory_utilization is not None and device.type == "cpu":
        logger.warning("gpu_memory_utilization has no effect on a CPU; kv_cache_memory has.")
    limits = resolve_limits(
        config,
        model_max=min(
            target.decoder.max_position,
            draft.decoder.max_position if draft is not None else target.decoder.max_position,
        ),
        drafter_block=draft.block_size if draft is not None else None,
        drafter_drafts=draft.drafts if draft is not None else None,
        recommended=draft.num_drafts if draft is not None else None,
        method=method,
        gpu=device.type == "cuda",
    )
    dtype = pick_dtype(config.dtype, target.dtype, device)
    drafter = draft.decoder if draft is not None else None
    stored = target.quantization is not None and target.quantization.method == "fp8"
    choice = choose(config, target.decoder, drafter, device, dtype, stored_fp8=stored)
    if config.load_format != "dummy":
        fetch_weights(*filter(None, (config.draft, config.target)))
    modules: list[Target | DFlash] = [check_target_tensors(target_path, target, config.load_format)]
    if draft is not None:
        path = Path(config.draft or "")
        modules.append(check_draft_tensors(path, draft, config.load_format))
    groups = list(kv_groups(target, draft, choice.kv_dtype).values())
    scratch = 0
    if device.type == "cuda":
        features = len(draft.capture) if draft else 0
        scratch = scratch_bytes(limits, target.decoder, features, dtype, drawn=draws(config))
    weights = sum(weight_bytes(module, dtype, fp8=choice.fp8) for module in modules)
    states = state_bytes(target, limits, dtype)
    plan_pages(config, limits, groups, device, weights=weights, states=states, scratch=scratch)
    return Resolved(config, target, draft, method, limits, device, dtype, choice, scratch)


def draws(config: EngineConfig) -> bool:
    """Whether the drafter's tokens are drawn."""
    return config.draft_sample_method == "probabilistic"


def _cacheable(config: EngineConfig, target: TargetConfig) -> EngineConfig:
    """Without it where the target has recurrent layers: a prefix found in pages has no state."""
    if target.states is None or not config.enable_prefix_caching:
        return config
    logger.warning(
        "Prefix caching is off: no page holds the state of the target's recurrent layers."
    )
    return config.with_(enable_prefix_caching=False)


def state_bytes(target: TargetConfig, limits: Limits, dtype: torch.dtype) -> int:
    """What the states of recurrent layers take, the spare slot's included."""
    if target.states is None:
        return 0
    return (limits.max_num_seqs + 1) * target.states.bytes_per_slot(1 + limits.num_drafts, dtype)


def kv_groups(
    target: TargetConfig, draft: DraftConfig | None, dtype: torch.dtype
) -> dict[str, KVSpec]:
    """What the pages hold: the target's keys and values, and the drafter's."""
    decoders = {"target": target.decoder}
    if draft is not None:
        decoders["draft"] = draft.decoder
    return {name: kv_spec(decoder, dtype) for name, decoder in decoders.items()}


def kv_spec(decoder: DecoderConfig, dtype: torch.dtype) -> KVSpec:
    shapes = tuple((shape.num_kv_heads, shape.head_dim) for shape in decoder.layer_shapes)
    return KVSpec(len(decoder.masks), decoder.num_kv_heads, decoder.head_dim, dtype, shapes)


def build(resolved: Resolved, target: Target | None = None) -> Parts:
    """Load the weights, size the pool and wire the parts. target: weights loaded elsewhere."""
    config, limits = resolved.config, resolved.limits
    device, dtype = resolved.device, resolved.dtype
    if device.type == "cuda":
        torch.cuda.set_device(device)  # streams, events and kernels are the current device's
    block = resolved.draft.block_size if resolved.draft is not None else 0
    reach = limits.max_model_len + max(block, limits.num_drafts + 1) + 1
    choice = resolved.choice
    how: dict[str, Any] = {"max_positions": reach, "dtype": dtype, "device": device}
    how |= {"load_format": config.load_format, "fp8": choice.fp8}
    stored = resolved.target.quantization
    if target is None:
        target = load_target(Path(config.target), resolved.target, **how)
        if stored is not None and not choice.fp8:
            size = sum(parameter.nbytes for parameter in target.parameters())
            logger.info("Weights in %s are held in %s: %d bytes.", stored.method, dtype, size)
    groups = kv_groups(resolved.target, resolved.draft, choice.kv_dtype)
    drafter = None
    if resolved.draft is not None:
        drafter = load_draft(Path(config.draft or ""), resolved.draft, target, **how)
    ops = make_ops(device, dtype, kernels=choice.kernels)
    for model in filter(None, (target, drafter)):
        model.ops = ops
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what loading left over counts as free
    taken = {"states": state_bytes(resolved.target, limits, dtype), "scratch": resolved.scratch}
    pages = plan_pages(config, limits, list(groups.values()), device, **taken)
    pool = PagePool(pages, limits.page_size)
    spare = int(choice.graphs)  # one page more, for rows that only fill up a shape
    stores = {
        n: KVStore(spec, pages + spare, limits.page_size, device) for n, spec in groups.items()
    }
    states, spec = None, resolved.target.states
    if spec is not None:
        states = StateStore(spec, limits.max_num_seqs, 1 + limits.num_drafts, dtype, device)
    vocab = resolved.target.decoder.vocab_size
    state = DecodeState(
        limits.max_num_seqs,
        reach,
        limits.page_size,
        device,
        spare_page=pages * spare,
        kernels=choice.kernels,
    )
    tokenizer = Path(config.target) / "tokenizer.json"
    grammars = Grammars(tokenizer, vocab, resolved.target.eos_ids)
    picking = PickingState(limits.max_num_seqs, vocab, device, grammars, kernels=choice.kernels)
    decoder = resolved.draft.decoder if resolved.draft is not None else None
    backend, draft_backend = backends(choice, resolved.target.decoder, decoder, device)
    if states is not None:
        backend = RecurrentBackend(backend, states, kernels=choice.attention == "triton")
    shapes, graphs = None, Eager()
    if choice.graphs:
        shapes, graphs = Shapes(limits.max_num_seqs, limits.num_drafts), Graphs(CUDARecorder())
    proposers: dict[str, Proposer] = {
        "ngram": NgramProposer(limits.num_drafts, config.ngram_min, config.ngram_max, device)
    }
    if drafter is not None:
        draft_runner = ModelRunner(
            drafter,
            drafter.config.decoder.masks,
            stores["draft"],
            state,
            draft_backend,
            limit=limits.max_model_len,
            shapes=shapes,
        )
        drawing = picking if draws(config) else None
        proposers["dflash"] = DFlashProposer(
            drafter, draft_runner, graphs, limits.num_drafts, drawing
        )
    held = ProposerSet(proposers, device)
    runner = ModelRunner(
        target,
        resolved.target.decoder.masks,
        stores["target"],
        state,
        backend,
        limit=limits.max_model_len,
        capture=held.capture,
        shapes=shapes,
    )
    return Parts(runner, held, state, picking, graphs, pool, stores, states)
