"""What can be said of a pair before it runs: sizes, tokens, layers, rope, masks, files, memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from strobe.engine.build import ResolvedConfig, kv_groups, state_bytes
from strobe.free_memory import free_memory
from strobe.hub.download import fetch_weights, missing_weights
from strobe.models.config import DraftConfig, TargetConfig
from strobe.models.config_readers.pair import check_pair
from strobe.models.dflash import DFlash
from strobe.models.load import check_draft_tensors, check_target_tensors, weight_bytes
from strobe.models.registry import load_draft_config, load_target_config
from strobe.models.target import Target
from strobe.text.tokenizer import Tokenizer
from strobe.tools.doctor.findings import Report
from strobe.tools.doctor.tokenizers import fingerprint

HASHED_BYTES = 1 << 30
"""Larger weight files are hashed by their sizes and SAMPLES pieces of SAMPLE bytes, spread evenly
from the header to the end."""
SAMPLES, SAMPLE = 256, 1 << 20
MASK_NAMES = ("<|mask|>", "<|MASK|>", "<mask>", "[MASK]")

T = TypeVar("T")


def attempt(report: Report, about: str, run: Callable[[], T]) -> T | None:
    """What it returns; None where it raises ValueError, whose sentence is a fault."""
    try:
        return run()
    except ValueError as error:
        report.fault(about, str(error))
        return None


def check_files(report: Report, target: Path, draft: Path) -> tuple[Any, Any, Any, bool]:
    """Configs, tensors and tokenizers of both, and whether they fit; returns target's and drafter's
    configs and the tokenizer, each None where it cannot be read, and whether they do. Weights are
    fetched for pairs that fit only; those that are here are looked at in any case."""
    target_config = attempt(report, "target's config", lambda: load_target_config(target))
    draft_config = attempt(report, "drafter's config", lambda: load_draft_config(draft, target))
    fits = (
        target_config is not None
        and draft_config is not None
        and check_fit(report, target_config, draft_config, draft)
    )
    if target_config is not None and (fits or not missing_weights(target)):
        _tensors(
            report, "target's tensors", target, lambda: check_target_tensors(target, target_config)
        )
    if draft_config is not None and (fits or not missing_weights(draft)):
        _tensors(
            report, "drafter's tensors", draft, lambda: check_draft_tensors(draft, draft_config)
        )
    tokenizer = attempt(report, "tokenizer", lambda: Tokenizer(target))
    report.facts["files"] = {
        "target": hashes(target),
        "drafter": hashes(draft),
        "tokenizer": tokenizer and fingerprint(target),
    }
    return target_config, draft_config, tokenizer, fits


def _tensors(report: Report, about: str, path: Path, check: Callable[[], Target | DFlash]) -> None:
    def fetched() -> Target | DFlash:
        fetch_weights(path)
        return check()

    checked = attempt(report, about, fetched)
    if checked is not None:
        count = sum(parameter.numel() for parameter in checked.parameters())
        report.ok(about, f"{count:,} values, every tensor as config.json says.")


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of config.json and of each weight file; of a large one's samples, marked."""
    digests: dict[str, str] = {}
    for path in sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")]):
        digest, size = hashlib.sha256(), path.stat().st_size
        with path.open("rb") as file:
            if size <= HASHED_BYTES:
                digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
                continue
            digest.update(str(size).encode())
            for i in range(SAMPLES):
                file.seek(max(size - SAMPLE, 0) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE))
        digests[path.name] = f"size and {SAMPLES} samples: {digest.hexdigest()}"
    return digests


def check_fit(report: Report, target: TargetConfig, draft: DraftConfig, path: Path) -> bool:
    """Sizes, vocabulary, captured layers and mask token against each other."""
    theirs, ours = target.decoder, draft.decoder
    report.facts["fit"] = {
        "hidden size": f"{ours.hidden_size} for {theirs.hidden_size}",
        "vocabulary": f"{ours.vocab_size} for {theirs.vocab_size}",
        "block": f"{draft.block_size} slots, {draft.block_drafts} drafts",
        "anchor layout": "the first slot predicts too"
        if draft.anchor_first
        else "the first slot holds the newest token and predicts nothing",
        "format": draft.format,
        "captured after layers": ", ".join(map(str, draft.capture))
        + f" of {theirs.num_layers} (counted from 1; 0 is the embedding), which config.json names "
        + f"{', '.join(map(str, draft.capture_ids))} in {draft.capture_ids_key}",
        "mask token": draft.mask_token_id,
        "rope": f"base {ours.rope.theta:g}, {ours.rope.kind} (target: {theirs.rope.theta:g}, "
        f"{theirs.rope.kind})",
        "layers": _masks(draft),
    }
    before = len(report.faults)
    attempt(report, "fit", lambda: check_pair(draft, target, path))
    if len(report.faults) == before:
        report.ok("fit", "sizes, vocabulary and captured layers go together.")
    return len(report.faults) == before


