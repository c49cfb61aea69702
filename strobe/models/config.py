"""What the engine knows of a checkpoint before any weight is read: its config.json, checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strobe.attention.mask import LayerMask
from strobe.models.methods import check_method, method_of
from strobe.models.rope import RopeConfig, read_rope
from strobe.request import SamplingParams

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes that a checkpoint may be in."""


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a stack of Qwen3-style decoder layers, shared by targets and drafters."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    attention_bias: bool
    masks: tuple[LayerMask, ...]


@dataclass(frozen=True)
class TargetConfig:
    """A target model: its decoder, and what its directory says about tokens and sampling.

    dtype: the checkpoint's own ("bfloat16", ...). eos_ids: every id that ends an answer, from
    generation_config.json where there is one. sampling: the default sampling values found there.
    """

    architecture: str
    decoder: DecoderConfig
    tie_embeddings: bool
    dtype: str
    eos_ids: tuple[int, ...]
    sampling: dict[str, Any]


@dataclass(frozen=True)
class DraftConfig:
    """A DFlash drafter. Capture ids count layers done: k is the residual stream after k layers.

    The z-lab format names layer outputs from 0 (`target_layer_ids`), so its ids are one less.
    """

    decoder: DecoderConfig
    block_size: int
    mask_token_id: int
    capture: tuple[int, ...]
    num_target_layers: int | None
    embedding_scale: float
    output_multiplier: float
    logit_softcap: float | None
    dtype: str


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError naming a file that is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        missing = path if path.parent.is_dir() else path.parent
        what = "is no directory" if missing.exists() else "does not exist"
        raise ValueError(
            f"{missing} {what}; name a directory that holds a Hugging Face checkpoint, such as "
            "'hf download' makes."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged ({error}); download or save the checkpoint again."
        ) from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds {type(value).__name__}, not a JSON object; save it again.")
    return value


_MEND = "use the config.json the checkpoint was published with."


def _integer(
    config: dict[str, Any], key: str, path: Path, default: int | None = None, *, low: int = 1
) -> int:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(
            f"{path}: {key} is {value!r}, but must be a whole number of at least {low}; {_MEND}"
        )
    return value


def _number(value: Any, key: str, path: Path) -> float:
    real = isinstance(value, int | float) and not isinstance(value, bool)
    if not real or not 0 < value < math.inf:
        raise ValueError(f"{path}: {key} is {value!r}, but must be a positive number; {_MEND}")
    return float(value)


def _flag(config: dict[str, Any], key: str, path: Path) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{path}: {key} is {value!r}, but must be true or false; {_MEND}")
    return bool(value)


def _object(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{path}: {key} is {value!r}, but must be an object; {_MEND}")
    return value or {}


def _rope(
    config: dict[str, Any],
    path: Path,
    masks: tuple[LayerMask, ...],
    default: float,
    max_position: int,
    *,
    drafter: bool,
) -> RopeConfig:
    """The rope of all layers; layers whose ropes differ are refused. A drafter's turns the whole
    head, whatever share of it its config, copied from a target's, may name."""
    parameters = _object(config, "rope_parameters", path) or _object(config, "rope_scaling", path)
    kinds = {"full_attention" if m.window is None else "sliding_attention" for m in masks}
    parts = [parameters[kind] for kind in kinds if isinstance(parameters.get(kind), dict)]
    if parts:
        if any(part != parts[0] for part in parts):
            raise ValueError(
                f"{path}: rope_parameters differ between layer types, which is not supported; use "
                "a checkpoint with one rope for all layers."
            )
        parameters = parts[0]
    share = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0) and not drafter:
        raise ValueError(
            f"{path}: partial_rotary_factor is {share!r}, which is not supported; use a checkpoint "
            "with rope over the whole head."
        )
    theta = parameters.get("rope_theta", config.get("rope_theta", default))
    theta = _number(theta, "rope_theta", path)
    return read_rope(parameters, theta, max_position, path, drafter=drafter)


