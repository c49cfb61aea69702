"""The engine's settings: one frozen dataclass for the API, the command line and the docs."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from strobe.checks import between
from strobe.sampling_params import METHODS, option

BOX = Path(__file__).parent / "demo_models"
DTYPES = ("auto", "float32", "bfloat16", "float16")
GPU_MIXED_TOKENS = 512
"""The rows up to which a step with prompts is replayed on a GPU; an 8B model takes 13 ms there."""
CHOICES = {
    "draft_sample_method": ("greedy", "probabilistic"),
    "load_format": ("auto", "dummy"),
    "weight_dtype": ("auto", "fp8"),
    "kv_cache_dtype": ("auto", "fp8"),
    "attention_backend": ("auto", "triton", "reference"),
    "draft_attention_backend": ("auto", "triton", "reference"),
    "kernels": ("auto", "triton", "torch"),
}
"""The values of the options that name one of a few."""
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(value: int | str) -> int:
    """Bytes from 1073741824, "1GiB", "512M" (powers of two). Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", str(value).lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if isinstance(value, bool) or size < 1:
        raise ValueError(
            f"kv_cache_memory is {value!r}, but must be a positive size such as 2GiB or 1073741824."
        )
    return size


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from. `check()` raises ValueError before anything is loaded."""

    target: str = option(
        "", "Directory or hub name of the target model; empty is the pair in the box."
    )
    draft: str | None = option(
        None, "Directory or hub name of the DFlash drafter; auto takes the published one."
    )
    revision: str | None = option(None, "Branch, tag or commit of the target's hub name.")
    draft_revision: str | None = option(None, "Branch, tag or commit of the drafter's hub name.")
    method: str | None = option(
        None,
        "How requests draft unless they say: dflash, ngram or none; by default the best there is.",
    )
    num_drafts: int | None = option(
        None, "Tokens drafted and verified per step; by default the drafter's block size less one."
    )
    draft_sample_method: str = option(
        "greedy",
        "greedy: drafts are the drafter's most probable tokens; probabilistic: they are drawn as "
        "the request's own tokens are.",
    )
    max_model_len: int | None = option(
        None, "Longest prompt plus answer in tokens; by default the model's own limit."
    )
    max_num_seqs: int = option(32, "Most requests decoding at once.")
    max_num_batched_tokens: int | None = option(
        None,
        "Most target rows in one step; by default 2048, on a GPU 8192, or what max_num_seqs needs.",
    )
    kv_cache_memory: int | str | None = option(
        None, "Bytes for keys and values of target and drafter, such as 2GiB; by default chosen."
    )
    gpu_memory_utilization: float | None = option(
        None, "Share of a GPU's memory that may be in use, others' included; by default the rest."
    )
    page_size: int = option(16, "Tokens per page of the KV cache.")
    enable_prefix_caching: bool = option(
        True, "Reuse pages of earlier requests that begin with the same tokens."
    )
    dtype: str = option("auto", "auto, float32, bfloat16 or float16; auto is float32 on a CPU.")
    device: str = option("auto", "auto, cpu, cuda or cuda:N; auto takes a GPU where there is one.")
    overlap: int | None = option(
        None,
        "Steps in flight: 1 waits for each, 2 launches the next meanwhile; by default 2 on a GPU.",
    )
    load_format: str = option(
        "auto", "auto reads weights; dummy makes random ones by config.json, to measure speed."
    )
    weight_dtype: str = option(
        "auto", "auto keeps weights in dtype; fp8 holds products in FP8, on a GPU that has it."
    )
    kv_cache_dtype: str = option("auto", "auto keeps keys and values in dtype; fp8 halves them.")
    attention_backend: str = option(
        "auto", "auto, triton or reference; auto takes triton where it runs."
    )
    draft_attention_backend: str | None = option(
        None, "The drafter's attention backend; by default the target's."
    )
    kernels: str = option(
        "auto", "auto, triton or torch: what runs norms, products and sampling on a GPU."
    )
    cuda_graphs: bool = option(True, "Replay decoding steps from captured graphs on a GPU.")
    seed: int = option(0, "Seeds requests that bring no seed of their own.")
    ngram_max: int = option(4, "Longest run of tokens that prompt lookup matches.")
    ngram_min: int = option(2, "Shortest run of tokens that prompt lookup matches.")

    def check(self) -> EngineConfig:
        """Itself, if every value makes sense by itself."""
        if self.draft is not None and not str(self.draft):
            raise ValueError("draft is empty; name the drafter's directory, or leave draft out.")
        for name in ("max_num_seqs", "page_size", "ngram_max", "ngram_min"):
            self._whole(name)
        for name in ("num_drafts", "max_model_len", "max_num_batched_tokens"):
            if getattr(self, name) is not None:
                self._whole(name)
        if self.kv_cache_memory is not None:
            parse_bytes(self.kv_cache_memory)
        share = self.gpu_memory_utilization
        if share is not None:
            between("gpu_memory_utilization", share, 0.01, 1, "0.9 leaves a tenth of the GPU free.")
            if self.kv_cache_memory is not None:
                raise ValueError(
                    f"gpu_memory_utilization is {share} and kv_cache_memory is "
                    f"{self.kv_cache_memory}, but both size the KV cache; give one of them."
                )
        if self.method is not None and self.method not in METHODS:
            raise ValueError(f"method is {self.method!r}; name one of {', '.join(METHODS)}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; name one of {', '.join(DTYPES)}.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,9})?", str(self.device)):
            raise ValueError(f"device is {self.device!r}; name auto, cpu, cuda or cuda:N.")
        if self.overlap is not None and (
            type(self.overlap) is not int or not 1 <= self.overlap <= 2
        ):
            raise ValueError(f"overlap is {self.overlap!r}, but must be 1 or 2.")
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known and not (value is None and name == "draft_attention_backend"):
                raise ValueError(f"{name} is {value!r}; name one of {', '.join(known)}.")
        if self.ngram_max > 32:
            raise ValueError(
                f"ngram_max is {self.ngram_max}, but must be at most 32; every run of up to so "
                "many tokens is remembered."
            )
        if self.ngram_min > self.ngram_max:
            raise ValueError(
                f"ngram_min is {self.ngram_min}, above ngram_max {self.ngram_max}; "
                "lower the one or raise the other."
            )
        for name in ("enable_prefix_caching", "cuda_graphs"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}, but must be True or False.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed is {self.seed!r}, but must be a whole number.")
        return self

    def _whole(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, but must be a whole number of at least 1.")

    def plain(self) -> EngineConfig:
        """Itself without a drafter."""
        none = {"draft": None, "draft_revision": None, "method": "none", "num_drafts": None}
        return replace(self, **none, draft_sample_method="greedy")

    def with_(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed. Raises ValueError for a name that is no field."""
        known = {f.name for f in fields(self)}
        for name in changes:
            if name not in known:
                raise ValueError(
                    f"{name} is no engine option; the options are {', '.join(sorted(known))}."
                )
        return replace(self, **changes)


