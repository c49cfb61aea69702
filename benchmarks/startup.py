"""Time from process start to the first token, with local weights, with cold and warm kernels.

    python benchmarks/startup.py [--shapes qwen3-8b] [--ranks 1 2] [--directory DIR] [--json FILE]

Writes a checkpoint of the shape with random weights (16 GB for qwen3-8b), then starts processes
that load it, warm up like a server and answer one prompt: first with an empty cache of compiled
kernels, then with what the ones before have compiled. A warm-up ends after 40 s, so that only the
third start is sure to find all. Reading the weights alone is timed as well. With several numbers of
ranks, each has these three starts; the first ones of later numbers find some kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from itertools import product
from pathlib import Path

ANSWER = """
import sys, time
from strobe import EngineConfig, SamplingParams
from strobe.ranks.leader import start_engine
from strobe.warmup.warmup_steps import warm_up
ranks = {"tensor_parallel_size": int(sys.argv[3])}
config = EngineConfig(sys.argv[1], draft=sys.argv[2], dtype="bfloat16", max_model_len=4096, **ranks)
engine = start_engine(config)
warm_up(engine)
request = engine.add(list(range(100, 356)), SamplingParams(temperature=0.0, max_tokens=2))
while not request.num_output:
    engine.step()
"""


def write(shapes: str, root: Path) -> tuple[Path, Path]:
    """Write a target and a drafter with random weights, in the published layouts."""
    import torch
    from safetensors.torch import save_file

    from strobe.models import weight_loading
    from strobe.tools.bench.published_shapes import directories

    paths: list[Path] = []
    with directories(shapes) as configs:
        for name, source in zip(("target", "draft"), configs, strict=True):
            path = root / name
            path.mkdir(parents=True)
            (path / "config.json").write_text((Path(source) / "config.json").read_text())
            paths.append(path)
    device = torch.device("cuda")
    from strobe.models.architectures import load_draft_config, load_target_config
    from strobe.models.weight_mapping import mapping_of

    target = load_target_config(paths[0])
    kwargs = {"max_positions": 1, "dtype": torch.bfloat16, "device": device, "open": None}
    model = weight_loading.load_target(paths[0], target, **kwargs)  # type: ignore[arg-type]
    drafter = weight_loading.load_draft(paths[1], load_draft_config(paths[1]), model, **kwargs)  # type: ignore[arg-type]
    for module, path in ((model, paths[0]), (drafter, paths[1])):
        tensors: dict[str, torch.Tensor] = {}
        mapping = mapping_of(module)
        for key, value in module.named_parameters():
            for part in mapping[key]:
                (source,) = part.sources
                tensors[source] = value[part.at].contiguous().cpu()
        save_file(tensors, path / "model.safetensors")
    return paths[0], paths[1]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shapes", default="qwen3-8b")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1])
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        target, draft = write(arguments.shapes, Path(root))
        began = time.perf_counter()
        for path in (target, draft):
            with (path / "model.safetensors").open("rb", buffering=0) as file:
                while file.read(64 << 20):
                    pass
        report: dict[str, object] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "shapes": arguments.shapes,
            "reading_the_weights": round(time.perf_counter() - began, 1),
        }
        environment = {**os.environ, "TRITON_CACHE_DIR": str(Path(root) / "kernels")}
        for ranks, name in product(arguments.ranks, ("cold", "second", "warm")):
            began = time.perf_counter()
            command = [sys.executable, "-c", ANSWER, str(target), str(draft), str(ranks)]
            subprocess.run(command, check=True, env=environment)
            key = f"first_token_{name}" + (f"_{ranks}_ranks" if ranks > 1 else "")
            report[key] = round(time.perf_counter() - began, 1)
            print(key, report[key], file=sys.stderr, flush=True)
    print(json.dumps(report, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
