"""Compiles `operations.c` with the machine's C compiler, once, and loads it.

The library is kept in the user's cache directory, under a hash of all that its code depends on. Its
threads are those of the libgomp that torch has loaded; a second OpenMP runtime in the process would
double them. Without that, it runs on one thread.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("operations.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-O3", "-march=native", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno",
    "-fno-trapping-math",
)  # fmt: skip
SECONDS = 120
"""Limit of a compilation."""

_POINTER = ctypes.c_void_p
_FLOAT = ctypes.c_float
_INT = ctypes.c_int64
_PARAMETERS = {
    "strobe_norm": [_POINTER] * 3 + [_FLOAT] + [_INT] * 2,
    "strobe_add_norm": [_POINTER] * 4 + [_FLOAT] + [_INT] * 2,
    "strobe_norm_add": [_POINTER] * 3 + [_FLOAT] * 2 + [_INT] * 2,
    "strobe_gate": [_POINTER] * 2 + [_INT] * 2 + [ctypes.c_int],
    "strobe_convolve": [_POINTER] * 4 + [_INT] + [_POINTER] * 2 + [_INT] * 4,
    "strobe_store_context": [_POINTER, _INT] + [_POINTER] * 2 + [_FLOAT] + [_POINTER] * 4
    + [_INT] * 4,
    "strobe_has_width": [_INT],
    "strobe_attention": [_POINTER] * 6,
}  # fmt: skip


class CompilerMissing(ValueError):
    """There is no C compiler, or it fails; the message says what to do."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Return the library, compiled before or now. Raises CompilerMissing."""
    start = time.perf_counter()
    compiler = find_compiler()
    gomp = _loaded_gomp()
    path = _cache_directory() / f"{_key(compiler, gomp)}.so"
    known = path.exists()
    if not known:
        _compile(compiler, gomp, path)
    library = ctypes.CDLL(str(path))
    for name, parameters in _PARAMETERS.items():
        function = getattr(library, name)
        function.argtypes = parameters
        function.restype = ctypes.c_int if name == "strobe_has_width" else None
    seconds = time.perf_counter() - start
    origin = "loaded from" if known else f"compiled by {compiler[0]} in {seconds:.1f} s into"
    logger.info("The operations around products are %s %s", origin, path)
    return library


def find_compiler() -> list[str]:
    """Return the command of the C compiler, with its arguments. Raises CompilerMissing."""
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise CompilerMissing(
                f"compile needs a C compiler, but there is no {chosen[0]!r}, which CC names; set "
                "CC to one or unset it, or leave compile out."
            )
        return chosen
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise CompilerMissing(
        f"compile needs a C compiler, but there is none of {', '.join(COMPILERS)}; install one, "
        "such as gcc, or leave compile out."
    )


def _loaded_gomp() -> str | None:
    """Return the libgomp that this process has loaded, None if it has another OpenMP or none."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = [line.split(maxsplit=5)[5] for line in lines if "libgomp" in line]
    return files[0] if files else None


def _cache_directory() -> Path:
    """Return the directory of compiled libraries; it need not exist."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "strobe" / "compiled"


def _key(compiler: Sequence[str], gomp: str | None) -> str:
    """Return a hash of all that the library's code depends on."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    parts = [
        SOURCE.read_bytes(),
        " ".join([*compiler, *FLAGS]).encode(),
        version,
        _processor().encode(),
        str(gomp).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Return the processor's model and instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    keys = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(keys)))


def _compile(compiler: Sequence[str], gomp: str | None, path: Path) -> None:
    """Compile the library to a path: with threads if the compiler's OpenMP runs on libgomp, else
    without."""
    ways = [["-fopenmp-simd"], []]
    if gomp is not None:
        ways.insert(0, ["-fopenmp"])
    error = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            library = Path(directory) / "operations.so"
            for flags in ways:
                error = _run(compiler, flags, gomp, library)
                if not error:
                    library.replace(path)  # at once, so that another process never loads a part
                    return
    except OSError as problem:
        raise CompilerMissing(
            f"compile cannot write {path.parent}: {problem}; set XDG_CACHE_HOME to a directory "
            "that can be written, or leave compile out."
        ) from None
    raise CompilerMissing(
        f"compile is set, but {' '.join(compiler)} failed: {error}; set CC to another C compiler, "
        "or leave compile out."
    )


def _run(compiler: Sequence[str], flags: Sequence[str], gomp: str | None, library: Path) -> str:
    """Compile and link; return the first line of errors, empty if there is none. The object is
    linked to the loaded libgomp by its file, since `-fopenmp` would link the compiler's own."""
    compiled = library.with_suffix(".o")
    options = [flag for flag in FLAGS if flag != "-shared"]
    commands = [
        [*compiler, *options, *flags, "-c", str(SOURCE), "-o", str(compiled)],
        [*compiler, "-shared", str(compiled), "-o", str(library), "-lm"],
    ]
    if "-fopenmp" in flags and gomp is not None:
        commands[1] += [gomp, "-Wl,--no-undefined", "-lc"]
    for command in commands:
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS} s"
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
            return (lines or result.stderr.splitlines() or ["no message"])[0].strip()
    return ""
