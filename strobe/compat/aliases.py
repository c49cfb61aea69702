"""Option aliases: options of vLLM, SGLang and openinfer, translated to Strobe's own.

The tables' keys are the other engines' names, with underscores; docs/command-line.md lists them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from strobe.sampling_params import METHODS

logger = logging.getLogger(__name__)

BLOCK_DRAFTERS = ("dflash", "dflash2", "dspark")
"""Other engines' methods of drafters that Strobe runs under one name."""

RENAMED = {
    "model": "target",
    "model_path": "target",
    "context_length": "max_model_len",
    "max_running_requests": "max_num_seqs",
    "block_size": "page_size",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp_size": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "dp_size": "data_parallel_size",
    "dp": "data_parallel_size",
    "num_replicas": "data_parallel_size",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "random_seed": "seed",
    "speculative_draft_model_path": "draft",
    "speculative_draft_model": "draft",
    "dflash_draft_model_path": "draft",
    "speculative_draft_model_revision": "draft_revision",
    "speculative_draft_attention_backend": "draft_attention_backend",
    "uvicorn_log_level": "log_level",
    "allowed_origins": "cors_origin",
}
"""Other names for our settings."""

SWITCHES: dict[str, tuple[str, object, object]] = {
    "enforce_eager": ("cuda_graphs", False, None),
    "disable_cuda_graph": ("cuda_graphs", False, None),
    "enable_torch_compile": ("compile", True, False),
    "disable_radix_cache": ("enable_prefix_caching", False, None),
    "disable_overlap_schedule": ("overlap", 1, None),
    "async_scheduling": ("overlap", 2, 1),
    "speculative_adaptive": ("adaptive", True, False),
    "disable_uvicorn_access_log": ("access_log", False, None),
    "disable_log_requests": ("access_log", False, None),
}
"""Boolean options there: our setting, its value for true, and for false; None is the default."""

HOST_MEMORY = ("kv_offloading_size", "hicache_size")
"""Host memory for the prefix cache: vLLM's in GiB of all ranks, SGLang's in GB of each rank."""

BLOCKS = ("speculative_dflash_block_size", "speculative_num_draft_tokens")
"""SGLang's names for a block's slots, of which the first is the newest token and not a draft."""

SPEC_OPTIONS = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""vLLM's options for single keys of its speculative_config."""

SPECULATIVE = {
    "model": "draft",
    "method": "method",
    "num_speculative_tokens": "num_drafts",
    "attention_backend": "draft_attention_backend",
    "draft_sample_method": "draft_sample_method",
    "draft_tensor_parallel_size": "draft_tensor_parallel_size",
    "quantization": "draft_weight_dtype",
    "revision": "draft_revision",
    "prompt_lookup_max": "ngram_max",
    "prompt_lookup_min": "ngram_min",
    "enable_adaptive_verification": "adaptive",
}
"""Keys of vLLM's speculative_config."""

