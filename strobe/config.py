"""The engine's settings: one frozen dataclass for the API, the command line and the docs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo, model_validator

from strobe.sampling_params import Method
from strobe.validation import Texts, brief, option, settings

if TYPE_CHECKING:
    from strobe.models.model_config import DraftConfig

DEMO_MODELS = Path(__file__).parent / "demo_models"
GPU_MIXED_TOKENS = 512
"""Maximum rows of a replayed step with prompts on a GPU, where an 8B model takes 13 ms."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

SERVED_OPTIONS = ("shadow", "shadow_draft", "shadow_share")
"""Options that only a server has."""
SHADOW_SHARE = 0.1
"""Default maximum share of the steps' time for scoring drafters."""

CPU_KV_CACHE = 1 << 30
"""Maximum bytes of the KV cache on a CPU by default, if one context needs no more."""
KEPT_STATES = 32
"""States of recurrent layers that are kept by default, if they need no more than these bytes."""
STATE_CACHE_ON_GPU = 4 << 30
STATE_CACHE_ON_CPU = 256 << 20


def parse_bytes(value: int | str, name: str = "kv_cache_memory") -> int:
    """Parse 1073741824, "1GiB" or "512M" (powers of two) to bytes. name: the setting's, for the
    ValueError that this raises."""
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value).lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ValueError(
            f"{name} is {brief(value)}, but must be a size such as 2GiB or 1073741824."
        )
    return size


def _check_size(value: int | str | None, info: ValidationInfo) -> int | str | None:
    if value is not None:
        parse_bytes(value, info.field_name or "a size")
    return value


def _to_path(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _check_device(value: object) -> str:
    """Return the name of a device or torch.device. Imports no torch."""
    name = str(value) if type(value).__module__ == "torch" else value
    if not isinstance(name, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,9})?", name):
        raise ValueError(f"device is {brief(value)}; name auto, cpu, cuda or cuda:N.")
    return name


Count = Annotated[int, Field(ge=1)]
Directory = Annotated[str, BeforeValidator(_to_path)]
Attention = Literal["auto", "triton", "reference"]
WeightDtype = Literal["auto", "stored", "fp8", "float32", "bfloat16", "float16", "int8", "int4"]