def _masks(draft: DraftConfig) -> str:
    """The layers' masks, like ones together."""
    counts: dict[str, int] = {}
    for mask in draft.decoder.masks:
        name = "causal" if mask.causal else "bidirectional"
        name += f" within {mask.window}" if mask.window is not None else ""
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def mask_candidates(tokenizer: Tokenizer, rows: int) -> dict[int, str]:
    """Ids that a drafter may have been trained to fill in, with what speaks for each."""
    candidates: dict[int, str] = {}
    if tokenizer.hf.mask_token_id is not None:
        candidates[int(tokenizer.hf.mask_token_id)] = "the tokenizer's mask token"
    vocabulary: dict[str, int] = tokenizer.hf.get_vocab()
    for name in MASK_NAMES:
        if name in vocabulary:
            candidates.setdefault(int(vocabulary[name]), f"the token {name}")
    if len(tokenizer.hf) < rows:
        candidates.setdefault(len(tokenizer.hf), "the first row that no token uses")
    return candidates


def check_tokens(
    report: Report, tokenizer: Tokenizer, target: TargetConfig, draft: DraftConfig, path: Path
) -> None:
    """The tokenizer against the embedding, the end tokens and the mask token, and against the
    drafter's own tokenizer where it brings one."""
    rows = target.decoder.vocab_size
    draft_tokenizer = attempt(report, "drafter's tokenizer", lambda: fingerprint(path))
    size = max(tokenizer.hf.get_vocab().values(), default=0) + 1
    if size > rows:
        report.fault(
            "tokenizer",
            f"The tokenizer has ids up to {size - 1}, but the target's embedding only {rows} rows; "
            "use the tokenizer that the target was published with.",
        )
    end = tokenizer.hf.eos_token_id
    if end is not None and target.eos_ids and int(end) not in target.eos_ids:
        report.fault(
            "tokenizer",
            f"The tokenizer's end token {tokenizer.hf.eos_token!r} is {end}, but the target ends "
            f"with {', '.join(map(str, target.eos_ids))}; use the tokenizer that the target was "
            "published with.",
        )
    if draft_tokenizer is not None and draft_tokenizer != report.facts["files"]["tokenizer"]:
        report.fault(
            "tokenizer",
            "The drafter's directory holds another tokenizer than the target's (their SHA-256 "
            "differ); use the pair that was trained together.",
        )
    candidates = mask_candidates(tokenizer, rows)
    text = tokenizer.token_text(draft.mask_token_id) if draft.mask_token_id < size else ""
    if draft.mask_token_id in candidates:
        report.ok("mask token", f"{draft.mask_token_id} is {candidates[draft.mask_token_id]}.")
    elif text:
        report.note(
            "mask token",
            f"{draft.mask_token_id} is the token {text!r}, which has a meaning of its own; usual "
            "is a mask token or an unused row"
            + "".join(f", here {i} ({why})" for i, why in candidates.items())
            + ".",
        )
    else:
        report.ok("mask token", f"{draft.mask_token_id} is a row that no token uses.")


def memory_bill(resolved: ResolvedConfig, target: Target, draft: DFlash) -> dict[str, int | str]:
    """Bytes of weights as they are held, bytes per token of both caches, and how many tokens fit
    beside; to be asked before anything is loaded. target, draft: on the meta device."""
    groups = kv_groups(resolved.target, resolved.drafts, resolved.backends.kv_dtype)
    size = resolved.limits.page_size
    each = {name: spec.bytes_per_page(size) // size for name, spec in groups.items()}
    first, second = (
        weight_bytes(module, resolved.dtype, fp8=resolved.backends.fp8)
        for module in (target, draft)
    )
    free = free_memory(resolved.device)
    states = state_bytes(resolved.target, resolved.limits, resolved.dtype)
    room = max(free - first - second - states - resolved.scratch, 0)
    return {
        "target's weights": first,
        **_held(resolved),
        "drafter's weights": second,
        "target's keys and values of a token": each["target"],
        "drafter's keys and values of a token": sum(each.values()) - each["target"],
        "free memory": free,
        "tokens that fit": room // sum(each.values()),
    }


def _held(resolved: ResolvedConfig) -> dict[str, str]:
    """What a quantized target's weights become in memory."""
    stored = resolved.target.quantization
    if stored is None:
        return {}
    dtype = str(resolved.dtype).removeprefix("torch.")
    held = "fp8, a scale for each row" if resolved.backends.fp8 else dtype
    return {"held in": f"{held}; the checkpoint has them in {stored.method}"}