_LIBRARIES = ("FLASH_ATTN", "flash_attn", "FLASHINFER", "flashinfer", "fa3", "fa4", "trtllm_mha")
_ATTENTION = {
    **dict.fromkeys(("TRITON_ATTN", "triton_attn"), "triton"),
    **dict.fromkeys(_LIBRARIES, "auto"),
}
SAME = {
    "dtype": {"half": "float16", "float": "float32", "bf16": "bfloat16"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    "load_format": {"safetensors": "auto"},
    "attention_backend": _ATTENTION,
    "draft_attention_backend": _ATTENTION,
}
"""Other names for values of our settings. Naming a library of attention kernels means `auto`."""

_ONE_GPU = "only tensor_parallel_size splits a model"
_KV_SCALES = "keys and values in FP8 have the scales of the checkpoint, or none"
_OWN_TOKENIZER = "Strobe reads the tokenizer as the checkpoint has it"
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(("pipeline_parallel_size", "pp_size", "pp"), ((1,), _ONE_GPU)),
    **dict.fromkeys(
        ("expert_parallel_size", "ep_size", "ep"),
        ((1,), "enable_expert_parallel gives each rank some of the experts"),
    ),
    "cpu_offload_gb": (
        (0, 0.0),
        "Strobe keeps all weights on the device, and kv_offload_memory is for the prefix cache",
    ),
    "kv_offloading_backend": (("native",), "Strobe copies to host memory itself"),
    "enable_hierarchical_cache": ((True,), "hicache_size or kv_offload_memory says so"),
    "hicache_ratio": ((), "kv_offload_memory names the bytes of host memory"),
    "calculate_kv_scales": ((False,), _KV_SCALES),
    "quantization_param_path": ((), _KV_SCALES),
    "enable_lora": ((False,), "Strobe loads no adapters"),
    "tokenizer_mode": (("auto",), _OWN_TOKENIZER),
    "skip_tokenizer_init": ((False,), _OWN_TOKENIZER),
    "task": (("auto", "generate"), "Strobe only generates"),
    "runner": (("auto", "generate"), "Strobe only generates"),
    "generation_config": (("auto",), "Strobe takes default sampling values from the checkpoint"),
    "speculative_eagle_topk": ((1,), "Strobe drafts chains, not trees"),
    "speculative_num_steps": ((1,), "DFlash drafts a block at once"),
    "enable_auto_tool_choice": ((True,), "the model may always choose a tool where tools are"),
    "enable_metrics": ((True,), "/metrics always answers"),
    "disable_log_stats": ((True, False), "get_metrics() always counts"),
}
"""Options that only accept values for what Strobe does anyway, and why it rejects others."""

QUANTIZATION = {
    "quantization": "weight_dtype",
    "speculative_draft_model_quantization": "draft_weight_dtype",
}
ROUNDED = ("fp8", "int8", "int4")
CHECKPOINT_FORMATS = (
    "auto-round", "awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin", "modelopt",
    "modelopt_fp4", "modelopt_mixed", "mxfp4",
)  # fmt: skip
"""Values of vLLM's and SGLang's `quantization` that name what a checkpoint is."""

SPECULATIVE_ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "rejection_sample_method": (("standard", "strict"), "Strobe only verifies without loss"),
    "parallel_drafting": ((True,), "DFlash always drafts a block at once"),
    "enforce_eager": ((False,), "cuda_graphs holds for target and drafter together"),
    "kv_cache_dtype": (("auto",), "kv_cache_dtype holds for target and drafter together"),
    "disable_padded_drafter_batch": ((False,), "DFlash drafts whole blocks"),
    "disable_eagle_block_drop": ((True, False), "DFlash needs no such drop"),
    "use_local_argmax_reduction": ((True, False), "ranks always reduce their parts first"),
    "use_heterogeneous_vocab": ((False,), "target and drafter share one vocabulary"),
}
"""The same for keys of speculative_config."""

_TEXT_ONLY = "Strobe reads text only"
NO_EFFECT: dict[str, tuple[tuple[object, ...], str]] = {
    "limit_mm_per_prompt": ((), _TEXT_ONLY),
    "disable_chunked_mm_input": ((), _TEXT_ONLY),
    "language_model_only": ((True,), _TEXT_ONLY),
    "swap_space": ((0,), "kv_offload_memory keeps pages in host memory"),
    "hicache_write_policy": ((), "pages are copied to host memory before the device evicts them"),
    "hicache_io_backend": ((), "there is one way to copy pages"),
    "hicache_mem_layout": ((), "a page's layers are together in host memory"),
    "enable_chunked_prefill": ((True,), "long prompts are always prefilled in chunks"),
}
"""Options without effect on answers. Values other than these, which describe what Strobe does, are
logged as having no effect."""

ALIASES = frozenset({
    *RENAMED, *SWITCHES, *HOST_MEMORY, *BLOCKS, *SPEC_OPTIONS, *QUANTIZATION, *ONLY, *NO_EFFECT,
    "speculative_config",
    "speculative_algorithm", "trust_remote_code", "tokenizer", "tokenizer_path",
    "tokenizer_revision",
})  # fmt: skip
"""All accepted names besides our own."""
FLAGS = frozenset({
    *SWITCHES, "calculate_kv_scales", "enable_lora", "skip_tokenizer_init", "disable_log_stats",
    "enable_auto_tool_choice", "enable_metrics", "disable_chunked_mm_input", "language_model_only",
    "enable_chunked_prefill", "enable_hierarchical_cache", "trust_remote_code",
})  # fmt: skip
"""Names that need no value on a command line and have a `no-` form."""


