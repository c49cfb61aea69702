"""Record tiny checkpoints that the library compressed-tensors writes, with the logits of its own
dequantization in float32, as the files of tests/recorded.

    pip install compressed-tensors==0.20.0 transformers
    python -m scripts.record_compressed_tensors

Each is a random Qwen3 of one layer in float32. Scales that are published in bfloat16 are rounded to
it before weights are quantized.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4 import base as nvfp4
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from torch import Tensor

from scripts.recorded_models import TARGET, logits_of, make_model, write_config, write_expected


def weights(bits: int, kind: str, strategy: str, **options: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": kind,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
        **options,
    }


def config(*groups: dict[str, Any], ignore: tuple[str, ...] = ("lm_head",)) -> dict[str, Any]:
    entries = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"config_groups": entries, "ignore": list(ignore)}


def group(values: dict[str, Any], *targets: str, **options: Any) -> dict[str, Any]:
    return {"targets": list(targets or ("Linear",)), "weights": values, **options}


INT4 = {"num_bits": 4, "type": "int", "dynamic": False}
FP8_ROWS = weights(8, "float", "channel")
NVFP4 = weights(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn")
CONFIGS = {
    "fp8-dynamic": config(group(FP8_ROWS)),
    "fp8-static": config(group(weights(8, "float", "tensor"))),
    "fp8-block": config(group(weights(8, "float", "block", block_structure=[32, 32]))),
    "int4-g32": config(group(weights(4, "int", "group", group_size=32))),
    "int4-g32-asymmetric": config(
        group(weights(4, "int", "group", group_size=32, symmetric=False))
    ),
    "int4-g128": config(
        group(weights(4, "int", "group", group_size=128), "re:.*down_proj$"),
        group(weights(4, "int", "channel"), "re:.*self_attn.*"),
        group(weights(4, "int", "channel", symmetric=False), "Linear"),
    ),
    "int8-packed": config(
        group(weights(8, "int", "group", group_size=32), "re:.*mlp.*", format="pack-quantized"),
        group(weights(8, "int", "channel", symmetric=False), "Linear", format="pack-quantized"),
    ),
    "int8": config(group(weights(8, "int", "channel"), format="int-quantized")),
    "nvfp4": config(group(NVFP4)),
    "mxfp4": config(group(weights(4, "float", "group", group_size=32, scale_dtype="torch.uint8"))),
    "mxfp8": config(group(weights(8, "float", "group", group_size=32, scale_dtype="torch.uint8"))),
    "mixed": config(
        group(FP8_ROWS, "re:.*self_attn.*", "re:.*lm_head", "re:.*down_proj$"),
        group(NVFP4, "re:.*mlp.*"),
        ignore=(),
    ),
    "nvfp4-head": config(group(NVFP4), ignore=()),
}
"""quantization_config by the names of the directories."""


def extremes(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value that each scale covers."""
    strategy = str(args.strategy)
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if strategy == "block":
        rows, columns = args.block_structure
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.amin((1, 3)), blocks.amax((1, 3))
    groups = weight.unflatten(1, (-1, args.group_size))
    return groups.amin(2), groups.amax(2)


def calibrate(module: torch.nn.Module) -> None:
    """Set the scales of a module's weight."""
    args = module.quantization_scheme.weights
    weight = module.weight.data
    factor = None
    if hasattr(module, "weight_global_scale"):
        factor = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(factor)
    low, high = extremes(weight, args)
    scale, zero = calculate_qparams(low, high, args, factor)
    if is_bfloat16(module):
        scale = scale.bfloat16().to(scale.dtype)
    module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(
        module.weight_scale.dtype
    )
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(
            module.weight_zero_point.dtype
        )


def is_bfloat16(module: torch.nn.Module) -> bool:
    """Whether a module's scales are published in bfloat16."""
    strategy = str(module.quantization_scheme.weights.strategy)
    return strategy == "channel" or str(module.quantization_scheme.weights.type) == "int"


def record(name: str, values: dict[str, Any]) -> None:
    model = make_model()
    apply_quantization_config(model, QuantizationConfig.model_validate(values))
    modules = {n: m for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    for module in modules.values():
        calibrate(module)
    rounded = [f"{n}.weight_scale" for n, m in modules.items() if is_bfloat16(m)]
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    directory = TARGET / f"compressed-tensors-{name}"
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {n: value.contiguous() for n, value in model.state_dict().items()}
    for scale in rounded:
        tensors[scale] = tensors[scale].bfloat16()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_config(directory, model)
    compressor.update_config(str(directory))
    nvfp4.unpack_fp4_from_uint8 = partial(unpack_fp4_from_uint8, dtype=torch.float32)
    compressor.decompress_model(model)
    write_expected(directory, logits_of(model))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="of the checkpoints, all by default")
    for name in parser.parse_args().names or CONFIGS:
        record(name, CONFIGS[name])
        print(name)


if __name__ == "__main__":
    main()
