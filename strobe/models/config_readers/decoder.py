"""Decoder and target fields of config.json that most families and all drafters share."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeVar

from strobe.attention.mask import LayerMask
from strobe.hub.files import read_json
from strobe.models.config_readers.fields import DTYPES, HINT, Fields, positive
from strobe.models.config_readers.rope import RopeConfig, read_rope
from strobe.models.model_config import DecoderConfig, TargetConfig
from strobe.models.quantization.methods import read_quantization
from strobe.sampling_params import RECOMMENDED, SamplingParams

Kind = TypeVar("Kind", bound=TargetConfig)


def read_decoder(
    fields: Fields,
    masks: tuple[LayerMask, ...],
    *,
    theta: float,
    head_dim: int | None = 128,
    kv_heads: int | None = None,
    drafter: bool = False,
    **options: Any,
) -> DecoderConfig:
    """Read the decoder. theta, head_dim, kv_heads, and attention_bias and intermediate_size among
    the options, are defaults for missing keys; head_dim None means hidden_size /
    num_attention_heads. options: more fields of DecoderConfig. Raises ValueError."""
    path = fields.path
    hidden = fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", kv_heads or heads)
    head_dim = fields.integer("head_dim", head_dim or hidden // heads)
    if heads % kv_heads:
        raise ValueError(
            f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}; {HINT}"
        )
    if head_dim % 2:
        raise ValueError(f"{path}: head_dim is {head_dim}, but rope needs an even number; {HINT}")
    max_position = fields.integer("max_position_embeddings", 32768)
    rope = options.pop("rope", None) or read_ropes(
        fields, masks, theta, max_position, drafter=drafter
    )
    bias = fields.flag("attention_bias", options.pop("attention_bias", False))
    return DecoderConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer(
            "intermediate_size", options.pop("intermediate_size", None)
        ),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        max_position=rope.reach or max_position,
        attention_bias=bias,
        masks=masks,
        **options,
    )


def read_ropes(
    fields: Fields,
    masks: tuple[LayerMask, ...],
    theta: float,
    max_position: int,
    *,
    drafter: bool = False,
) -> RopeConfig:
    """Read the rope of all layers. Raises ValueError if layers have different ropes. drafter:
    ignore partial_rotary_factor, which drafters' configs copy from their targets."""
    path = fields.path
    older = fields.object("rope_scaling")
    parameters = read_rope_parameters(fields, theta)
    theta = fields.get("rope_theta", older.get("rope_theta") or theta)
    if not fields.object("rope_parameters"):
        parameters = {k: v for k, v in older.items() if k != "rope_theta"}
    kinds = {"full_attention" if m.window is None else "sliding_attention" for m in masks}
    parts = [parameters[kind] for kind in kinds if isinstance(parameters.get(kind), dict)]
    if parts:
        if any(part != parts[0] for part in parts):
            raise ValueError(
                f"{path}: rope_parameters differ between layer types, which is not supported; use "
                "a checkpoint with one rope for all layers."
            )
        parameters = parts[0]
    share = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if share not in (None, 1.0) and not drafter:
        raise ValueError(
            f"{path}: partial_rotary_factor is {share!r}, which is not supported; use a checkpoint "
            "with rope over the whole head."
        )
    theta = positive(parameters.get("rope_theta", theta), "rope_theta", path)
    return read_rope(parameters, theta, max_position, path, drafter=drafter)


def read_rope_parameters(fields: Fields, theta: float) -> dict[str, Any]:
    """Return the parameters of the rope, which may be nested by layer type; empty if missing.
    `rope_scaling` replaces `rope_parameters`, as in transformers. theta: the default base. Raises
    ValueError if a base would be lost with the replaced parameters."""
    newer = fields.object("rope_parameters")
    older = fields.object("rope_scaling")
    if not older or not newer or older == newer:
        return newer or older
    used = older.get("rope_theta", fields.get("rope_theta", theta))
    for part in (newer, *filter(_is_object, newer.values())):
        lost = part.get("rope_theta", used)
        if lost != used:
            raise ValueError(
                f"{fields.path}: rope_scaling stands beside rope_parameters and replaces them, but "
                f"their rope_theta {lost!r} is not its own, {used!r}; put all of the rope into "
                "rope_parameters, and leave rope_scaling out."
            )
    return older


