"""Checks of a pair before it runs: sizes, tokens, layers, rope, masks, files and memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from strobe.engine.build import ResolvedConfig
from strobe.host.free_memory import free_memory
from strobe.hub.download import fetch_weights, missing_weights
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.config_readers.pair import check_pair
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.models.target import Target
from strobe.models.weight_loading import check_draft_tensors, check_target_tensors
from strobe.runner.memory import pages_within
from strobe.terminal.wording import counted
from strobe.text.tokenizer import Tokenizer
from strobe.tools.doctor.findings import Report
from strobe.tools.doctor.tokenizers import fingerprint

HASHED_BYTES = 1 << 30
"""Of larger weight files, only the size and SAMPLES evenly spaced pieces of SAMPLE bytes are
hashed."""
SAMPLES = 256
SAMPLE = 1 << 20
MASK_NAMES = ("<|mask|>", "<|MASK|>", "<mask>", "[MASK]")

T = TypeVar("T")


def attempt(report: Report, about: str, run: Callable[[], T]) -> T | None:
    """Return run()'s result; if it raises ValueError, report the sentence as a fault and return
    None."""
    try:
        return run()
    except ValueError as error:
        report.fault(about, str(error))
        return None


def check_files(
    report: Report,
    target: Path,
    draft: Path,
    check_memory: Callable[[TargetConfig, DraftConfig], None],
) -> tuple[Any, Any, Any, bool]:
    """Check configs, tensors and tokenizer; return the target's config, the drafter's, the
    tokenizer (each None if it cannot be read), and whether the configs fit. Weights are downloaded
    only if the configs fit and `check_memory` raises no ValueError; weights on disk are checked in
    any case."""
    target_config = attempt(report, "target's config", lambda: load_target_config(target))
    draft_config = attempt(report, "drafter's config", lambda: load_draft_config(draft, target))
    fits = (
        target_config is not None
        and draft_config is not None
        and check_fit(report, target_config, draft_config, draft)
        and _succeeds(report, "settings", lambda: check_memory(target_config, draft_config))
    )
    if target_config is not None and (fits or not missing_weights(target)):
        _tensors(
            report,
            "target's tensors",
            target,
            lambda: check_target_tensors(target, target_config, values=True),
        )
    if draft_config is not None and (fits or not missing_weights(draft)):
        _tensors(
            report,
            "drafter's tensors",
            draft,
            lambda: check_draft_tensors(draft, draft_config, values=True),
        )
    tokenizer = attempt(report, "tokenizer", lambda: Tokenizer(target))
    report.facts["files"] = {
        "target": hashes(target),
        "drafter": hashes(draft),
        "tokenizer": tokenizer and fingerprint(target),
    }
    return target_config, draft_config, tokenizer, fits


def _succeeds(report: Report, about: str, check: Callable[[], None]) -> bool:
    """Return whether a check raises no ValueError; if it does, report the sentence as a fault."""
    num_faults = len(report.faults)
    attempt(report, about, check)
    return len(report.faults) == num_faults


def _tensors(report: Report, about: str, path: Path, check: Callable[[], Target | DFlash]) -> None:
    module = attempt(report, about, lambda: _fetch_and_check(path, check))
    if module is not None:
        count = sum(parameter.numel() for parameter in module.parameters())
        report.ok(about, f"{count:,} values, every tensor as config.json says.")


def _fetch_and_check(path: Path, check: Callable[[], Target | DFlash]) -> Target | DFlash:
    fetch_weights(path)
    return check()


def hashes(directory: Path) -> dict[str, str]:
    """Return SHA-256 digests of config.json and each weight file; a digest of samples says so."""
    digests: dict[str, str] = {}
    for path in sorted([*directory.glob("config.json"), *directory.glob("*.safetensors")]):
        digest = hashlib.sha256()
        size = path.stat().st_size
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
    """Report the pair's sizes and layout; return whether they fit."""
    target_decoder = target.decoder
    draft_decoder = draft.decoder
    draft_rope = draft_decoder.rope
    target_rope = target_decoder.rope
    report.facts["fit"] = {
        "hidden size": f"{draft_decoder.hidden_size} for {target_decoder.hidden_size}",
        "vocabulary": f"{draft_decoder.vocab_size} for {target_decoder.vocab_size}",
        "block": f"{counted(draft.block_size, 'slot')}, {counted(draft.block_drafts, 'draft')}",
        "anchor layout": "the first slot predicts too"
        if draft.anchor_first
        else "the first slot holds the newest token and predicts nothing",
        "format": draft.format,
        "captured after layers": ", ".join(map(str, draft.capture))
        + f" of {target_decoder.num_layers} (counted from 1; 0 is the embedding); config.json has "
        + f"{', '.join(map(str, draft.capture_ids))} in {draft.capture_ids_key}",
        "mask token": draft.mask_token_id,
        "rope": f"base {draft_rope.theta:g}, {draft_rope.kind} (target: {target_rope.theta:g}, "
        f"{target_rope.kind})",
        "layers": _masks(draft),
    }
    before = len(report.faults)
    attempt(report, "fit", lambda: check_pair(draft, target, path))
    if len(report.faults) == before:
        report.ok("fit", "Sizes, vocabulary and captured layers match.")
    return len(report.faults) == before


