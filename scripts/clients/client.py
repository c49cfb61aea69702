"""Set up a client's environment, and run a server for it."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch

import strobe
from strobe.config import DEMO_MODELS

HERE = Path(__file__).parent
MODEL = "strobe-demo"
TARGET = DEMO_MODELS / "target"
SPECULATION: dict[str, list[str]] = {"on": [], "off": ["--method", "none"]}
"""The server's options with speculation (its default) and without."""


class Client(NamedTuple):
    """A client's environment. folder: its files; bin: its programs."""

    folder: Path
    bin: Path

    def run(self, program: str, arguments: Sequence[object], log: Path) -> None:
        """Run one of its programs in its folder, offline. Raises RuntimeError if it fails."""
        words = [str(self.bin / program), *map(str, arguments)]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        with log.open("w", encoding="utf-8") as out:
            out.write(" ".join(words) + "\n")
            out.flush()
            process = subprocess.run(
                words, cwd=self.folder, env={**os.environ, **offline}, stdout=out, stderr=out
            )
        if process.returncode:
            raise RuntimeError(f"{program} failed with {process.returncode}; see {log}.")

    def versions(self, *packages: str) -> str:
        """Return the names and versions of its packages."""
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        words = [str(self.bin / "python"), "-c", code, *packages]
        installed = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        pairs = zip(packages, installed, strict=True)
        return ", ".join(f"{name} {version}" for name, version in pairs)


def environment(folder: Path, *steps: Sequence[str]) -> Client:
    """Return the virtual environment in `folder`; if it is missing or outdated, create it with one
    `pip install` per step."""
    venv = folder.resolve() / "venv"
    client = Client(folder.resolve(), venv / "bin")
    files = [HERE / word for step in steps for word in step if word.endswith(".txt")]
    requirements = "\n".join(file.read_text(encoding="utf-8") for file in files)
    installed = venv / "installed.txt"
    if installed.exists() and installed.read_text(encoding="utf-8") == requirements:
        return client
    print(f"Creating an environment in {venv}; this takes minutes.", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    for step in steps:
        pip = [str(client.bin / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*pip, *step], cwd=HERE, check=True)
    installed.write_text(requirements, encoding="utf-8")
    return client


@contextmanager
def serving(log: Path, options: Sequence[str] = (), key: str | None = None) -> Iterator[str]:
    """Run Strobe's server with the demo models on a free port; yield its URL, without a path. key:
    the server's API key.

    The server has already answered one request, which runs its lazy initialization.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "strobe", "serve", "--port", str(port), *options]
    words += [] if key is None else ["--api-key", key]
    url = f"http://127.0.0.1:{port}"
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(words, stdout=out, stderr=out)
        try:
            _wait(server, url, log)
            _post(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 32}, key)
            yield url
        finally:
            server.terminate()
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], url: str, log: Path, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"The server did not become ready; see {log}.")


def _post(url: str, body: dict[str, object], key: str | None) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        reply.read()


def origin(versions: str) -> str:
    """Return date, versions and machine as a line above a table."""
    return (
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads; Python {platform.python_version()}, "
        f"strobe {strobe.__version__}, torch {torch.__version__}; the client: {versions}"
    )


def processor() -> str:
    """Return the processor's name from /proc/cpuinfo or the platform."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
