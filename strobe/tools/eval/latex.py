"""Whether two answers in LaTeX or plain text say the same, by math-verify.

It runs in a process of its own, since what a model wrote can keep sympy busy for ever or fill the
memory (9999999999!), and since its own time limit is an alarm signal, which only a main thread can
have. It calls equal what its authors call equal: a decimal and a fraction that agree in six digits,
a list and the tuple of the same values. It ignores the base of a number, so that is compared here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import threading
from decimal import Decimal
from importlib.util import find_spec

_LONG = 400  # characters; nothing longer is parsed
_SECONDS = 5.0
_MEMORY = 2 << 30
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_BASE = re.compile(r"\d+_\{?(\d+)\}?")
_UNWRITTEN = re.compile(r"(?<!\\)\\[!,;: ]|\\\$|\\\(|\\\)|\{,\}|\$|\s+")


def missing() -> str:
    """Why answers cannot be compared; empty where they can."""
    if find_spec("math_verify") is not None:
        return ""
    return "answers are compared by math-verify; install it with pip install 'strobe[eval]'"


def plain(text: str) -> str:
    """A text without spaces, dollar signs and the commas of thousands that LaTeX braces."""
    return _UNWRITTEN.sub("", text.strip().rstrip("."))


def same(text: str, expected: str) -> bool:
    """Whether the answers are equal; what cannot be read, or not in time, equals only itself.

    Raises ValueError where math-verify is needed and missing.
    """
    a, b = plain(text), plain(expected)
    if a == b or not a or not b:
        return a == b != ""
    if _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b):
        return Decimal(a) == Decimal(b)
    if len(text) > _LONG or len(expected) > _LONG or _base(a) != _base(b):
        return False
    if why := missing():
        raise ValueError(f"{why.capitalize()}.")
    return _comparer().same(text, expected)


def _base(text: str) -> str:
    """The base that a number names below it."""
    match = _BASE.fullmatch(text)
    return match[1] if match is not None else ""


class Comparer:
    """Answers, one comparison at a time, from a process that is started again where it hangs.

    seconds: how long a comparison may take; most take some hundredths.
    """

    def __init__(self, seconds: float = _SECONDS):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def same(self, text: str, expected: str) -> bool:
        """What math-verify says; False where it takes too long."""
        with self._lock:
            return self._ask(json.dumps([text, expected]).encode() + b"\n")

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, line: bytes) -> bool:
        if self._process is None:
            self._process = self._started()
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self.seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        finally:
            timer.cancel()
        if answer not in (b"true\n", b"false\n"):  # it hung, or used up its memory
            self.close()
        return answer == b"true\n"

    @staticmethod
    def _started() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdout is not None
        process.stdout.readline()  # it has imported sympy, which takes a second
        return process


@functools.cache
def _comparer() -> Comparer:
    return Comparer()


def _serve() -> None:
    """The process: a line of JSON comes in, whether its two answers are equal goes out."""
    from math_verify import LatexExtractionConfig, parse, verify

    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # LaTeX alone: the library reads plain expressions with Python's eval.
    latex = [LatexExtractionConfig(boxed_match_priority=0)]
    print("ready", flush=True)
    for line in sys.stdin:
        answer, expected = (
            parse(rf"\boxed{{{text}}}", extraction_config=latex, parsing_timeout=0)
            for text in json.loads(line)
        )
        print(json.dumps(verify(expected, answer, timeout_seconds=0)), flush=True)


if __name__ == "__main__":
    _serve()
