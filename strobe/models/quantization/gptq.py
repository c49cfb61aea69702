"""Checkpoints of GPTQ and of AutoRound, which have GPTQ's tensors or AWQ's.

A weight is `qweight` [K * bits / 32, N], `scales` and `qzeros` per group of inputs, and perhaps
`g_idx`, the group of each input. In the first version of the format a stored zero is less by one.
With `sym` zeros are the middle of the codes' range, and what `qzeros` holds has no meaning.
"""

from __future__ import annotations

from typing import Any

from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.model_config import DecoderConfig, Quantization
from strobe.models.quantization.compressed_tensors import read_names
from strobe.models.quantization.detected import apply, describe, experts_format
from strobe.models.quantization.rules import LINEAR, Rule, Rules, Scheme

__all__ = ["apply", "describe", "experts_format", "read"]

BITS = (2, 4, 8)
HARMLESS = (
    "quant_method", "desc_act", "static_groups", "true_sequential", "damp_percent", "meta",
    "modules_in_block_to_quantize", "block_name_to_quantize", "model_seqlen", "dataset",
    "model_name_or_path", "model_file_base_name", "is_marlin_format", "exllama_config",
    "max_input_length", "use_exllama", "cache_block_outputs", "batch_size", "pad_token_id",
    "tokenizer", "use_cuda_fp16", "backend", "autoround_version", "iters", "lr", "minmax_lr",
    "nsamples", "seqlen", "enable_quanted_input", "enable_minmax_tuning", "low_gpu_mem_usage",
    "gradient_accumulate_steps", "act_bits", "act_data_type", "act_dynamic", "act_group_size",
    "act_sym", "amp", "scale_dtype", "quant_block_list", "to_quant_block_names", "format",
    "provider",
)  # fmt: skip
"""Keys of GPTQ's and AutoRound's configs that do not affect the stored form of weights."""


def read(fields: Fields, decoder: DecoderConfig) -> Quantization:
    """Raises ValueError for codes of other sizes and unknown packings."""
    method = fields.get("quant_method")
    fields.only("pack_dtype", "int32", why="use a checkpoint whose words have 32 bits.")
    fields.only("data_type", "int", why=f"its codes must be integers; {HINT}")
    why = "use a checkpoint in gptq or gptq_v2."
    fields.only("checkpoint_format", "gptq", "gptq_v2", why=why)
    packing = fields.get("packing_format", "auto_round:auto_gptq")
    is_awq = "awq" in str(packing)
    is_symmetric = fields.flag("sym", True)
    if not (is_awq or is_symmetric or "gptq" in str(packing)):
        raise ValueError(
            f"{fields.path}: packing_format is {packing!r}, which is not supported for asymmetric "
            "weights; use a checkpoint in auto_round:auto_gptq."
        )
    is_v2 = is_awq or fields.get("checkpoint_format") == "gptq_v2"
    base = {
        "bits": fields.integer("bits"),
        "group_size": fields.get("group_size", -1),
        "sym": is_symmetric,
        "desc_act": fields.flag("desc_act") and not is_awq,
    }
    rules = list[Rule]()
    ignored = read_names(fields, "modules_to_not_convert")
    if not fields.flag("lm_head") and method == "gptq":
        ignored.append("lm_head")
    overrides = [*fields.object("dynamic").items(), *fields.object("extra_config").items()]
    for pattern, values in overrides:
        target = _target(pattern)
        own = base | (values if isinstance(values, dict) else {})
        if pattern.startswith("-:") or own["bits"] >= 16:
            ignored.append(target)
        else:
            scheme = _scheme(own, f"{fields.path}: {pattern}", is_v2=is_v2)
            rules.append(Rule((target,), scheme))
    rules.append(Rule(LINEAR, _scheme(base, str(fields.path), is_v2=is_v2)))
    fields.finish(HARMLESS)
    names = Rules(rules=tuple(rules), ignored=tuple(ignored), loose=True)
    return Quantization(method=str(method), block=(1, 1), rules=names)


def _target(pattern: str) -> str:
    """Return the target of an override: GPTQ's begin with +: or -:, AutoRound's may be names."""
    if pattern.startswith(("+:", "-:")):
        return f"re:{pattern[2:]}"
    is_name = all(part.isidentifier() or part.isdigit() for part in pattern.split("."))
    return pattern if is_name else f"re:{pattern}"


def _scheme(values: dict[str, Any], place: str, *, is_v2: bool) -> Scheme:
    bits = values["bits"]
    group = values["group_size"]
    if bits not in BITS:
        raise ValueError(
            f"{place}: bits is {bits!r}, which is not supported; use a checkpoint in "
            f"{', '.join(map(str, BITS))} bits."
        )
    return Scheme(
        kind="int",
        bits=bits,
        group=group if isinstance(group, int) and group > 0 else None,
        asymmetric=not values["sym"],
        zero_offset=0 if is_v2 else 1,
        indexed=bool(values["desc_act"]) and isinstance(group, int) and group > 0,
    )