def _decoder(
    config: dict[str, Any],
    path: Path,
    masks: tuple[LayerMask, ...],
    default_theta: float,
    *,
    drafter: bool = False,
) -> DecoderConfig:
    hidden = _integer(config, "hidden_size", path)
    heads = _integer(config, "num_attention_heads", path)
    kv_heads = _integer(config, "num_key_value_heads", path, heads)
    head_dim = _integer(config, "head_dim", path, 128)
    if heads % kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}; {_MEND}"
        )
    if head_dim % 2:
        raise ValueError(f"{path}: head_dim is {head_dim}, but rope needs an even number; {_MEND}")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(
            f"{path}: hidden_act is {activation!r}, but only 'silu' is supported; use a checkpoint "
            "with that activation."
        )
    if config.get("quantization_config"):
        raise ValueError(
            f"{path}: quantization_config is set, but quantized checkpoints are not supported; use "
            "the unquantized one."
        )
    longest = _integer(config, "max_position_embeddings", path, 32768)
    rope = _rope(config, path, masks, default_theta, longest, drafter=drafter)
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=_integer(config, "intermediate_size", path),
        num_layers=_integer(config, "num_hidden_layers", path),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_integer(config, "vocab_size", path),
        rms_norm_eps=_number(config.get("rms_norm_eps", 1e-6), "rms_norm_eps", path),
        rope=rope,
        max_position=rope.reach or longest,
        attention_bias=_flag(config, "attention_bias", path),
        masks=masks,
    )


