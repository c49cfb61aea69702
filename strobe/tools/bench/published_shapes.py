"""Shapes of published pairs by name: the config.json of a target and of its drafter.

`published_shapes.json` has the targets' published files. Of the drafters':

- Qwen3 8B and 4B: z-lab's Qwen3-8B-DFlash-b16 and Qwen3-4B-DFlash-b16. None is published for 0.6B
  and 32B; their drafters follow the same rule.
- Llama 3.1: published layers, block and captured layers; heads and intermediate size are assumed to
  equal the target's.
- Qwen3-Coder: published layers, block and size; the rest equals Qwen3.5-35B-A3B's.
- gpt-oss: published except the number of heads, assumed to equal the target's.
- Qwen3.5-9B: captured layers as published for 4B, which is as deep, and heads as for 27B.
- Qwen3.5-35B-A3B: the first drafter published for it.
- Gemma 4: as published.
- Qwen3.8-27B: DFlash2 as z-lab published it; DSpark as Doopeworld's copy of RadixArk's.
- Qwen3-8B's DSpark: SpecForge's own config. None was seen of its DFlash2, which therefore has the
  layers of its DFlash drafter, and the block, windows and head of Qwen3.8-27B's DFlash2.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from strobe.config import DEMO_MODELS

_PAIRS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
)
"""The config.json of each pair's target and draft; a target may be the name of another pair's."""
NAMES = ("demo", *_PAIRS)
_NVFP4 = {"quant_algo": "NVFP4", "group_size": 16}
_FP8 = {"quant_algo": "FP8"}
FORMATS: dict[str, dict[str, Any]] = {
    "modelopt-mixed": {  # as nvidia and RadixArk published Qwen3.8-27B
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "lm_head": _NVFP4,
            "*.mlp.*_proj": _NVFP4,
            "*.linear_attn.in_proj_qkv": _FP8,
            "*.linear_attn.in_proj_z": _FP8,
            "*.linear_attn.out_proj": _FP8,
            "*.self_attn.*_proj": _FP8,
        },
    },
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    },
    "int4-g128": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 128,
                    "symmetric": True,
                },
            },
        },
    },
    "fp8-rows": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"FP8_DYNAMIC": ["Linear"]},
    },
    "fp8-block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "gptq-int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True},
    "awq-int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
}
"""quantization_config of published targets, by what follows a pair's name: "qwen3-8b/int4-g128"."""


@contextmanager
def directories(name: str, block_size: int | None = None) -> Generator[tuple[str, str]]:
    """Yield temporary directories with the config.json of a target and a drafter; for demo, the
    demo models' own directories. name: of `NAMES`, perhaps followed by / and one of `FORMATS`.
    block_size: of the drafter, if not the published one. Raises ValueError for an unknown name."""
    shapes = name
    name, slash, stored = name.partition("/")
    if name not in NAMES:
        raise ValueError(
            f"shapes is {shapes!r}; name one of {', '.join(NAMES)}, or give directories with "
            "--target and --draft."
        )
    if slash and (stored not in FORMATS or name == "demo"):
        raise ValueError(
            f"shapes is {shapes!r}; what follows / must be one of {', '.join(FORMATS)}, and the "
            "demo models have none."
        )
    if name == "demo":
        yield str(DEMO_MODELS / "target"), str(DEMO_MODELS / "draft")
        return
    with TemporaryDirectory(prefix="strobe-shapes-") as directory:
        target = _PAIRS[name]["target"]
        if isinstance(target, str):
            target = _PAIRS[target]["target"]
        if slash:
            target = {**target, "quantization_config": FORMATS[stored]}
        draft = _with_block(_PAIRS[name]["draft"], block_size)
        for part, config in (("target", target), ("draft", draft)):
            path = Path(directory, part)
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield str(Path(directory, "target")), str(Path(directory, "draft"))


def _with_block(draft: dict[str, Any], block_size: int | None) -> dict[str, Any]:
    """Return the drafter's config with another block size, which may be in `dflash_config`."""
    nested: dict[str, Any] = draft["dflash_config"]
    if block_size is None:
        return draft
    if "block_size" in nested:
        return {**draft, "dflash_config": {**nested, "block_size": block_size}}
    return {**draft, "block_size": block_size}
