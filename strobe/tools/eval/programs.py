"""Run a model's programs against their tests, each in its own process.

The limits contain a wrong program's use of time and memory; they are no sandbox for a malicious
one.
"""

from __future__ import annotations

import ast
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_MEMORY = 2 << 30
_FILE = 16 << 20
_BLOCK = re.compile(r"```[a-zA-Z0-9_+-]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_BEGIN = """\
import sys
try:
    import resource
    for name, limit in (("AS", {memory}), ("CPU", {seconds}), ("FSIZE", {file}), ("CORE", 0)):
        hard = resource.getrlimit(getattr(resource, "RLIMIT_" + name))[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
except ImportError:
    pass
sys.path.insert(0, ".")
exec(compile(open("program.py", encoding="utf-8").read(), "program.py", "exec"),
     {{"__name__": "program"}})
print({done!r})
"""


def passes(program: str, seconds: float) -> bool:
    """Return whether a program with its tests runs to its end without an error, in an empty
    directory, within `seconds` and 2 GiB. Its output is discarded."""
    done = secrets.token_hex(16)  # a program that leaves early never prints it
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        (folder / "program.py").write_text(program, encoding="utf-8", errors="replace")
        begin = _BEGIN.format(memory=_MEMORY, seconds=int(seconds) + 1, file=_FILE, done=done)
        with (folder / "printed").open("w+b") as printed:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", begin],
                cwd=folder,
                env={"PATH": os.defpath, "HOME": directory, "PYTHONHASHSEED": "0"},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(child)
            printed.seek(0, os.SEEK_END)
            printed.seek(max(0, printed.tell() - 2 * len(done)))
            return status == 0 and done.encode() in printed.read()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (AttributeError, ProcessLookupError, PermissionError):
        child.kill()
    child.wait()


def code_of(text: str, names: Sequence[str] = ()) -> str:
    """Return the code in a text: the last block that defines one of the names, else the last block,
    else the whole text."""
    blocks = [match[1] for match in _BLOCK.finditer(text)] or [text]
    defining = [code for code in blocks if any(_defines(code, name) for name in names)]
    return (defining or blocks)[-1]


def human_eval(text: str, *, prompt: str, tests: str, name: str) -> str:
    """Return a HumanEval program: the prompt's imports and helpers, the model's function, the
    tests. Code that does not define the function continues the prompt's."""
    code = code_of(text, [name])
    head = prompt[: prompt.rfind(f"def {name}")] if _defines(code, name) else prompt
    return f"{head}\n{code}\n{tests}\ncheck({name})\n"


def mbpp(text: str, *, imports: tuple[str, ...], tests: tuple[str, ...]) -> str:
    """Return an MBPP program: the model's code, then the tests."""
    called = re.findall(r"(\w+)\(", " ".join(tests))
    return "\n".join((code_of(text, called), *imports, *tests)) + "\n"


def _defines(code: str, name: str) -> bool:
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (
            re.search(rf"^\s*(?:async\s+)?def {re.escape(name)}\b", code, re.MULTILINE) is not None
        )
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name == name
        for node in tree.body
    )