def _layer_types(config: dict[str, Any], path: Path) -> list[str]:
    layers = _integer(config, "num_hidden_layers", path)
    types = config.get("layer_types") or ["full_attention"] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(
            f"{path}: layer_types must list one type for each of the {layers} layers, "
            f"but is {types!r}."
        )
    unknown = sorted({str(t) for t in types} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(
            f"{path}: layer type {unknown[0]!r} is not supported; "
            "full_attention and sliding_attention are."
        )
    return types


def _window(config: dict[str, Any], path: Path, types: list[str]) -> int | None:
    if "sliding_attention" not in types:
        return None
    return _integer(config, "sliding_window", path)


def _eos_ids(value: Any, vocab_size: int, path: Path) -> tuple[int, ...]:
    """The ids in an eos_token_id: none, one or a list."""
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise ValueError(
                f"{path}: eos_token_id is {value!r}, but must be a token id, or a list of some, "
                f"from 0 to {vocab_size - 1}; use the file the checkpoint was published with."
            )
    return tuple(ids)


def _dtype(config: dict[str, Any], path: Path) -> str:
    name = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise ValueError(
            f"{path}: dtype is {name!r}, but must be one of {', '.join(DTYPES)}; use a checkpoint "
            "saved in one of them."
        )
    return name


def _default_sampling(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    sampling: dict[str, Any] = {k: generation[k] for k in keys if generation.get(k) is not None}
    if generation.get("do_sample") is False:
        kept = {k: v for k, v in sampling.items() if k == "repetition_penalty"}
        sampling = {"temperature": 0.0, **kept}
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return sampling


def load_target_config(directory: Path) -> TargetConfig:
    """The target in `directory`. Raises ValueError for what is damaged or not supported."""
    path = directory / "config.json"
    config = read_json(path)
    method = method_of(config)
    if method is not None:
        raise ValueError(
            f"{path} is that of a drafter for {method}; name it as the drafter, and the model it "
            "drafts for as the target."
        )
    names = config.get("architectures") or ["Qwen3ForCausalLM"]
    if config.get("model_type") != "qwen3" or names != ["Qwen3ForCausalLM"]:
        raise ValueError(
            f"{path}: architectures {names!r} with model_type {config.get('model_type')!r} is not "
            "a supported target; use a checkpoint of a Qwen3ForCausalLM."
        )
    config = {"sliding_window": 4096, "max_window_layers": 28, **config}
    types = _layer_types(config, path)
    if not config.get("layer_types") and _flag(config, "use_sliding_window", path):  # older ones
        full = _integer(config, "max_window_layers", path, low=0)
        full = full if config["sliding_window"] else len(types)
        types = [t if i < full else "sliding_attention" for i, t in enumerate(types)]
    window = _window(config, path, types)
    masks = tuple(LayerMask(True, window if t == "sliding_attention" else None) for t in types)
    generation_path = directory / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    decoder = _decoder(config, path, masks, 10000.0)
    ends = generation if generation.get("eos_token_id") is not None else config
    ends_path = generation_path if ends is generation else path
    return TargetConfig(
        architecture=names[0],
        decoder=decoder,
        tie_embeddings=_flag(config, "tie_word_embeddings", path),
        dtype=_dtype(config, path),
        eos_ids=_eos_ids(ends.get("eos_token_id"), decoder.vocab_size, ends_path),
        sampling=_default_sampling(generation, generation_path),
    )


def default_capture_layers(num_target_layers: int, count: int) -> list[int]:
    """z-lab's rule for `target_layer_ids` when a config lists none (0-based layer outputs)."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count)]


def load_draft_config(directory: Path) -> DraftConfig:
    """The z-lab DFlash drafter in `directory`. Raises ValueError naming the value that is wrong."""
    path = directory / "config.json"
    config = read_json(path)
    check_method(config, path)
    nested = _object(config, "dflash_config", path)

    def value(key: str, default: Any = None) -> Any:
        return nested.get(key, config.get(key, default))

    types = _layer_types(config, path)
    window = _window(config, path, types)
    forced = config.get("is_causal", nested.get("causal"))
    if forced is not None:
        forced = _flag({"is_causal": forced}, "is_causal", path)
    masks = tuple(
        LayerMask(
            causal=forced if forced is not None else t == "sliding_attention",
            window=window if t == "sliding_attention" else None,
        )
        for t in types
    )
    block = _integer({"block_size": value("block_size", 16)}, "block_size", path, low=2)
    mask = value("mask_token_id")
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise ValueError(
            f"{path}: mask_token_id is {mask!r}; a DFlash drafter needs the id of its mask token "
            "in dflash_config.mask_token_id."
        )
    total = config.get("num_target_layers")
    if total is not None:
        total = _integer(config, "num_target_layers", path)
    ids = value("target_layer_ids")
    if ids is None and total is not None:
        ids = default_capture_layers(total, _integer(config, "num_hidden_layers", path))
    if (
        not isinstance(ids, list)
        or not ids
        or any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids)
    ):
        raise ValueError(
            f"{path}: target_layer_ids is {ids!r}, but must list the target layers whose output "
            f"the drafter reads, counted from 0; {_MEND}"
        )
    softcap = value("final_logit_softcapping")
    scale, multiplier = value("input_embedding_scale", 1.0), value("output_multiplier", 1.0)
    return DraftConfig(
        decoder=_decoder(config, path, masks, 1e6, drafter=True),
        block_size=block,
        mask_token_id=mask,
        capture=tuple(i + 1 for i in ids),
        num_target_layers=total,
        embedding_scale=_number(scale, "input_embedding_scale", path),
        output_multiplier=_number(multiplier, "output_multiplier", path),
        logit_softcap=_number(softcap, "final_logit_softcapping", path) if softcap else None,
        dtype=_dtype(config, path),
    )


def check_pair(draft: DraftConfig, target: TargetConfig, draft_path: Path) -> None:
    """Raises ValueError, before any weight is read, when the drafter cannot serve the target."""
    wanted, own, where = target.decoder, draft.decoder, f"{draft_path / 'config.json'}:"
    mend = "use the drafter that was trained for this target."
    if own.hidden_size != wanted.hidden_size:
        raise ValueError(
            f"{where} hidden_size is {own.hidden_size}, the target's is {wanted.hidden_size}; "
            f"{mend}"
        )
    if own.vocab_size != wanted.vocab_size:
        raise ValueError(
            f"{where} vocab_size is {own.vocab_size}, the target's is {wanted.vocab_size}; {mend}"
        )
    if draft.num_target_layers not in (None, wanted.num_layers):
        raise ValueError(
            f"{where} num_target_layers is {draft.num_target_layers}, the target has "
            f"{wanted.num_layers} layers; {mend}"
        )
    for k in draft.capture:
        if k > wanted.num_layers:
            raise ValueError(
                f"{where} target_layer_ids holds {k - 1}, but the target's layers are 0 to "
                f"{wanted.num_layers - 1}; {mend}"
            )
    if not 0 <= draft.mask_token_id < wanted.vocab_size:
        raise ValueError(
            f"{where} mask_token_id is {draft.mask_token_id}, but the target's vocabulary has ids "
            f"0 to {wanted.vocab_size - 1}; {mend}"
        )