def _masks(draft: DraftConfig) -> str:
    """Summarize the layers' masks, such as "4 causal, 1 bidirectional"."""
    counts: dict[str, int] = {}
    for mask in draft.decoder.masks:
        name = "causal" if mask.causal else "bidirectional"
        name += f" within {mask.window}" if mask.window is not None else ""
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def mask_candidates(tokenizer: Tokenizer, rows: int) -> dict[int, str]:
    """Return ids that may be the drafter's mask token, each with the reason."""
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
    """Check the tokenizer against the embedding, the end tokens and the mask token, and against the
    drafter's own tokenizer if there is one."""
    rows = target.decoder.vocab_size
    draft_tokenizer = attempt(report, "drafter's tokenizer", lambda: fingerprint(path))
    size = max(tokenizer.hf.get_vocab().values(), default=0) + 1
    if size > rows:
        report.fault(
            "tokenizer",
            f"The tokenizer has ids up to {size - 1}, but the target's embedding only {rows} rows; "
            "use the tokenizer published with the target.",
        )
    end = tokenizer.hf.eos_token_id
    if end is not None and target.eos_ids and int(end) not in target.eos_ids:
        report.fault(
            "tokenizer",
            f"The tokenizer's end token {tokenizer.hf.eos_token!r} is {end}, but the target ends "
            f"with {', '.join(map(str, target.eos_ids))}; use the tokenizer published with the "
            "target.",
        )
    if draft_tokenizer is not None and draft_tokenizer != report.facts["files"]["tokenizer"]:
        report.fault(
            "tokenizer",
            "The drafter's directory holds a different tokenizer than the target's (their SHA-256 "
            "differ); use a pair that was trained together.",
        )
    candidates = mask_candidates(tokenizer, rows)
    text = tokenizer.token_text(draft.mask_token_id) if draft.mask_token_id < size else ""
    if draft.mask_token_id in candidates:
        report.ok("mask token", f"{draft.mask_token_id} is {candidates[draft.mask_token_id]}.")
    elif text:
        report.note(
            "mask token",
            f"{draft.mask_token_id} is the token {text!r}, which is in use; a mask token or an "
            "unused row is usual"
            + "".join(f", here {i} ({reason})" for i, reason in candidates.items())
            + ".",
        )
    else:
        report.ok("mask token", f"{draft.mask_token_id} is a row that no token uses.")


def memory_facts(resolved: ResolvedConfig) -> dict[str, int | str]:
    """Return the memory bill, the format that holds the weights, the bytes per token of both
    caches, and the tokens that would fit without a limit on the caches; call it before loading."""
    size = resolved.limits.page_size
    groups = resolved.kv_groups
    per_token = {name: spec.bytes_per_page(size) // size for name, spec in groups.items()}
    weights = sum(resolved.weights.values())
    bill = resolved.memory_bill(resolved.num_pages(weights))
    free = free_memory(resolved.device)
    if resolved.device.type == "cpu":  # which all ranks share
        free //= resolved.split.size
    without_pages = resolved.memory_bill([0] * len(resolved.windows))
    room = max(free - sum(without_pages.parts.values()), 0)
    return {
        **bill.facts(),
        **_weight_format(resolved),
        "target's keys and values of a token": per_token["target"],
        "drafter's keys and values of a token": sum(per_token.values()) - per_token["target"],
        "free memory": free,
        "tokens that fit": _tokens_within(resolved, room),
    }


def _tokens_within(resolved: ResolvedConfig, size: int) -> int:
    """Return the tokens of context that so many bytes of keys and values hold."""
    page_size = resolved.limits.page_size
    groups = resolved.page_groups
    if len(groups) == 1:
        return size * page_size // groups[0].page_bytes
    return pages_within(groups, resolved.limits, size)[0] * page_size


def _weight_format(resolved: ResolvedConfig) -> dict[str, str]:
    """Return the format that packed weights or a quantized target's have in memory."""
    packed = resolved.backends.weights.packed
    if packed in ("int8", "int4"):
        return {"held in": f"{packed}, heads in float16; the most at loading"}
    if resolved.backends.weights.rounded is not None:
        return {"held in": f"{resolved.backends.weights.rounded}; heads and experts are not"}
    stored = resolved.target.quantization
    if stored is not None and stored.held:
        return {"held in": f"{stored.label or stored.method}, as in the checkpoint"}
    dtype = str(resolved.dtype).removeprefix("torch.")
    if stored is None:
        return {} if packed in (None, dtype) else {"held in": packed}
    dtype = packed or dtype
    memory_format = "fp8, a scale for each row" if resolved.backends.weights.fp8 else dtype
    if resolved.target.decoder.experts is not None:
        memory_format = (
            f"experts in {stored.method} as in the checkpoint, the rest in {memory_format}"
        )
        return {"held in": memory_format}
    return {"held in": f"{memory_format}; the checkpoint has them in {stored.method}"}
