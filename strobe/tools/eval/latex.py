"""Whether two answers in LaTeX or plain text say the same: by text, by value, part by part."""

from __future__ import annotations

import math
import re
from itertools import permutations

_SPACES = re.compile(r"(?<!\\)\\[!,;: ]|\\q?quad|\\displaystyle|~|\s+")
_SIZES = re.compile(r"\\(?:left|right|[bB]ig+[lrm]?)(?![a-zA-Z])")
_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}"
)
_UNIT = re.compile(
    r"^(.*[\d)}i])\s*\\(?:text|textrm|mbox|mathrm)\s*\{\s*[a-zA-Z][^{}]*\}(?:\^\{?\d\}?)?$",
    re.DOTALL,
)  # 15\mbox{ cm}^2
_SAME = {
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\lbrace": r"\{",
    r"\rbrace": r"\}", "\u2212": "-", "\u2013": "-", "π": r"\pi", "∞": r"\infty", "√": r"\sqrt",
    "\u00d7": "*",
    "·": "*", "÷": "/", "{,}": ",", "°": "", r"^{\circ}": "", r"^\circ": "", r"\degree": "",
    r"\$": "", r"\%": "", "$": "", "%": "", r"\(": "", r"\)": "", r"\[": "", r"\]": "",
}  # fmt: skip
_COMMANDS = {r"\cdot": "*", r"\times": "*", r"\le": r"\leq", r"\ge": r"\geq", r"\ne": r"\neq"}
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_OPEN, _CLOSE = "([", ")]"
_POINTS = (0.7391, 1.6180)  # where expressions with letters are compared
_LONG = 400  # characters; nothing longer is parsed


def normal(text: str) -> str:
    """An answer without what does not change its meaning: spaces, sizes, units, dollar signs."""
    text = text.strip().rstrip(".").strip()
    for old, new in _SAME.items():
        text = text.replace(old, new)
    text = _SIZES.sub("", text)
    unit = _UNIT.match(text.strip())
    if unit is not None and not re.search("[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", unit[1])):
        text = unit[1]
    text = _TEXT.sub(r"\1", text)
    text = _SPACES.sub("", text)
    for old, new in _COMMANDS.items():
        text = re.sub(re.escape(old) + r"(?![a-zA-Z])", lambda _, new=new: new, text)
    text = re.sub(r"\\frac([0-9a-zA-Z])", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})([0-9a-zA-Z])", r"\1{\2}", text)
    text = re.sub(r"\\sqrt([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2", text)
    text = re.sub(r"(?<![\w}.])(\d+)\\frac\{(\d+)\}\{(\d+)\}", r"(\1+\\frac{\2}{\3})", text)
    text = re.sub(r"^[a-zA-Z](?:\([a-zA-Z]\))?(?:=|\\in(?![a-z]))(?=[^=]*$)", "", text)
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def same(given: str, expected: str) -> bool:
    """Whether the answers are equal; of a bare list in any order, of a tuple in its own."""
    if len(given) > _LONG or len(expected) > _LONG:
        return given.strip() == expected.strip()
    return _same(normal(given), normal(expected))


def _same(a: str, b: str) -> bool:
    if a == b or (a.isalpha() and a.casefold() == b.casefold()):
        return a != ""
    left, right = _parts(a), _parts(b)
    if len(left) != len(right):
        return False
    if len(left) > 1:
        ordered = _bracketed(a)
        if ordered != _bracketed(b) or (ordered and (a[0], a[-1]) != (b[0], b[-1])):
            return False
        orders = [tuple(left)] if ordered or len(left) > 6 else permutations(left)
        return any(all(map(_same, order, right)) for order in orders)
    return _equal_values(a, b)


def _parts(text: str) -> list[str]:
    """What stands between the commas of a tuple, an interval or a list; plus-minus is both."""
    inner = text[1:-1] if _bracketed(text) else text
    if inner.startswith(r"\{") and inner.endswith(r"\}"):
        inner = inner[2:-2]
    parts, depth, begin = list[str](), 0, 0
    for i, c in enumerate(inner):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            parts.append(inner[begin:i])
            begin = i + 1
    parts.append(inner[begin:])
    if len(parts) == 1:
        if inner.count(r"\pm") == 1:
            return [inner.replace(r"\pm", sign) for sign in "+-"]
        return [text]
    return [part for part in parts if part]