@dataclass
class Translation:
    """Settings under our names, and the option and value that each came from."""

    values: dict[str, Any] = field(default_factory=dict[str, Any])
    origins: dict[str, tuple[str, object]] = field(default_factory=dict[str, tuple[str, object]])

    def put(self, name: str, value: object, origin: str, value_text: object) -> None:
        if isinstance(value, str):
            value = SAME.get(name, {}).get(value, value)
        if name in self.values and self.values[name] != value:
            first, earlier = self.origins[name]
            raise ValueError(
                f"{first} is {earlier!r}, but {origin} is {value_text!r}, and both set {name}; "
                "give one of them."
            )
        self.values[name] = value
        self.origins.setdefault(name, (origin, value_text))


def translate(options: Mapping[str, Any]) -> Translation:
    """Translate options to our names. Options without an alias stay as they are, and options set to
    None are left out. Raises ValueError for unsupported values, and for options that contradict
    each other."""
    translation = Translation()
    set_options = {name: value for name, value in options.items() if value is not None}
    for name, value in set_options.items():
        if name not in ALIASES:
            translation.put(name, value, name, value)
    speculative = [
        (f"speculative_config's {k}", k, v) for k, v in _speculative(set_options).items()
    ]
    speculative += [
        (name, key, set_options[name]) for name, key in SPEC_OPTIONS.items() if name in set_options
    ]
    _speculation(translation, [entry for entry in speculative if entry[2] is not None])
    # The ranks first: SGLang counts the host memory of each rank.
    for name, value in sorted(set_options.items(), key=lambda option: option[0] not in RENAMED):
        if name in RENAMED:
            parsed = _listed(name, value) if name == "allowed_origins" else value
            translation.put(RENAMED[name], parsed, name, value)
        elif name in SWITCHES:
            setting, on, off = SWITCHES[name]
            if (on if _switch(name, value) else off) is not None:
                translation.put(setting, on if value else off, name, value)
        elif name in HOST_MEMORY:
            size = _host_memory(name, value, translation.values.get("tensor_parallel_size", 1))
            if size:
                translation.put("kv_offload_memory", size, name, value)
        elif name in BLOCKS:
            translation.put("num_drafts", _drafts(name, value), name, value)
        elif name == "speculative_algorithm":
            translation.put("method", _method(name, value), name, value)
        elif name in QUANTIZATION:
            _quantization(translation, QUANTIZATION[name], name, value)
        elif name in ONLY:
            _only(name, value, *ONLY[name])
        elif name in NO_EFFECT and value not in NO_EFFECT[name][0]:
            logger.warning("%s has no effect: %s.", name, NO_EFFECT[name][1])
        elif name == "trust_remote_code" and _switch(name, value):
            logger.warning("trust_remote_code is set, but code of a checkpoint's own is never run.")
    _tokenizer(set_options, translation.values)
    if translation.values.get("data_parallel_size") == 1:
        del translation.values["data_parallel_size"]  # true where there are no replicas, too
    return translation


