"""Runs short generated functions in a restricted namespace.

This prevents accidental harm (no imports, no `while`, no private names, short ranges). It is no
sandbox for malicious code.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterable, Sequence
from typing import Any

_MAX_RANGE = 64
_MAX_CODE = 2000
_ALLOWED = (
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "int", "len", "list", "max", "min",
    "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip",
)  # fmt: skip
_FORBIDDEN = (
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
    if len(steps) > _MAX_RANGE:
        raise ValueError("the range is too long")
    return steps


def _namespace() -> dict[str, Any]:
    names = {name: getattr(builtins, name) for name in _ALLOWED}
    names["range"] = _short_range
    return {"__builtins__": names}


def _is_forbidden(tree: ast.AST) -> bool:
    """Return whether the code uses anything that the tasks never need."""
    loops = 0
    for node in ast.walk(tree):
        if isinstance(node, _FORBIDDEN):
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
    """Return the results of the function `name` in `code` for each tuple of arguments.

    Raises `ValueError` for forbidden code, and any error of the code itself.
    """
    if len(code) > _MAX_CODE:
        raise ValueError("the code is too long")
    tree = ast.parse(code.strip())
    if _is_forbidden(tree):
        raise ValueError("the code uses something that is not allowed here")
    namespace = _namespace()
    exec(compile(tree, "<answer>", "exec"), namespace)
    return [namespace[name](*copy.deepcopy(list(arguments))) for arguments in inputs]


def same_behaviour(code: str, name: str, solution: str, inputs: Sequence[Sequence[Any]]) -> bool:
    """Return whether `code` defines `name` and it agrees with `solution` on all inputs."""
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
    except Exception:  # any error of the model's code makes the answer wrong
        return False
    return True