def _bracketed(text: str) -> bool:
    """Whether one pair of brackets, maybe of an interval open on one side, holds all of it."""
    if len(text) < 2 or text[0] not in _OPEN or text[-1] not in _CLOSE:
        return False
    depth = 0
    for i, c in enumerate(text):
        depth += (c in _OPEN) - (c in _CLOSE)
        if depth == 0 and i < len(text) - 1:
            return False
    return True


def _equal_values(a: str, b: str) -> bool:
    try:
        for point in _POINTS:
            x, y = Parser(a, point).value(), Parser(b, point).value()
            if not math.isclose(x, y, rel_tol=1e-9, abs_tol=1e-12):
                return False
    except (ValueError, ArithmeticError, RecursionError):
        return False
    return True


class Parser:
    """The value of an expression such as `2\\sqrt{3}+\\frac{x}{2}`, its letters being `point`s.

    `value()` raises ValueError for what is none, ArithmeticError for one without a real value.
    """

    _TOKEN = re.compile(
        r"\d+(?:\.\d+)?|\.\d+|\\[a-zA-Z]+|[a-zA-Z]{1,2}(?![a-zA-Z])|[-+*/^(){}\[\]]"
    )

    def __init__(self, text: str, point: float):
        self._tokens: list[str] = []
        at = 0
        while at < len(text):
            match = self._TOKEN.match(text, at)
            if match is None:
                raise ValueError(f"{text[at:]!r} is no part of an expression")
            word = match[0]
            self._tokens += list(word) if word.isalpha() else [word]
            at = match.end()
        self._tokens.append("")
        self._at, self._point = 0, point

    def value(self) -> float:
        found = self._sum()
        if self._next:
            raise ValueError(f"{self._next!r} is left over")
        return found

    @property
    def _next(self) -> str:
        return self._tokens[self._at]

    def _take(self, wanted: str = "") -> str:
        token = self._next
        if not token or (wanted and token != wanted):
            raise ValueError(f"{token!r} stands where {wanted or 'something'!r} should")
        self._at += 1
        return token

    def _sum(self) -> float:
        sign = -1.0 if self._next == "-" else 1.0
        if self._next in ("+", "-"):
            self._take()
        found = sign * self._product()
        while self._next in ("+", "-"):
            sign = -1.0 if self._take() == "-" else 1.0
            found += sign * self._product()
        return found

    def _product(self) -> float:
        found = self._power()
        while self._next and self._next not in ("+", "-", ")", "}", "]"):
            operator = self._take() if self._next in ("*", "/") else "*"
            sign = -1.0 if self._next == "-" else 1.0
            if self._next == "-":
                self._take()
            factor = sign * self._power()
            found = found / factor if operator == "/" else found * factor
        return found

    def _power(self) -> float:
        base = self._atom()
        if self._next != "^":
            return base
        self._take()
        sign = -1.0 if self._next == "-" else 1.0
        if self._next == "-":
            self._take()
        found = base ** (sign * self._atom())
        if isinstance(found, complex):
            raise ValueError("no real value")
        return found

    def _atom(self) -> float:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            return float(token)
        if token in ("(", "{"):
            found = self._sum()
            self._take(")" if token == "(" else "}")
            return found
        if token == r"\frac":
            return self._group() / self._group()
        if token == r"\sqrt":
            return self._root()
        if token == r"\pi":
            return math.pi
        if token.isalpha():
            return self._point * (1 + (ord(token) - ord("A")) / 7)
        raise ValueError(f"{token!r} is no value")

    def _group(self) -> float:
        self._take("{")
        found = self._sum()
        self._take("}")
        return found

    def _root(self) -> float:
        order = 2.0
        if self._next == "[":
            self._take()
            order = self._sum()
            self._take("]")
        return math.pow(self._group(), 1 / order)