def _speculative(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the speculative_config, parsed if it is a text from the command line."""
    value = entry.get("speculative_config", {})
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"speculative_config is {value!r}, which is not JSON ({error}); write "
                """'{"method": "dflash", "model": "...", "num_speculative_tokens": 15}'."""
            ) from None
    if not isinstance(value, Mapping):
        raise ValueError(f"speculative_config is {value!r}, but must be an object.")
    return value


def _quantization(translation: Translation, setting: str, name: str, value: object) -> None:
    """Translate a quantization, which may only name what a checkpoint is."""
    if value in CHECKPOINT_FORMATS:
        logger.warning("%s has no effect: the checkpoint says how it is stored.", name)
    elif value in ROUNDED:
        translation.put(setting, value, name, value)
    else:
        raise ValueError(
            f"{name} is {value!r}, but weights are as in the checkpoint, or rounded to "
            f"{', '.join(ROUNDED)}; leave it out, or give one of these."
        )


def _speculation(translation: Translation, entries: list[tuple[str, str, object]]) -> None:
    """Translate vLLM's speculative keys; entries: name in errors, key and value."""
    keys = {key: value for _, key, value in entries}
    lookup = "ngram" in (keys.get("method"), str(keys.get("model")).strip("[]"))
    for shown, key, value in entries:
        if key == "method":
            translation.put("method", _method(shown, value), shown, value)
        elif key == "model" and lookup:
            if str(value).strip("[]") != "ngram":
                raise ValueError(f"{shown} is {value!r}, but ngram has no model; leave it out.")
            translation.put("method", "ngram", shown, value)
        elif key.startswith("prompt_lookup_") and not lookup:
            raise ValueError(f"{shown} is {value!r}, but is for method ngram only; leave it out.")
        elif key == "quantization":
            _quantization(translation, SPECULATIVE[key], shown, value)
        elif key in SPECULATIVE:
            translation.put(SPECULATIVE[key], value, shown, value)
        elif key in SPECULATIVE_ONLY:
            _only(shown, value, *SPECULATIVE_ONLY[key])
        else:
            raise ValueError(
                f"{shown} is {value!r}, which Strobe does not have; leave it out, or use "
                f"{', '.join(SPECULATIVE)}."
            )
    lone = keys.keys() & {"prompt_lookup_max", "prompt_lookup_min"}
    if len(lone) == 1:  # vLLM uses it for both
        key = lone.pop()
        for setting in ("ngram_max", "ngram_min"):
            translation.put(setting, keys[key], f"speculative_config's {key}", keys[key])


def _method(shown: str, value: object) -> str:
    """Return Strobe's method. A drafter's config tells which head it has, whatever it is called."""
    method = str(value).lower()
    if method in BLOCK_DRAFTERS:
        return "dflash"
    if method not in METHODS:
        raise ValueError(
            f"{shown} is {value!r}, but Strobe drafts with dflash or ngram; name a drafter for "
            "DFlash, DFlash2 or DSpark, or ngram, which needs none."
        )
    return method


def _host_memory(name: str, value: object, ranks: int) -> int:
    """Return the bytes of host memory that an option asks for, of all ranks together."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**20:
        raise ValueError(f"{name} is {value!r}, but must be a number of gigabytes, such as 32.")
    return int(value * 10**9) * ranks if name == "hicache_size" else int(value * 2**30)


def _drafts(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 2:
        raise ValueError(
            f"{name} is {value!r}, but must be a whole number of at least 2: the newest token's "
            "slot and one draft; leave the drafter out for none."
        )
    return value - 1


def _listed(name: str, value: object) -> tuple[str, ...]:
    """Parse a JSON list, vLLM's form on a command line, or a single text."""
    try:
        items = json.loads(value) if isinstance(value, str) and value.startswith("[") else [value]
    except ValueError:
        items = [None]
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ValueError(f"""{name} is {value!r}, but must be texts, such as '["*"]'.""")
    return tuple(map(str, items))


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, but must be True or False.")
    return value


def _only(name: str, value: object, allowed: tuple[object, ...], why: str) -> None:
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        has_values = allowed not in ((), (False,))
        hint = f"; give {' or '.join(map(repr, allowed))}" if has_values else ""
        raise ValueError(f"{name} is {value!r}, but {why}{hint or ', so leave it out'}.")


def _tokenizer(options: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a tokenizer other than the target's own."""
    for name, setting in (
        ("tokenizer", "target"),
        ("tokenizer_path", "target"),
        ("tokenizer_revision", "revision"),
    ):
        if name in options and str(options[name]) != str(settings.get(setting, "")):
            raise ValueError(
                f"{name} is {options[name]!r}, but Strobe reads the target's own tokenizer; leave "
                f"{name} out."
            )