@settings
class EngineConfig:
    """An engine's settings. Raises ValueError for values that are invalid or contradictory."""

    target: Directory = option("", "Directory or hub name of the target; empty is the demo model.")
    draft: Annotated[str, Field(min_length=1), BeforeValidator(_to_path)] | None = option(
        None,
        "Directory or hub name of the drafter; auto takes the published one.",
        "name the drafter's directory, or leave draft out.",
    )
    revision: str | None = option(None, "Branch, tag or commit of the target's hub name.")
    draft_revision: str | None = option(None, "Branch, tag or commit of the drafter's hub name.")
    method: Method | None = option(
        None,
        "Requests' default drafting method: dflash, ngram, dflash+ngram or none; by default dflash "
        "with a drafter, else none.",
    )
    num_drafts: Count | None = option(
        None, "Tokens drafted and verified per step; by default the drafter's block size less one."
    )
    adaptive: bool = option(
        True,
        "Choose the numbers of tokens to draft and verify by measured speed, up to num_drafts; if "
        "off, always num_drafts.",
    )
    draft_sample_method: Literal["greedy", "probabilistic"] = option(
        "probabilistic",
        "probabilistic: drafts are sampled as the request's own tokens are, with the same noise; "
        "greedy: they are the drafter's most probable tokens.",
    )
    max_model_len: Annotated[int, Field(ge=2)] | None = option(
        None,
        "Maximum tokens of prompt and answer together; by default the model's limit.",
        "less leaves no room for an answer.",
    )
    max_num_seqs: Count = option(32, "Maximum requests decoding at once.")
    max_num_batched_tokens: Count | None = option(
        None,
        "Maximum target rows per step; by default 2048, on a GPU 8192, or what max_num_seqs needs.",
    )
    kv_cache_memory: Annotated[int | str | None, PlainValidator(_check_size)] = option(
        None,
        "Bytes for keys and values of target and drafter, such as 2GiB; by default the rest of a "
        "GPU, on a CPU room for one full context or for max_num_seqs short requests.",
    )
    state_cache_memory: Annotated[int | str | None, PlainValidator(_check_size)] = option(
        None,
        "Bytes for states of recurrent layers that the prefix cache keeps, such as 2GiB; by "
        "default room for 32, in at most 4 GiB of a GPU or 256 MiB on a CPU.",
    )
    kv_offload_memory: Annotated[int | str | None, PlainValidator(_check_size)] = option(
        None,
        "Bytes of host memory, such as 32GiB, of all ranks together. The prefix cache copies pages "
        "and states there before the device loses them; by default none.",
    )
    gpu_memory_utilization: Annotated[float, Field(ge=0.01, le=1)] | None = option(
        None, "Share of a GPU's memory that may be in use, others' included; by default the rest."
    )
    page_size: Count = option(16, "Tokens per page of the KV cache.")
    enable_prefix_caching: bool = option(True, "Reuse pages of requests with the same prefix.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU."
    )
    device: Annotated[str, PlainValidator(_check_device)] = option(
        "auto", "auto, cpu, cuda or cuda:N; auto is a GPU if there is one."
    )
    overlap: Annotated[int, Field(ge=1, le=2)] | None = option(
        None,
        "Steps in flight: 1 waits for each, 2 launches the next meanwhile; by default 2 on a GPU.",
    )
    tensor_parallel_size: Count = option(1, "GPUs, or on a CPU processes, that share each layer.")
    draft_tensor_parallel_size: Count | None = option(None, "Ranks of the drafter: 1 or all.")
    enable_expert_parallel: bool = option(False, "Give each rank whole experts, not parts of all.")
    load_format: Literal["auto", "dummy", "uniform"] = option(
        "auto", "auto reads weights; dummy (normal) and uniform draw random ones, to measure speed."
    )
    weight_dtype: WeightDtype = option(
        "auto",
        "auto keeps weights in dtype, on a CPU in float16 if stored in 16 bits or less; stored "
        "keeps quantized ones as the checkpoint has them; fp8 is for GPUs; float32, bfloat16 and "
        "float16 are for CPUs.",
    )
    draft_weight_dtype: WeightDtype | None = option(
        None, "The drafter's weight_dtype; by default the target's."
    )
    kv_cache_dtype: Literal["auto", "fp8"] = option(
        "auto", "auto keeps keys and values in dtype; fp8 halves them."
    )
    attention_backend: Attention = option(
        "auto", "auto, triton or reference; auto is triton where it runs."
    )
    draft_attention_backend: Attention | None = option(
        None, "The drafter's attention backend; by default the target's."
    )
    kernels: Literal["auto", "triton", "torch"] = option(
        "auto", "auto, triton or torch: how norms, linear layers and sampling run on a GPU."
    )
    compile: bool = option(
        False,
        "Compile the operations around products with the machine's C compiler, once, and use them "
        "on a CPU.",
    )
    cuda_graphs: bool = option(True, "Replay decoding steps from captured graphs on a GPU.")
    seed: int = option(0, "Seed of requests that set none.")
    ngram_max: Annotated[int, Field(ge=1, le=32)] = option(
        4, "Longest run of tokens that prompt lookup matches."
    )
    ngram_min: Count = option(2, "Shortest run of tokens that prompt lookup matches.")
    shadow: bool = option(
        False, "Answer by plain decoding, and score drafters on a sample of the requests."
    )
    shadow_draft: Texts = option(
        (),
        "Directory or hub name of a further drafter to score; prompt lookup (ngram) is always "
        "scored.",
    )
    shadow_share: Annotated[float, Field(gt=0, le=1)] = option(
        SHADOW_SHARE, "Maximum share of the steps' time that scoring drafters takes."
    )

    @model_validator(mode="after")
    def _check_together(self) -> EngineConfig:
        if self.gpu_memory_utilization is not None and self.kv_cache_memory is not None:
            raise ValueError(
                f"gpu_memory_utilization is {self.gpu_memory_utilization} and kv_cache_memory is "
                f"{self.kv_cache_memory}, but both size the KV cache; give one of them."
            )
        if self.kv_offload_memory is not None and not self.enable_prefix_caching:
            raise ValueError(
                f"kv_offload_memory is {self.kv_offload_memory}, but prefix caching is off, so "
                "that nothing is kept; leave one of them out."
            )
        if self.method == "none" and self.num_drafts is not None:
            raise ValueError(
                f"num_drafts is {self.num_drafts}, but method is 'none', which drafts nothing; "
                "leave one of them out."
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min is {self.ngram_min}, above ngram_max {self.ngram_max}; "
                "lower the one or raise the other."
            )
        self._check_shadow()
        return self

    def _check_shadow(self) -> None:
        if self.shadow and self.method is not None:
            raise ValueError(
                f"method is {self.method!r}, but in shadow mode all answers come from plain "
                "decoding; leave method or shadow out."
            )
        if self.shadow and self.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, but shadow mode runs on one "
                "device; leave tensor_parallel_size or shadow out."
            )
        if not self.shadow and self.shadow_draft:
            raise ValueError(
                f"shadow_draft is {self.shadow_draft[0]!r}, but shadow is off; set shadow, or "
                "leave shadow_draft out."
            )
        if not self.shadow and self.shadow_share != SHADOW_SHARE:
            raise ValueError(
                f"shadow_share is {self.shadow_share}, but shadow is off; set shadow, or leave "
                "shadow_share out."
            )
        twice = [name for name in self.shadow_draft if self.shadow_draft.count(name) > 1]
        if twice:
            raise ValueError(f"shadow_draft names {twice[0]!r} twice; name each drafter once.")

    def without_draft(self) -> EngineConfig:
        """Return a copy without drafter and drafting."""
        cleared = {"draft": None, "draft_revision": None, "method": "none", "num_drafts": None}
        return replace(self, **cleared, draft_sample_method="probabilistic")

    def with_(self, **changes: Any) -> EngineConfig:
        """Return a copy with some fields changed. Raises ValueError for an unknown name."""
        known = sorted(f.name for f in fields(self))
        for name in changes:
            if name not in known:
                raise ValueError(f"{name} is not an engine option; there are {', '.join(known)}.")
        return replace(self, **changes)


