"""Compare two answers in LaTeX or plain text with math-verify.

It runs in its own process, since some expressions keep sympy busy forever or fill the memory
(9999999999!), and since its time limit is an alarm signal, which needs a main thread. math-verify
treats a decimal and a fraction as equal if they agree to six digits, and a list and a tuple of the
same values. It ignores the base of a number, which is compared here.
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

_MAX_LENGTH = 400  # characters; longer texts are not parsed
_SECONDS = 5.0
_MEMORY = 2 << 30
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)")
_BASE = re.compile(r"\d+_\{?(\d+)\}?")
_UNWRITTEN = re.compile(r"(?<!\\)\\[!,;: ]|\\\$|\\\(|\\\)|\{,\}|\$|\s+")


def missing() -> str:
    """Return why answers cannot be compared, or an empty string."""
    if find_spec("math_verify") is not None:
        return ""
    return "answers are compared by math-verify; install it with pip install 'strobe[eval]'"


def plain(text: str) -> str:
    """Strip spaces, dollar signs and LaTeX's braced thousands separators."""
    return _UNWRITTEN.sub("", text.strip().rstrip("."))


def same(text: str, expected: str) -> bool:
    """Return whether the answers are equal; one that cannot be parsed in time equals only itself.

    Raises ValueError if math-verify is needed and missing.
    """
    a = plain(text)
    b = plain(expected)
    if a == b or not a or not b:
        return a == b != ""
    if _NUMBER.fullmatch(a) and _NUMBER.fullmatch(b):
        return Decimal(a) == Decimal(b)
    if max(len(text), len(expected)) > _MAX_LENGTH or _base(a) != _base(b):
        return False
    if reason := missing():
        raise ValueError(f"{reason.capitalize()}.")
    return _comparer().same(text, expected)


def _base(text: str) -> str:
    """Return the base in a number's subscript, or an empty string."""
    match = _BASE.fullmatch(text)
    return match[1] if match is not None else ""


class Comparer:
    """Compares answers, one pair at a time, in a process that is restarted if it hangs.

    seconds: time limit of a comparison; a typical one takes some hundredths.
    """

    def __init__(self, seconds: float = _SECONDS):
        self.seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def same(self, text: str, expected: str) -> bool:
        """Return math-verify's verdict; False on a timeout."""
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
        if answer not in (b"true\n", b"false\n"):  # it hung, or ran out of memory
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
        process.stdout.readline()  # wait until it has imported sympy, which takes a second
        return process


@functools.cache
def _comparer() -> Comparer:
    return Comparer()


def _serve() -> None:
    """Run the process: read pairs of answers as lines of JSON, and print whether they are equal."""
    from math_verify import LatexExtractionConfig, parse, verify

    with contextlib.suppress(ImportError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        soft = _MEMORY if hard == resource.RLIM_INFINITY else min(_MEMORY, hard)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Only LaTeX: the library parses plain expressions with Python's eval.
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
