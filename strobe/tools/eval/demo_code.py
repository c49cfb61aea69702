"""Runs short generated functions in a restricted namespace.

This keeps an honest small model from doing harm by accident (no imports, no `while`, no private
names, short ranges). It is no sandbox for code that somebody wrote with bad intent.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterable, Sequence
from typing import Any

_LONGEST = 64
_MAX_CODE = 2000
_ALLOWED = (
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min",
    "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip",
)  # fmt: skip
_REFUSED = (
    ast.Import,
    ast.ImportFrom,
    ast.While,
    ast.Global,
    ast.Nonlocal,
    ast.ClassDef,
    ast.With,
    ast.Try,
    ast.Raise,
    ast.AsyncFunctionDef,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.Pow,
    ast.LShift,
)


def _short_range(*bounds: int) -> range:
    steps = range(*bounds)
    if len(steps) > _LONGEST:
        raise ValueError("the range is too long")
    return steps


def _namespace() -> dict[str, Any]:
    names = {name: getattr(builtins, name) for name in _ALLOWED}
    names["range"] = _short_range
    return {"__builtins__": names}


def _refused(tree: ast.AST) -> bool:
    """Whether the code has anything that the tasks never need."""
    loops = 0
    for node in ast.walk(tree):
        if isinstance(node, _REFUSED):
            return True
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            return True
        if isinstance(node, ast.Attribute) and node.attr in ("format", "format_map"):
            return True
        if isinstance(node, ast.Name) and node.id.startswith("_"):
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, int) and node.value > 1000:
            return True
        loops += isinstance(node, ast.For | ast.comprehension)
    return loops > 3


def run_function(name: str, code: str, inputs: Iterable[Sequence[Any]]) -> list[Any]:
    """The results of function `name` of `code` on each tuple of arguments.

    Raises `ValueError` for code that is refused, and whatever the code itself raises.
    """
    if len(code) > _MAX_CODE:
        raise ValueError("the code is too long")
    tree = ast.parse(code.strip())
    if _refused(tree):
        raise ValueError("the code uses something that is not allowed here")
    namespace = _namespace()
    exec(compile(tree, "<answer>", "exec"), namespace)
    return [namespace[name](*copy.deepcopy(list(arguments))) for arguments in inputs]


def same_behaviour(code: str, name: str, solution: str, inputs: Sequence[Sequence[Any]]) -> bool:
    """Whether `code` defines `name` and it agrees with `solution` on all inputs."""
    expected_outputs: list[Any] = []
    for arguments in inputs:
        try:
            expected_outputs.append(run_function("solution", solution, [arguments])[0])
        except (ValueError, TypeError, ZeroDivisionError):
            expected_outputs.append(ValueError)
    try:
        for arguments, expected in zip(inputs, expected_outputs, strict=True):
            if expected is ValueError:
                continue
            result = run_function(name, code, [arguments])[0]
            if type(result) is not type(expected) or result != expected:
                return False
    except Exception:  # the model wrote this code: whatever it raises, the answer is wrong
        return False
    return True