@dataclass(frozen=True)
class Limits:
    """Limits resolved from settings and checkpoints, in tokens and sequences.

    max_mixed_tokens: rows of a step that prefills while requests decode, chosen so that decoding
    hardly slows down; if decoding alone needs more than half of it, half is for prompts.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_drafts: int
    page_size: int
    drafter_block_size: int = 0
    max_mixed_tokens: int | None = None

    @property
    def lookahead(self) -> int:
        """Positions that a drafting step may write: the verified rows or the drafter's block."""
        return max(1 + self.num_drafts, self.drafter_block_size)

    @property
    def num_positions(self) -> int:
        """Positions that rows may have: the context's, and a drafting step's after it."""
        return self.max_model_len + self.lookahead + 1

    @property
    def max_pages(self) -> int:
        """Page-table columns of one request."""
        return -(-self.max_model_len // self.page_size)


def resolve_limits(
    config: EngineConfig,
    *,
    model_max: int,
    method: str,
    draft: DraftConfig | None = None,
    gpu: bool = False,
) -> Limits:
    """Fill in the defaults. Raises ValueError for values that contradict each other.

    model_max: positions that the checkpoints allow. gpu: use the defaults for a GPU, where many
    rows cost little more than few.
    """
    length = config.max_model_len if config.max_model_len is not None else model_max
    if length > model_max:
        raise ValueError(
            f"max_model_len is {length}, but the model's positions end at {model_max}; "
            f"ask for at most {model_max}."
        )
    num_drafts = _resolve_drafts(config.num_drafts, length=length, method=method, draft=draft)
    min_tokens = config.max_num_seqs * (num_drafts + 1)
    max_tokens = config.max_num_batched_tokens
    if max_tokens is None:
        max_tokens = max(8192 if gpu else 2048, min_tokens)
    elif max_tokens < min_tokens:
        raise ValueError(
            f"max_num_batched_tokens is {max_tokens}, but {config.max_num_seqs} requests verifying "
            f"{num_drafts} drafts each need {min_tokens}; raise it to {min_tokens}, or lower "
            "max_num_seqs or num_drafts."
        )
    return Limits(
        max_model_len=length,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_drafts=num_drafts,
        page_size=config.page_size,
        drafter_block_size=draft.block_size if draft is not None else 0,
        max_mixed_tokens=GPU_MIXED_TOKENS if gpu else None,
    )


def _resolve_drafts(
    num_drafts: int | None, *, length: int, method: str, draft: DraftConfig | None
) -> int:
    """Return the drafts per step; None leaves the number to the drafter. Raises ValueError."""
    if draft is not None:
        if num_drafts is None:
            return min(draft.block_drafts, draft.recommended_drafts or draft.block_drafts)
        if num_drafts > draft.block_drafts:
            raise ValueError(
                f"num_drafts is {num_drafts}, but the drafter's blocks of {draft.block_size} hold "
                f"at most {draft.block_drafts} drafts; ask for 1 to {draft.block_drafts}."
            )
        return num_drafts
    if num_drafts is None:
        return 0 if method == "none" else 8
    if method == "none":
        raise ValueError(
            f"num_drafts is {num_drafts}, but nothing drafts; name a drafter, or method ngram."
        )
    if num_drafts >= length:
        raise ValueError(
            f"num_drafts is {num_drafts}, but max_model_len is {length}; ask for at most "
            f"{length - 1}."
        )
    return num_drafts