def _is_object(value: object) -> bool:
    return isinstance(value, dict)


def read_layer_types(
    fields: Fields, supported: tuple[str, ...] = ("full_attention", "sliding_attention")
) -> list[str]:
    """Read the type of each layer; full attention by default."""
    layers = fields.integer("num_hidden_layers")
    types = fields.get("layer_types") or ["full_attention"] * layers
    if not isinstance(types, list) or len(types) != layers:
        raise ValueError(
            f"{fields.path}: layer_types must list one type for each of the {layers} layers, "
            f"but is {types!r}."
        )
    if unknown := sorted({str(t) for t in types} - set(supported)):
        raise ValueError(
            f"{fields.path}: layer type {unknown[0]!r} is not supported; "
            f"{' and '.join(supported)} are."
        )
    return types


def read_window(fields: Fields, types: list[str]) -> int | None:
    """Read the window of sliding layers; None if no layer slides."""
    if "sliding_attention" in types:
        return fields.integer("sliding_window")
    fields.get("sliding_window")  # has no effect on full attention
    return None


def read_dtype(fields: Fields) -> str:
    name = fields.get("dtype", fields.get("torch_dtype", "bfloat16"))
    if name not in DTYPES:
        raise ValueError(
            f"{fields.path}: dtype is {name!r}, but must be one of {', '.join(DTYPES)}; use a "
            "checkpoint saved in one of them."
        )
    return name


def read_target(
    fields: Fields,
    directory: Path,
    architecture: str,
    decoder: DecoderConfig,
    *,
    kind: type[Kind] = TargetConfig,
    tied: bool = False,
    harmless: Collection[str] = (),
    **options: Any,
) -> Kind:
    """Read a target's other fields. Must be the last to read `fields`: unread keys are errors.

    kind: the config class, with its extra fields in `options`. tied: default of
    tie_word_embeddings. harmless: keys that may stay unread. Raises ValueError.
    """
    eos_ids, sampling = _read_generation(fields, directory, decoder.vocab_size)
    config = kind(
        architecture=architecture,
        decoder=decoder,
        tie_embeddings=fields.flag("tie_word_embeddings", tied),
        dtype=read_dtype(fields),
        eos_ids=eos_ids,
        sampling=sampling,
        quantization=read_quantization(fields, decoder),
        **options,
    )
    fields.finish(harmless)
    return config


def _read_generation(
    fields: Fields, directory: Path, vocab_size: int
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Read the end tokens and the default sampling values from generation_config.json; the end
    tokens fall back to config.json's."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    ends = _eos_ids(fields.get("eos_token_id"), vocab_size, fields.path)
    if (config_eos := generation.get("eos_token_id")) is not None:
        ends = _eos_ids(config_eos, vocab_size, path)
    return ends, _default_sampling(generation, path)


def _eos_ids(value: Any, vocab_size: int, path: Path) -> tuple[int, ...]:
    """Return the ids of an eos_token_id, which may be None, one id or a list."""
    ids: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise ValueError(
                f"{path}: eos_token_id is {value!r}, but must be a token id, or a list of some, "
                f"from 0 to {vocab_size - 1}; use the file the checkpoint was published with."
            )
    return tuple(ids)


def _default_sampling(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    keys = [option.name for option in RECOMMENDED]
    sampling: dict[str, Any] = {k: generation[k] for k in keys if generation.get(k) is not None}
    if generation.get("do_sample") is False:
        defaults = {k: v for k, v in sampling.items() if k == "repetition_penalty"}
        sampling = {"temperature": 0.0, **defaults}
    try:
        SamplingParams(**sampling)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return sampling