@dataclass(frozen=True)
class Limits:
    """What was resolved from the settings and the checkpoints, in tokens and sequences.

    max_mixed_tokens: rows of a step that prefills beside requests which decode, so that these go on
    at nearly their usual pace; where they alone need more than half of it, half is for prompts.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_drafts: int
    page_size: int
    drafter_block: int = 0
    max_mixed_tokens: int | None = None

    @property
    def block(self) -> int:
        """Positions a drafting step may write: what is verified, and the drafter's own block."""
        return max(1 + self.num_drafts, self.drafter_block)

    @property
    def max_pages(self) -> int:
        """Page-table columns of one request."""
        return -(-self.max_model_len // self.page_size)


def resolve_limits(
    config: EngineConfig,
    *,
    model_max: int,
    drafter_block: int | None,
    drafter_drafts: int | None = None,
    recommended: int | None = None,
    method: str,
    gpu: bool = False,
) -> Limits:
    """Fill in the defaults. Raises ValueError for values that do not go together.

    model_max: positions the checkpoints allow. drafter_block: the drafter's block size, if any;
    drafter_drafts: the drafts in it, by default one less; recommended: how many to make unless
    config says. gpu: whether it runs on one, where many rows cost little more than few.
    """
    length = config.max_model_len if config.max_model_len is not None else model_max
    if length > model_max:
        raise ValueError(
            f"max_model_len is {length}, but the model's positions end at {model_max}; "
            f"ask for at most {model_max}."
        )
    if length < 2:
        raise ValueError(
            "max_model_len is 1, which leaves no room for an answer; ask for 2 or more."
        )
    longest = drafter_block - 1 if drafter_block is not None else None
    longest = longest if drafter_drafts is None else drafter_drafts
    drafts = config.num_drafts
    if drafts is None:
        drafts = longest if longest is not None else (8 if method == "ngram" else 0)
        drafts = min(drafts, recommended or drafts)
    elif longest is not None and drafts > longest:
        raise ValueError(
            f"num_drafts is {drafts}, but the drafter's blocks of {drafter_block} hold at most "
            f"{longest} drafts; ask for 1 to {longest}."
        )
    elif longest is None and method == "none":
        raise ValueError(
            f"num_drafts is {drafts}, but nothing drafts; name a drafter, or method ngram."
        )
    elif longest is None and drafts >= length:
        raise ValueError(
            f"num_drafts is {drafts}, but max_model_len is {length}; ask for at most {length - 1}."
        )
    needed = config.max_num_seqs * (drafts + 1)
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = max(8192 if gpu else 2048, needed)
    elif budget < needed:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but {config.max_num_seqs} requests verifying "
            f"{drafts} drafts each need {needed}; raise it to {needed}, or lower max_num_seqs or "
            "num_drafts."
        )
    return Limits(
        length,
        config.max_num_seqs,
        budget,
        drafts,
        config.page_size,
        drafter_block or 0,
        GPU_MIXED_TOKENS if gpu else None,
    )
