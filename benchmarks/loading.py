"""Loading on a CPU or a GPU: seconds, and the host's peak memory relative to the weights.

    python benchmarks/loading.py [--gigabytes 1.5] [--format bf16] [--stored] [--ranks 1]
                                 [--device cpu] [--directory DIR] [--json FILE]

Writes a checkpoint with random weights in the layout of Qwen3, of about so many gigabytes in bf16:
in bf16, in int4 or NVFP4 of compressed-tensors, or as a GGUF file in Q8_0. Then loads it in bf16 in
its own process, whose memory before loading does not count; with --stored, quantized weights stay
as stored. With --ranks N the parts of N ranks, one after another in processes of their own. Exits
with 1 if the peaks together exceed the weights in memory by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOAD = """
import json, sys, time, torch
from pathlib import Path
import tqdm.auto
from strobe.models.weight_loading import check_target_tensors, load_target
from strobe.models.architectures import load_target_config
from strobe.parallel.split import Split

def field(name):
    rows = open("/proc/self/status").read().splitlines()
    return next(int(row.split()[1]) << 10 for row in rows if row.startswith(name))

path, device, size = Path(sys.argv[1]), torch.device(sys.argv[2]), int(sys.argv[4])
split = Split(int(sys.argv[3]), size, size)
config, open_part = load_target_config(path), split.opener("auto")
config, _ = split.split(config, None)
if sys.argv[5] == "stored":
    from strobe.models.quantization.methods import hold_stored
    config = hold_stored(config, path)
torch.zeros(1, device=device)
check_target_tensors(path, config, open_part)  # imports the code, but reads no weights
open("/proc/self/clear_refs", "w").write("5")  # reset the peak
before, began = field("VmRSS"), time.perf_counter()
options = {"dtype": torch.bfloat16, "device": device, "open": open_part}
model = load_target(path, config, max_positions=8, **options)
if device.type == "cuda":
    torch.cuda.synchronize()
seconds = time.perf_counter() - began
weights = sum(parameter.nbytes for parameter in model.parameters())
stored = (getattr(module, "stored", None) for module in model.modules())
weights += sum(product.nbytes for product in stored if product is not None)
peak = field("VmHWM") - before
print(json.dumps({"seconds": round(seconds, 2), "weights": weights, "peak": peak}))
"""


GROUPS = {"int4": 128, "nvfp4": 16}
"""Inputs that share a scale, by format."""


def quantization_config(kind: str) -> dict[str, object]:
    """Return compressed-tensors' description of a format."""
    values: dict[str, object] = {"num_bits": 4, "type": "int", "strategy": "group"}
    if kind == "nvfp4":
        values |= {"type": "float", "strategy": "tensor_group"}
    values |= {"group_size": GROUPS[kind], "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if kind == "int4" else "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": values}},
        "ignore": ["lm_head"],
    }


def quantized(name: str, shape: tuple[int, ...], kind: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a random weight."""
    import torch

    stem = name.removesuffix(".weight")
    rows, columns = shape
    groups = columns // GROUPS[kind]
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    if kind == "int4":
        return {
            f"{stem}.weight_packed": codes.view(torch.int32),
            f"{stem}.weight_scale": torch.full((rows, groups), 0.01, dtype=torch.bfloat16),
            f"{stem}.weight_shape": torch.tensor(shape),
        }
    return {
        f"{stem}.weight_packed": codes,
        f"{stem}.weight_scale": torch.ones(rows, groups).to(torch.float8_e4m3fn),
        f"{stem}.weight_global_scale": torch.tensor([100.0]),
    }


def write_gguf(root: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> Path:
    """Write a GGUF file with matrices in Q8_0."""
    import gguf
    import numpy as np

    from strobe.models.quantization.gguf import NAMES

    names = {ours: theirs for theirs, ours in NAMES.items()}
    path = root / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["t", "0", *(f"t{i}" for i in range(config["vocab_size"] - 2))])
    writer.add_token_types([1] * config["vocab_size"])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(0)
    values, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_0]
    noise = np.random.default_rng(0)
    for name, shape in shapes.items():
        parts = name.removeprefix("model.").removesuffix(".weight").split(".", 2)
        prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        own = f"{prefix}{names[parts[-1] if prefix else '.'.join(parts)]}.weight"
        if len(shape) == 1:
            writer.add_tensor(own, np.ones(shape, np.float32))
            continue
        blocks = noise.integers(0, 256, (shape[0], shape[1] // values, size), np.uint8)
        blocks[..., :2] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
        data = blocks.reshape(shape[0], -1)
        writer.add_tensor(own, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write(root: Path, gigabytes: float, kind: str) -> tuple[Path, int]:
    """Write a checkpoint in one file. Return the directory that describes it, and the file's
    size."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocab, width = 2048, 6144, 32768, 128
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": width,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    per_layer = 2 * (3 * hidden * inner + 3 * hidden * 2048)
    layers = max(round((gigabytes * 1e9 - 2 * vocab * hidden) / per_layer), 1)
    config["num_hidden_layers"] = layers
    if kind in GROUPS:
        config["quantization_config"] = quantization_config(kind)
    (root / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, rows in (("q_proj", 2048), ("k_proj", 1024), ("v_proj", 1024)):
            shapes[f"{layer}self_attn.{name}.weight"] = (rows, hidden)
        shapes[f"{layer}self_attn.o_proj.weight"] = (hidden, 2048)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (width,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}mlp.{name}.weight"] = (inner, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
    if kind == "gguf":
        from strobe.hub.gguf_checkpoint import gguf_directory

        file = write_gguf(root, shapes, config)
        return gguf_directory(file), file.stat().st_size
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        if kind in GROUPS and name.endswith("_proj.weight"):
            tensors |= quantized(name, shape, kind)
        else:
            tensors[name] = torch.empty(shape, dtype=torch.bfloat16).uniform_(-1, 1)
    save_file(tensors, root / "model.safetensors")
    return root, (root / "model.safetensors").stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--format", choices=("bf16", *GROUPS, "gguf"), default="bf16")
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        os.environ["XDG_CACHE_HOME"] = root
        directory, size = write(Path(root), arguments.gigabytes, arguments.format)
        ranks: list[dict[str, float]] = []
        for rank in range(arguments.ranks):
            command = [sys.executable, "-c", LOAD, str(directory), arguments.device]
            command += [str(rank), str(arguments.ranks)]
            command.append("stored" if arguments.stored else "dequantized")
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            ranks.append(json.loads(done.stdout))
    peak = sum(rank["peak"] for rank in ranks)
    weights = sum(rank["weights"] for rank in ranks)
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "format": arguments.format,
        "file": size,
        "ranks": ranks,
        "peak_over_weights": round(peak / weights, 3),
    }
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(report["peak_over_weights"] > 1.1)


if __name__ == "__main__":
    sys.exit(main())
