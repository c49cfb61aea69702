"""Facts about a checkpoint, read only from its config and tensor headers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from strobe.config import EngineConfig
from strobe.engine.backend_choice import WeightFormat
from strobe.hub.download import missing_weights
from strobe.hub.files import GGUF_LINK, read_json, source_of
from strobe.hub.gguf_file import read_header
from strobe.kv.states import StateSpec
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.checkpoint import Checkpoint
from strobe.models.config_readers.detection import method_of
from strobe.models.config_readers.pair import check_pair
from strobe.models.model_config import DecoderConfig, DraftConfig, TargetConfig
from strobe.models.quantization import methods
from strobe.models.quantization.fp8 import SCALE
from strobe.models.quantization.gguf_codes import CODES
from strobe.models.weight_loading import Open, check_draft_tensors, check_target_tensors
from strobe.parallel.split import ALONE, Split
from strobe.terminal.wording import counted
from strobe.tools.memory_table import memory_facts
from strobe.tools.weight_storage import storage_facts, storage_text

Module = TypeVar("Module", bound=nn.Module)


def describe(model: Path, draft: Path | None = None, split: Split = ALONE) -> dict[str, Any]:
    """Return the facts of a target or a drafter, and of the pair if `draft` is set. Weights
    that only the hub has are not downloaded: then the facts are those of the configs.

    Raises ValueError for a damaged or unsupported checkpoint, a pair that does not fit, or ranks
    that cannot share the model.
    """
    if method_of(read_json(model / "config.json")) is not None:
        _require_drafter_alone(model, draft, split)
        return _draft_facts(model)
    config = load_target_config(model)
    draft_config = None if draft is None else load_draft_config(draft, model)
    if draft is not None and draft_config is not None:
        check_pair(draft_config, config, draft)
    own_config, own_draft = split.split(config, draft_config)
    memory = memory_facts(_settings(model, draft, split), config, draft_config)
    facts = _target_facts(model, config) | {"memory": memory}
    if config.states is not None:
        facts |= _state_facts(config, config.states, draft_config)
    if split.size > 1:
        facts["ranks"] = split.size
        part = _checked(
            model, split, lambda opener: check_target_tensors(model, own_config, opener)
        )
        facts |= _rank_facts(part, own_config)
    if draft is not None and own_draft is not None:
        facts["draft"] = _draft_facts(draft, model)
        if split.size > 1:
            part = _checked(
                draft, split, lambda opener: check_draft_tensors(draft, own_draft, opener)
            )
            facts["draft"] |= _rank_facts(part, own_draft)
        facts["pair"] = "fits"
    return facts


def _settings(model: Path, draft: Path | None, split: Split) -> EngineConfig:
    """Return the default settings of an engine for these models on so many ranks, which are on the
    CPU if there is no GPU."""
    has_choice = split.size == 1 or torch.cuda.is_available()
    return EngineConfig(
        target=str(model),
        draft=None if draft is None else str(draft),
        device="auto" if has_choice else "cpu",
        tensor_parallel_size=split.size,
        draft_tensor_parallel_size=split.draft_size,
        enable_expert_parallel=split.whole_experts,
    )


def _require_drafter_alone(model: Path, draft: Path | None, split: Split) -> None:
    """Raise ValueError if a drafter stands where the target of a pair or of ranks should."""
    if draft is not None:
        raise ValueError(f"{model} is a drafter itself; name the target first, then --draft.")
    if split.size > 1:
        raise ValueError(f"{model} is a drafter; name the target that ranks share, then --draft.")


def _target_facts(path: Path, config: TargetConfig) -> dict[str, Any]:
    missing = missing_weights(path)
    target = _checked(path, ALONE, lambda opener: check_target_tensors(path, config, opener))
    facts = {
        "path": str(path),
        "kind": "target",
        "architecture": config.architecture,
        **(_expected_facts(target, missing) if missing else _weight_facts(path)),
        **decoder_facts(config.decoder),
        "tie_embeddings": (config if target is None else target.config).tie_embeddings,
        "dtype": config.dtype,
    }
    if config.quantization is not None:
        facts["quantization"] = methods.describe(config.quantization, config.decoder)
    if not missing:
        facts |= {**_gguf_types(path), **_storage_facts(path, config)}
    return facts | {
        "end_token_ids": list(config.eos_ids),
        "default_sampling": config.sampling,
    }


def _state_facts(
    config: TargetConfig, states: StateSpec, draft_config: DraftConfig | None
) -> dict[str, Any]:
    """Return what the recurrent layers of a target need."""
    pending = 1 + (0 if draft_config is None else draft_config.block_drafts)
    dtype: torch.dtype = getattr(torch, config.dtype)
    return {
        "recurrent_layers": states.layers,
        "recurrent_state_bytes_per_request": states.bytes_per_slot(pending, dtype),
        "kept_state_bytes": states.bytes_per_kept_state(dtype),
        "prefix_caching": "every 64 positions or more, where a state is kept (state_cache_memory)",
    }


def _parameters(name: str, module: nn.Module | None) -> dict[str, int]:
    """Return a model's number of parameters under a name; nothing if it is not known."""
    if module is None:
        return {}
    return {name: sum(parameter.numel() for parameter in module.parameters())}


def _rank_facts(part: nn.Module | None, config: TargetConfig | DraftConfig) -> dict[str, Any]:
    """Return what the first of several ranks holds of a model, which no other one exceeds."""
    return {
        **_parameters("parameters_on_each_rank", part),
        "kv_bytes_per_token_bf16_on_each_rank": _kv_bytes(config.decoder),
    }


