"""Store a drafter's linear layers in int8, as compressed-tensors does.

    python scripts/smollm2/quantize.py strobe/smollm2_draft OUT

Each row of a weight has a scale in bfloat16, its largest value becomes 127, and other tensors stay
as they are, a head's tables of tokens among them. Files are under 16 MiB.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.smollm2.shards import save_tensors  # noqa: E402

CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        }
    },
}


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> int8 values [N, K] and scales [N, 1] in bfloat16."""
    values = weight.float()
    scale = (values.abs().amax(1, keepdim=True) / 127).bfloat16()
    scale[scale == 0] = 1
    codes = (values / scale.float()).round().clamp(-127, 127)
    return codes.to(torch.int8), scale


def is_linear(name: str, value: Tensor) -> bool:
    """Whether a tensor is the weight of a linear layer."""
    tables = ("codebook.weight", "markov_w1.weight", "markov_w2.weight")
    return value.ndim == 2 and name.endswith(".weight") and not name.endswith(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("draft", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir()
    tensors: dict[str, Tensor] = {}
    for path in sorted(options.draft.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in [name for name, value in tensors.items() if is_linear(name, value)]:
        codes, scale = quantized(tensors[name])
        tensors[name] = codes
        tensors[f"{name.removesuffix('weight')}weight_scale"] = scale
    save_tensors(tensors, options.out)
    config = json.loads((options.draft / "config.json").read_text())
    config["quantization_config"] = CONFIG
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    readme = options.draft / "README.md"
    if readme.exists():
        shutil.copy(readme, options.out)


if __name__ == "__main__":
    main()
