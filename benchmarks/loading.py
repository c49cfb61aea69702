"""Loading on a CPU or a GPU: seconds, and the host's peak memory relative to the weights.

    python benchmarks/loading.py [--gigabytes 1.5] [--ranks 1] [--device cpu] [--directory DIR]
                                 [--json FILE]

Writes a checkpoint with random bf16 weights in the layout of Qwen3, then loads it in bf16 in its
own process, whose memory before loading does not count; with --ranks N the parts of N ranks, one
after another in processes of their own. Exits with 1 if the peaks together exceed the weights by
more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

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
peak = field("VmHWM") - before
print(json.dumps({"seconds": round(seconds, 2), "weights": weights, "peak": peak}))
"""


def write(root: Path, gigabytes: float) -> None:
    """Write a checkpoint of about this size in one file."""
    import torch
    from safetensors.torch import save_file

    hidden, inner, vocab, width = 2048, 6144, 32768, 128
    config = {
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
    (root / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
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
    tensors = {n: torch.empty(s, dtype=torch.bfloat16).uniform_(-1, 1) for n, s in shapes.items()}
    save_file(tensors, root / "model.safetensors")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        write(Path(root), arguments.gigabytes)
        file = (Path(root) / "model.safetensors").stat().st_size
        ranks: list[dict[str, float]] = []
        for rank in range(arguments.ranks):
            command = [sys.executable, "-c", LOAD, root, arguments.device]
            command += [str(rank), str(arguments.ranks)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            ranks.append(json.loads(done.stdout))
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "weights": file,
        "ranks": ranks,
        "peak_over_weights": round(sum(rank["peak"] for rank in ranks) / file, 3),
    }
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(report["peak_over_weights"] > 1.1)


if __name__ == "__main__":
    sys.exit(main())
