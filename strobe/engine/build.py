"""Builds an engine's parts from its settings: checks first, then weights, then memory."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from strobe.attention.backend import AttentionBackend
from strobe.attention.recurrent_backend import RecurrentBackend
from strobe.config import (
    KEPT_STATES,
    STATE_CACHE_ON_CPU,
    STATE_CACHE_ON_GPU,
    EngineConfig,
    Limits,
    parse_bytes,
    resolve_limits,
)
from strobe.engine.backend_choice import FP8, BackendChoice, choose_backends, make_backends
from strobe.engine.shadow_drafters import ShadowDrafter, load_shadow_configs, shadow_limits
from strobe.host.host_memory import trim_heap
from strobe.host.openmp import idle_threads, usable_cores
from strobe.hub.download import fetch_weights, missing_weights
from strobe.hub.locate import LOOKUP, locate_models
from strobe.kv.host_store import HostStore, staging_bytes
from strobe.kv.host_tier import COPY_MS, HostRows, HostTier
from strobe.kv.kept_states import KeptStates, return_margin
from strobe.kv.kv_store import KVSpec, KVStore
from strobe.kv.pages import PagePool, max_held
from strobe.kv.states import STATES_IN_A_COPY, StateStore
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.config_readers.pair import check_pair
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DecoderConfig, DraftConfig, TargetConfig
from strobe.models.ops.torch_ops import TorchOps
from strobe.models.quantization.kv_scales import read_kv_scales, use_kv_scales
from strobe.models.quantization.methods import hold_stored
from strobe.models.quantization.packed import pack, pack_drafter
from strobe.models.quantization.sizes import held_bytes, weight_bytes
from strobe.models.target import Target
from strobe.models.weight_loading import (
    LoadOptions,
    Open,
    check_draft_tensors,
    check_target_tensors,
    load_draft,
    load_target,
)
from strobe.parallel.devices import choose_device
from strobe.parallel.split import Split
from strobe.runner.buckets import Buckets
from strobe.runner.decode_state import DecodeState
from strobe.runner.graphs import CUDACapturer, Eager, Graphs
from strobe.runner.memory import (
    MemoryBill,
    PageGroup,
    PartBytes,
    Scratch,
    group_bytes,
    page_table_bytes,
    plan_pages,
    plan_scratch,
)
from strobe.runner.model_runner import ModelRunner
from strobe.runner.step_ops.numpy_step_ops import NumpyStepOps
from strobe.runner.step_ops.torch_step_ops import StepOps
from strobe.sampling.grammar import GrammarState
from strobe.sampling.grammar_compiler import GrammarCompiler
from strobe.sampling.sampling_state import SamplingState
from strobe.speculation.proposer import ProposerSet
from strobe.speculation.registry import (
    DRAFTER_METHOD,
    ProposerContext,
    make_proposers,
    make_shadow_proposers,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedConfig:
    """Settings and checkpoint configs after all checks, before any weight is read. draft: None
    without a drafter; scratch: GPU bytes of a step besides weights and KV cache; split: the part of
    the models that this rank holds, which target and draft describe; shadows: drafters to score in
    shadow mode; weights: bytes that each model's weights will take, by name."""

    config: EngineConfig
    target: TargetConfig
    draft: DraftConfig | None
    method: str
    limits: Limits
    device: torch.device
    dtype: torch.dtype
    backends: BackendChoice
    scratch: Scratch
    split: Split
    shadows: tuple[ShadowDrafter, ...] = ()
    weights: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def decoders(self) -> dict[str, DecoderConfig]:
        """The shapes of the target and of each drafter."""
        decoders = {"target": self.target.decoder}
        if self.draft is not None:
            decoders["draft"] = self.draft.decoder
        return decoders | {shadow.name: shadow.config.decoder for shadow in self.shadows}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The page groups' windows: first None if there are layers that need all positions, then
        the widest."""
        windows = {window for name in self.decoders for window in self._layer_windows(name)}
        return tuple(sorted(windows, key=lambda window: -(window or math.inf)))

    def _layer_windows(self, name: str) -> list[int | None]:
        """Return each layer's window, None if it needs all positions or hardly fewer. A drafter's
        layers, whose context is stored at once, all have its widest one."""
        windows = [mask.window for mask in self.decoders[name].masks]
        if name != "target":
            widest = max(math.inf if window is None else window for window in windows)
            windows = [None if widest == math.inf else int(widest)] * len(windows)
        max_pages = self.limits.max_pages
        return [w if w is not None and self._held(w) < max_pages else None for w in windows]

    def _held(self, window: int) -> int:
        """Return the maximum of pages that a decoding sequence holds in a group with a window."""
        limits = self.limits
        margin = return_margin(limits.page_size) if self.num_kept_states else 0
        rows = self.backends.overlap * limits.lookahead
        return max_held(window + margin, rows, limits.page_size)

    @property
    def kv_groups(self) -> dict[str, KVSpec]:
        """The K/V shapes of the target and of each drafter."""
        groups: dict[str, KVSpec] = {}
        for name, decoder in self.decoders.items():
            spec = kv_spec(decoder, self.backends.kv_dtype)
            if len(self.windows) > 1:
                layers = [self.windows.index(window) for window in self._layer_windows(name)]
                spec = replace(spec, groups=tuple(layers))
            groups[name] = spec
        return groups

    @property
    def page_groups(self) -> list[PageGroup]:
        """The page groups, which target and drafters share."""
        limits = self.limits
        rows = self.backends.overlap * limits.max_num_batched_tokens
        specs = self.kv_groups.values()
        page_bytes = [
            sum(spec.bytes_per_page(limits.page_size, group) for spec in specs)
            for group in range(len(self.windows))
        ]
        return [
            PageGroup(page_bytes=size)
            if window is None
            else PageGroup(
                page_bytes=size,
                window=window,
                held=self._held(window),
                in_flight=-(-rows // limits.page_size),
            )
            for size, window in zip(page_bytes, self.windows, strict=True)
        ]

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent layers' states, the spare slot's included."""
        spec = self.target.states
        if spec is None:
            return 0
        per_slot = spec.bytes_per_slot(1 + self.limits.num_drafts, self.dtype)
        return (self.limits.max_num_seqs + 1) * per_slot

    @property
    def kept_state_bytes(self) -> int:
        """Bytes of the recurrent layers' states in the prefix cache."""
        spec = self.target.states
        return 0 if spec is None else self.num_kept_states * spec.bytes_per_kept_state(self.dtype)

    @property
    def num_kept_states(self) -> int:
        """The number of states that the prefix cache keeps of recurrent layers. Raises ValueError
        for a budget that holds none."""
        spec = self.target.states
        if spec is None or not self.config.enable_prefix_caching:
            return 0
        size = spec.bytes_per_kept_state(self.dtype)
        if self.config.state_cache_memory is None:
            budget = STATE_CACHE_ON_GPU if self.device.type == "cuda" else STATE_CACHE_ON_CPU
            return max(min(KEPT_STATES, budget // size), 1)
        budget = parse_bytes(self.config.state_cache_memory)
        if budget < size:
            raise ValueError(
                f"state_cache_memory is {self.config.state_cache_memory} ({budget} bytes), but one "
                f"state of the recurrent layers takes {size} bytes; raise it, or turn prefix "
                "caching off."
            )
        return budget // size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all page groups of this rank."""
        size = self.limits.page_size
        return sum(spec.bytes_per_page(size) for spec in self.kv_groups.values())

    @property
    def host_capacity(self) -> HostCapacity:
        """The pages and states of this rank that host memory keeps. With recurrent layers, each
        has half of the bytes. Raises ValueError for a budget that holds none."""
        config = self.config
        if config.kv_offload_memory is None:
            return HostCapacity()
        typed = parse_bytes(config.kv_offload_memory, "kv_offload_memory")
        budget = typed // self.split.size
        spec = self.target.states
        state_bytes = 0 if spec is None else spec.bytes_per_kept_state(self.dtype)
        page_bytes = self.page_bytes
        shares = 2 if state_bytes else 1
        needed = shares * max(page_bytes, state_bytes)
        if budget < needed:
            parts = f"one page of {self.limits.page_size} tokens takes {page_bytes} bytes"
            if state_bytes:
                parts += f" and one state of the recurrent layers {state_bytes}"
                parts += ", each in half of it"
            raise ValueError(
                f"kv_offload_memory is {config.kv_offload_memory} ({typed} bytes), but {parts}; "
                f"ask for at least {needed * self.split.size}, or leave it out."
            )
        return HostCapacity(
            page_bytes=budget // shares,
            num_states=budget // 2 // state_bytes if state_bytes else 0,
        )

    @property
    def host_parts(self) -> dict[str, int]:
        """Bytes of each part of this rank in host memory."""
        capacity = self.host_capacity
        spec = self.target.states
        state_bytes = 0 if spec is None else spec.bytes_per_kept_state(self.dtype)
        kind = "pinned host memory" if self.device.type == "cuda" else "host memory"
        parts = {
            f"pages in {kind}": capacity.page_bytes,
            f"states in {kind}": capacity.num_states * state_bytes,
        }
        return {part: size for part, size in parts.items() if size}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that this rank's pages and states take there."""
        return sum(self.host_parts.values())

    @property
    def sampling_bytes(self) -> int:
        """Bytes of the sampling tables on a CPU. On a GPU they are part of scratch."""
        if self.device.type != "cpu":
            return 0
        return SamplingState.num_bytes(self.limits.max_num_seqs, self.target.decoder.vocab_size)

    def memory_bill(self, num_pages: Sequence[int]) -> MemoryBill:
        """Return the bytes of each part of this rank. num_pages: of each page group."""
        parts = {f"weights of {name}": size for name, size in self.weights.items()}
        parts |= self._page_bytes_by_part(num_pages)
        parts["states of requests"] = self.state_bytes
        parts["kept states"] = self.kept_state_bytes
        captured = self.scratch.captured if self.backends.graphs else 0
        parts["tensors of a step"] = self.scratch.rows + self.scratch.captured - captured
        parts["logits"] = self.scratch.logits
        parts["captured steps (CUDA graphs)"] = captured
        parts["copies of pages and states"] = self.scratch.copies
        parts["sampling tables"] = self.sampling_bytes + self.scratch.sampling
        parts["page tables"] = len(self.windows) * page_table_bytes(self.limits)
        return MemoryBill(
            device=str(self.device),
            parts={part: size for part, size in parts.items() if size},
            host=self.host_parts,
            tokens=max(num_pages[0] - 1, 0) * self.limits.page_size,
            rank=self.split.rank,
            num_ranks=self.split.size,
        )

    def _page_bytes_by_part(self, num_pages: Sequence[int]) -> dict[str, int]:
        """Return the bytes of each model's pages in each page group."""
        parts: dict[str, int] = {}
        for name, spec in self.kv_groups.items():
            for group, window in enumerate(self.windows):
                part = f"keys and values of {name}"
                if len(self.windows) > 1:
                    part += ", all positions" if window is None else f", window of {window:,}"
                page_bytes = spec.bytes_per_page(self.limits.page_size, group)
                parts[part] = num_pages[group] * page_bytes
        return parts

    def num_pages(self, weights: int = 0) -> list[int]:
        """Return the number of pages of each page group that fit, the reserved ones included.
        weights: bytes still to be loaded. Raises ValueError if too few fit."""
        parts = PartBytes(
            weights=weights,
            states=self.state_bytes,
            kept_states=self.kept_state_bytes,
            sampling=self.sampling_bytes,
            scratch=self.scratch.total,
            host=self.host_bytes,
        )
        return plan_pages(self.config, self.limits, self.page_groups, self.device, parts=parts)


class HostCapacity(NamedTuple):
    """Bytes for pages, and number of states of recurrent layers, in host memory."""

    page_bytes: int = 0
    num_states: int = 0


@dataclass
class Components:
    """The parts that Engine composes."""

    runner: ModelRunner
    proposers: ProposerSet
    state: DecodeState
    sampling: SamplingState
    grammars: GrammarState
    graphs: Graphs | Eager
    pool: PagePool
    stores: dict[str, KVStore]
    states: StateStore | None = None
    kept_states: KeptStates | None = None
    host_tier: HostTier | None = None
    host_store: HostStore | None = None

    def clear_prefix_cache(self) -> None:
        """Free the pages and states that no request holds, in host memory, too."""
        if self.host_tier is not None:
            self.host_tier.clear()
        self.pool.clear_cache()
        if self.kept_states is not None:
            self.kept_states.clear()


def resolve(config: EngineConfig, rank: int = 0) -> ResolvedConfig:
    """Read and check configs and tensor headers, of a rank's part of the models. Raises ValueError
    with a hint."""
    resolved = plan_models(config, rank)
    if config.load_format == "auto":
        check_before_download(resolved)
        fetch_weights(*_model_paths(resolved))
    weights = _check_weights(resolved)
    resolved.num_pages(sum(weights.values()))
    return replace(resolved, weights=weights)


def plan_models(config: EngineConfig, rank: int = 0) -> ResolvedConfig:
    """Return what an engine with these settings needs, but for the bytes of its weights, which are
    not read. Raises ValueError with a hint."""
    typed = config
    config = locate_models(config)
    target, draft = _load_configs(config)
    if config.state_cache_memory is not None and target.states is None:
        logger.warning("state_cache_memory has no effect: the target has no recurrent layers.")
    shadows = load_shadow_configs(typed, config, target)
    if config.weight_dtype == "stored":
        target = hold_stored(target, Path(config.target))
    if (config.draft_weight_dtype or config.weight_dtype) == "stored":
        if draft is not None:
            draft = hold_stored(draft, Path(config.draft or ""))
        shadows = tuple(replace(s, config=hold_stored(s.config, s.path)) for s in shadows)
    return plan_engine(config, target, draft, shadows=shadows, rank=rank)


def plan_engine(
    config: EngineConfig,
    target: TargetConfig,
    draft: DraftConfig | None,
    *,
    shadows: tuple[ShadowDrafter, ...] = (),
    rank: int = 0,
) -> ResolvedConfig:
    """Return what an engine for these models needs, but for the bytes of its weights. Reads no
    file. Raises ValueError for settings that do not fit."""
    method = config.method or ("none" if draft is None else DRAFTER_METHOD)
    split = Split.of(config, rank)
    device = choose_device(config.device, rank, split.size)
    on_gpu = device.type == "cuda"
    if config.gpu_memory_utilization is not None and not on_gpu:
        logger.warning("gpu_memory_utilization has no effect on a CPU; kv_cache_memory has.")
    drafts = [shadow.config for shadow in shadows] if draft is None else [draft]
    model_max = min(model.decoder.max_position for model in (target, *drafts))
    if config.shadow:
        limits = shadow_limits(config, shadows, model_max=model_max, gpu=on_gpu)
    else:
        limits = resolve_limits(config, model_max=model_max, method=method, draft=draft, gpu=on_gpu)
    dtype = _choose_dtype(config, target, device)
    backends = choose_backends(config, target, drafts, device=device, dtype=dtype)
    shadows = tuple(replace(s, config=split.split_draft(target, s.config)) for s in shadows)
    target, draft = split.split(target, draft)
    num_features = len({layer for config in drafts for layer in config.capture})
    scratch = Scratch()
    if on_gpu:
        scratch = plan_scratch(limits, target.decoder, num_features, dtype)
    if on_gpu and target.states is not None and config.enable_prefix_caching:
        copies = STATES_IN_A_COPY * target.states.bytes_per_kept_state(dtype)
        scratch = scratch._replace(copies=copies)
    resolved = ResolvedConfig(
        config=config,
        target=target,
        draft=draft,
        method=method,
        limits=limits,
        device=device,
        dtype=dtype,
        backends=backends,
        scratch=scratch,
        split=split,
        shadows=shadows,
    )
    if on_gpu and config.kv_offload_memory is not None:
        copies = scratch.copies + staging_bytes(resolved.page_bytes)
        resolved = replace(resolved, scratch=scratch._replace(copies=copies))
    return resolved


def _load_configs(config: EngineConfig) -> tuple[TargetConfig, DraftConfig | None]:
    """Read the checkpoints' configs. Raises ValueError if they do not fit each other or the
    settings."""
    target_path = Path(config.target)
    target = load_target_config(target_path)
    if config.draft is None:
        if config.draft_sample_method == "greedy" and set(config.shadow_draft) <= {LOOKUP}:
            raise ValueError(
                "draft_sample_method is 'greedy', but no drafter is loaded; name one with "
                "draft, or leave draft_sample_method out."
            )
        return target, None
    draft_path = Path(config.draft)
    draft = load_draft_config(draft_path, target_path)
    check_pair(draft, target, draft_path)
    return target, draft


def _choose_dtype(config: EngineConfig, target: TargetConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of activations: by default float32 on a CPU, elsewhere the target's own."""
    native_dtype = "float32" if device.type == "cpu" else target.dtype
    return getattr(torch, native_dtype if config.dtype == "auto" else config.dtype)


def _model_paths(resolved: ResolvedConfig) -> list[Path]:
    config = resolved.config
    shadows = [shadow.path for shadow in resolved.shadows]
    drafts = [] if config.draft is None else [Path(config.draft)]
    return [*drafts, *shadows, Path(config.target)]


def check_before_download(resolved: ResolvedConfig) -> None:
    """Raise ValueError if weights are still to be downloaded, and an engine with them does not fit,
    as far as the configs tell their size."""
    if not any(map(missing_weights, _model_paths(resolved))):
        return
    try:
        weights = weight_sizes(resolved)
    except ValueError as error:
        logger.warning("Whether the weights fit is known once they are downloaded: %s", error)
    else:
        resolved.num_pages(sum(weights.values()))


def weight_sizes(resolved: ResolvedConfig) -> dict[str, int]:
    """Return the bytes that this rank's weights of each model will take, as far as the configs
    tell. Reads no file. Raises ValueError for a format whose size only its tensors tell."""
    return _sizes(resolved, _models(resolved, open=None))


def _check_weights(resolved: ResolvedConfig) -> dict[str, int]:
    """Return the bytes that this rank's weights of each model will take. Raises ValueError for
    tensors that the models do not have or lack."""
    config = resolved.config
    opener = resolved.split.opener(config.load_format)
    models = _models(resolved, opener)
    if opener is not None and resolved.backends.kv_dtype == FP8:
        target = models["target"]
        assert isinstance(target, Target)
        read_kv_scales(target, opener(Path(config.target)), resolved.target.quantization)
    return _sizes(resolved, models)


def _models(resolved: ResolvedConfig, open: Open) -> dict[str, Target | DFlash]:
    """Return this rank's part of each model on the meta device, by name."""
    config = resolved.config
    models: dict[str, Target | DFlash] = {
        "target": check_target_tensors(Path(config.target), resolved.target, open)
    }
    if resolved.draft is not None:
        models["draft"] = check_draft_tensors(Path(config.draft or ""), resolved.draft, open)
    for shadow in resolved.shadows:
        models[shadow.name] = check_draft_tensors(shadow.path, shadow.config, open)
    return models


def _sizes(resolved: ResolvedConfig, models: Mapping[str, Target | DFlash]) -> dict[str, int]:
    """Return the bytes of each model's weights in memory, in the formats that hold them."""
    backends = resolved.backends
    sizes: dict[str, int] = {}
    for name, model in models.items():
        held = backends.draft_weights if isinstance(model, DFlash) else backends.weights
        sizes[name] = weight_bytes(model, resolved.dtype, **held._asdict())
    return sizes


def kv_spec(decoder: DecoderConfig, dtype: torch.dtype) -> KVSpec:
    """Return the K/V shapes of a decoder's layers with attention."""
    shapes = map(decoder.shape_of, range(len(decoder.masks)))
    return KVSpec(tuple((s.num_kv_heads, s.head_dim) for s in shapes), dtype)


def build(resolved: ResolvedConfig, target: Target | None = None) -> Components:
    """Load the weights, size the pool and wire the parts. target: weights loaded elsewhere."""
    resolved.split.require_group()
    if resolved.device.type == "cuda":  # streams, events and kernels are the current device's
        torch.cuda.set_device(resolved.device)
    target, drafters = _load_models(resolved, target)
    _settle_threads(resolved)
    pages = [resolved.split.fewest(count, resolved.device) for count in resolved.num_pages()]
    logger.info("\n".join(resolved.memory_bill(pages).lines()))
    graphs, buckets = _make_graphs(resolved)
    stores = _make_stores(resolved, pages)
    _scale_keys_and_values(resolved, target, stores["target"])
    ops = _make_step_ops(resolved)
    state = _make_decode_state(resolved, pages, ops)
    sampling = _make_sampling(resolved, ops)
    states = _make_states(resolved)
    backend, draft_backend = _make_backends(resolved, states, ops)
    make_runner = partial(ModelRunner, state=state, sampling=sampling, buckets=buckets)
    draft_runners = {
        name: make_runner(model=drafter, store=stores[name], backend=draft_backend)
        for name, drafter in drafters.items()
    }
    proposers = _make_proposers(resolved, drafters, draft_runners, graphs)
    runner = make_runner(
        model=target,
        store=stores["target"],
        backend=backend,
        capture=proposers.capture,
    )
    pool = _make_pool(resolved, pages)
    kept_states = _make_kept_states(resolved, states, pool)
    host_store = _make_host_store(resolved, stores, states, pool)
    return Components(
        runner=runner,
        proposers=proposers,
        state=state,
        sampling=sampling,
        grammars=_make_grammars(resolved),
        graphs=graphs,
        pool=pool,
        stores=stores,
        states=states,
        kept_states=kept_states,
        host_tier=_make_host_tier(resolved, host_store, pool, kept_states),
        host_store=host_store,
    )


def _settle_threads(resolved: ResolvedConfig) -> None:
    """Run more threads if a process that is gone had kept a core busy at import. Ranks share the
    cores, each with its own number of threads."""
    if resolved.device.type != "cpu" or resolved.split.size > 1:
        return
    threads = idle_threads(os.environ, usable_cores())
    if threads is not None:
        logger.info("%d threads instead of %d: cores are idle", threads, torch.get_num_threads())
        torch.set_num_threads(threads)


def _load_models(
    resolved: ResolvedConfig, target: Target | None
) -> tuple[Target, dict[str, DFlash]]:
    """Load the target, unless it is given, and the drafters by their K/V groups, and give them
    their operations."""
    backends = resolved.backends
    for path, draft in _draft_sources(resolved).values():  # before the target takes its time
        opener = resolved.split.opener(resolved.config.load_format)
        check_draft_tensors(path, draft, opener, values=True)
    if target is None:
        target = _load_target(resolved)
    drafters = _load_drafters(resolved, target)
    _set_operations(resolved, target, drafters.values())
    pack(backends.weights.packed, target)
    for drafter in drafters.values():
        pack_drafter(backends.draft_weights.packed, drafter, target)
    _release_memory(resolved.device)
    return target, drafters


def _load_target(resolved: ResolvedConfig) -> Target:
    weights = resolved.backends.weights
    target = load_target(
        Path(resolved.config.target),
        resolved.target,
        max_positions=resolved.limits.num_positions,
        **_load_options(resolved),
        **weights._asdict(),
    )
    quantization = resolved.target.quantization
    if quantization is not None and not weights.fp8:
        size = sum(parameter.nbytes for parameter in target.parameters())
        size += held_bytes(target)
        logger.info("Weights in %s take %d bytes in memory.", quantization.method, size)
    return target


def _load_drafters(resolved: ResolvedConfig, target: Target) -> dict[str, DFlash]:
    """Load the drafters, by the names of their K/V groups."""
    return {
        name: load_draft(
            path,
            draft,
            target,
            max_positions=resolved.limits.num_positions,
            **_load_options(resolved),
            **resolved.backends.draft_weights._asdict(),
        )
        for name, (path, draft) in _draft_sources(resolved).items()
    }


def _draft_sources(resolved: ResolvedConfig) -> dict[str, tuple[Path, DraftConfig]]:
    """Return the directories and configs of the drafters, by the names of their K/V groups."""
    sources = {shadow.name: (shadow.path, shadow.config) for shadow in resolved.shadows}
    if resolved.draft is not None:
        sources["draft"] = (Path(resolved.config.draft or ""), resolved.draft)
    return sources


def _load_options(resolved: ResolvedConfig) -> LoadOptions:
    load_format = resolved.config.load_format
    return LoadOptions(
        dtype=resolved.dtype,
        device=resolved.device,
        open=resolved.split.opener(load_format),
        uniform=load_format == "uniform",
    )


def _set_operations(resolved: ResolvedConfig, target: Target, drafters: Iterable[DFlash]) -> None:
    """Give the models their operations, in the form that suits the device and the split."""
    kernels = resolved.backends.kernels
    ops = TorchOps()
    if kernels:
        from strobe.models.ops.triton_ops import TritonOps
        from strobe.models.quantization.kernel_weights import join_all, join_parts

        ops = TritonOps(resolved.device, resolved.dtype)  # models of one stream share a workspace
        join_all(target)
        for model in (target, *drafters):
            join_parts(model)
    elif resolved.backends.compiled:
        from strobe.models.ops.compiled_ops import CompiledOps

        ops = CompiledOps()
    for model in (target, *drafters):
        model.ops = resolved.split.ops(ops, model, kernels=kernels)


def _make_step_ops(resolved: ResolvedConfig) -> StepOps:
    """Make the operations of steps in the form that suits the device."""
    if resolved.backends.kernels:
        from strobe.runner.step_ops.triton_step_ops import TritonStepOps

        return TritonStepOps()
    return NumpyStepOps() if resolved.device.type == "cpu" else StepOps()


def _release_memory(device: torch.device) -> None:
    """Return to the system what loading no longer needs, so that it counts as free."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        trim_heap()  # the weights before packing


def _make_graphs(resolved: ResolvedConfig) -> tuple[Graphs | Eager, Buckets | None]:
    """Make what runs steps: CUDA graphs and the sizes they have, or eager calls."""
    if not resolved.backends.graphs:
        return Eager(), None
    limits = resolved.limits
    buckets = Buckets(
        limits.max_num_seqs,
        limits.num_drafts,
        limits.lookahead,
        narrow=resolved.config.adaptive,
    )
    return Graphs(CUDACapturer()), buckets


def _make_proposers(
    resolved: ResolvedConfig,
    drafters: Mapping[str, DFlash],
    draft_runners: Mapping[str, ModelRunner],
    graphs: Graphs | Eager,
) -> ProposerSet:
    """Make the proposers of the drafting methods, or those that shadow mode scores."""
    context = ProposerContext(config=resolved.config, device=resolved.device, graphs=graphs)
    contexts = {
        name: replace(context, drafter=drafter, draft_runner=draft_runners[name])
        for name, drafter in drafters.items()
    }
    if resolved.config.shadow:
        return make_shadow_proposers(context, contexts)
    return make_proposers(contexts.get("draft", context))


def _make_pool(resolved: ResolvedConfig, pages: Sequence[int]) -> PagePool:
    """Make the pools of all page groups; return the first one's."""
    size = resolved.limits.page_size
    groups = list(zip(pages, resolved.windows, strict=True))
    others = [PagePool(count, size, window=window) for count, window in groups[1:]]
    first, window = groups[0]
    return PagePool(first, size, window=window, others=others)


def _make_stores(resolved: ResolvedConfig, pages: Sequence[int]) -> dict[str, KVStore]:
    """Make the K/V tensors of target and drafters, with a spare page in each page group if steps
    are captured."""
    num_pages = [count + int(resolved.backends.graphs) for count in pages]
    return {
        name: KVStore(spec, num_pages, resolved.limits.page_size, resolved.device)
        for name, spec in resolved.kv_groups.items()
    }


def _scale_keys_and_values(resolved: ResolvedConfig, target: Target, store: KVStore) -> None:
    opener = resolved.split.opener(resolved.config.load_format)
    if opener is not None:
        checkpoint = opener(Path(resolved.config.target))
        use_kv_scales(store, target, checkpoint, resolved.target.quantization)


def _make_decode_state(resolved: ResolvedConfig, pages: Sequence[int], ops: StepOps) -> DecodeState:
    """Make the tables of the slots. Rows that only fill up a bucket write to the spare page of each
    group, the last one."""
    spare_pages = pages if resolved.backends.graphs else [0] * len(pages)
    return DecodeState(resolved.limits, resolved.device, ops, spare_pages=spare_pages)


def _make_sampling(resolved: ResolvedConfig, ops: StepOps) -> SamplingState:
    vocab_size = resolved.target.decoder.vocab_size
    num_slots = resolved.limits.max_num_seqs
    return resolved.split.sampling(num_slots, vocab_size, resolved.device, ops)


def _make_grammars(resolved: ResolvedConfig) -> GrammarState:
    tokenizer = Path(resolved.config.target) / "tokenizer.json"
    vocab_size = resolved.target.decoder.vocab_size
    return GrammarState(GrammarCompiler(tokenizer, vocab_size, resolved.target.eos_ids))


def _make_backends(
    resolved: ResolvedConfig, states: StateStore | None, ops: StepOps
) -> tuple[AttentionBackend, AttentionBackend]:
    """Make the attention backends of the target and of the drafter."""
    drafts = [shadow.config for shadow in resolved.shadows]
    if resolved.draft is not None:
        drafts.append(resolved.draft)
    backend, draft_backend = make_backends(
        resolved.backends, resolved.target, drafts, resolved.device
    )
    if states is not None:
        backend = RecurrentBackend(backend, states, ops.cover)
    return backend, draft_backend


def _make_states(resolved: ResolvedConfig) -> StateStore | None:
    """Make the states of recurrent layers, if the target has any."""
    spec = resolved.target.states
    if spec is None:
        return None
    limits = resolved.limits
    return StateStore(
        spec,
        num_slots=limits.max_num_seqs,
        pending=1 + limits.num_drafts,
        dtype=resolved.dtype,
        device=resolved.device,
        num_kept=resolved.num_kept_states,
    )


def _make_kept_states(
    resolved: ResolvedConfig, states: StateStore | None, pool: PagePool
) -> KeptStates | None:
    """Make the index of kept states, if there are any."""
    if states is None or not resolved.num_kept_states:
        return None
    return KeptStates(
        resolved.num_kept_states,
        pool.page_size,
        has_page=lambda key: pool.lookup(key) is not None,
    )


def _make_host_store(
    resolved: ResolvedConfig,
    stores: dict[str, KVStore],
    states: StateStore | None,
    pool: PagePool,
) -> HostStore | None:
    """Make the prefix cache's host memory, if the settings ask for it. Page groups share it as they
    share the device's. Its rows are the same on all ranks."""
    size, num_states = resolved.host_capacity
    if not size:
        return None
    split = resolved.split
    page_size = pool.page_size
    on_device = group_bytes(resolved.page_groups, [group.num_pages for group in pool.groups])
    num_pages = [max(group.num_pages * size // on_device, 1) for group in pool.groups]
    return HostStore(
        list(stores.values()),
        page_size,
        [split.fewest(count, resolved.device) for count in num_pages],
        states=states,
        num_states=num_states and split.fewest(num_states, resolved.device),
        device=resolved.device,
    )


def _make_host_tier(
    resolved: ResolvedConfig, store: HostStore | None, pool: PagePool, kept: KeptStates | None
) -> HostTier | None:
    """Make the bookkeeping of the prefix cache's host memory, if there is any."""
    if store is None:
        return None
    bytes_per_ms = store.measure()
    sizes = zip(store.num_pages, store.page_bytes, strict=True)
    tier = HostTier(
        pool,
        [HostRows(count, page_bytes) for count, page_bytes in sizes],
        kept=kept,
        states=HostRows(store.num_states, store.state_bytes),
        pages_per_step=max(int(COPY_MS * bytes_per_ms) // sum(store.page_bytes), 1),
        bytes_per_ms=bytes_per_ms,
        runs_beside_steps=resolved.device.type == "cuda",
    )
    logger.info(
        "Host memory keeps %s tokens%s in %s bytes, copied at %.1f GB/s.",
        f"{store.num_pages[0] * pool.page_size:,}",
        f" and {store.num_states} states" if store.num_states else "",
        f"{resolved.host_bytes:,}",
        bytes_per_ms / 1e6,
    )
    return tier