def _kv_bytes(decoder: DecoderConfig) -> int:
    """Return the bytes of a token's keys and values in bfloat16."""
    layers = map(decoder.shape_of, range(len(decoder.masks)))
    return 4 * sum(shape.num_kv_heads * shape.head_dim for shape in layers)


def _draft_facts(path: Path, target: Path | None = None) -> dict[str, Any]:
    config = load_draft_config(path, target)
    missing = missing_weights(path)
    module = _checked(path, ALONE, lambda opener: check_draft_tensors(path, config, opener))
    return {
        "path": str(path),
        "kind": f"{config.method} drafter",
        "format": config.format,
        **(_expected_facts(module, missing) if missing else _weight_facts(path)),
        **decoder_facts(config.decoder),
        **drafting_facts(config),
        **({} if missing else _storage_facts(path, config)),
    }


def drafting_facts(config: DraftConfig) -> dict[str, Any]:
    """Return what a drafter's config says of its blocks and of its head."""
    masks = [
        f"{'causal' if mask.causal else 'bidirectional'}"
        + (f", window {mask.window}" if mask.window is not None else "")
        for mask in config.decoder.masks
    ]
    facts = {
        "block_size": config.block_size,
        "drafts_per_block": f"{config.block_drafts}, the first slot "
        + ("predicts too" if config.anchor_first else "holds the newest token"),
        "draft_vocabulary": config.head_rows,
        "mask_token_id": config.mask_token_id,
        "reads_output_of_target_layers": [k - 1 for k in config.capture],
        "attention": masks,
        "dtype": config.dtype,
    }
    return facts if config.head is None else {**facts, "head": asdict(config.head)}


def _gguf_types(path: Path) -> dict[str, str]:
    """Return the types of a GGUF file's tensors."""
    if not (path / GGUF_LINK).exists():
        return {}
    counts = Counter(tensor.type for tensor in read_header(source_of(path)).tensors.values())
    types = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    text = f"{types}; dequantized when loaded, weight_dtype says to what"
    if counts.keys() & CODES.keys():
        kept = ", ".join(name for name in counts if name in CODES)
        text += f"; exact with weight_dtype stored, in which layers keep their codes of {kept}"
    return {"tensors": text}


def _storage_facts(path: Path, config: TargetConfig | DraftConfig) -> dict[str, dict[str, str]]:
    """Return how each kind of weights is stored, and how exact it is in the model's dtype; of a
    GGUF file `_gguf_types` tells."""
    if (path / GGUF_LINK).exists():
        return {}
    dtype: torch.dtype = getattr(torch, config.dtype)
    weights = WeightFormat(fp8=False, packed=None, rounded=None)
    kinds = storage_facts(Checkpoint(path), config, weights, dtype, measure=False)
    texts = {name: storage_text(facts) for name, facts in kinds.items()}
    if config.quantization is not None:
        for name, facts in kinds.items():
            if facts["error"] is None:
                texts[name] += "; exact with weight_dtype stored"
    return {"stored_weights": texts}


def _weight_facts(path: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(path)
    shapes = {n: s for n, s in checkpoint.shapes.items() if not n.endswith((SCALE, "_scales"))}
    counts = [math.prod(s) * (2 if n.endswith("_blocks") else 1) for n, s in shapes.items()]
    return {
        "parameters": sum(counts),
        "bytes_on_disk": sum(map(checkpoint.bytes_of, checkpoint.shapes)),
    }


def _checked(path: Path, split: Split, check: Callable[[Open], Module]) -> Module | None:
    """Return a rank's part of a model, its tensors checked if they are on disk. None if they are
    not, and the config does not tell their size either."""
    if not missing_weights(path):
        return check(split.opener("auto"))
    try:
        return check(None)
    except ValueError:  # which the memory bill says
        return None


def _expected_facts(module: nn.Module | None, missing: Sequence[str]) -> dict[str, Any]:
    """Return what a config tells of weights that are not downloaded."""
    return {
        **_parameters("parameters", module),
        "weights": f"{counted(len(missing), 'file')} to download; their tensors are checked then",
    }


def decoder_facts(decoder: DecoderConfig) -> dict[str, Any]:
    """Return what a config says of a model's layers."""
    return {
        "layers": decoder.num_layers,
        "hidden_size": decoder.hidden_size,
        "heads": f"{decoder.num_heads} query, {decoder.num_kv_heads} key-value, "
        f"{decoder.head_dim} wide",
        "vocabulary": decoder.vocab_size,
        "context": decoder.max_position,
        "kv_bytes_per_token_bf16": _kv_bytes(decoder),
    }


def show(facts: dict[str, Any]) -> None:
    """Print facts as a table."""
    from rich.console import Console
    from rich.table import Table

    console = Console(markup=False, emoji=False, highlight=False)
    table = Table(show_header=False)
    for name, value in facts.items():
        if name == "stored_weights":
            table.add_row(
                "stored weights", "\n".join(f"{kind}: {text}" for kind, text in value.items())
            )
        elif name not in ("path", "draft", "memory"):
            table.add_row(name.replace("_", " "), _text(value))
    console.out(facts["path"])
    console.print(table)
    if "memory" in facts:
        bill = Table(show_header=False, title="memory in bytes, with default settings")
        for name, value in facts["memory"].items():
            bill.add_row(name, _text(value))
        console.print(bill)
    if "draft" in facts:
        show(facts["draft"])


def _text(value: Any) -> str:
    """Format a fact for reading."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items()) or "none"
    if isinstance(value, list):
        items: list[Any] = value
        if len(items) > 1 and len(set(items)) == 1:
            return f"{items[0]} in all {len(items)} layers"
        return ", ".join(map(str, items)) or "none"
    return str(value)
