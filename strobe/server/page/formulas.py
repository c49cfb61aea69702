r"""TeX formulas in Markdown: $a$, \(a\), $$a$$ and \[a\], as tokens "formula" of markdown-it.

A formula holds no empty line. $a$ begins and ends at a character that is no space, and next to no
letter, digit or further $, so that prices and names of variables stay text.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.ruler import RuleOptionsType
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline

_LINE_BREAK = r"\n(?![ \t]*\n)"
_DISPLAYED = rf"""
    \$\$ (?P<dollars> (?: \\. | [^\\$\n] | {_LINE_BREAK} )+ ) \$\$
  | \\\[ (?P<brackets> (?: \\[^\[\]] | [^\\\n] | {_LINE_BREAK} )+ ) \\\]
"""
_FORMULA = rf"""{_DISPLAYED}
  | (?<![\w$\\]) \$ (?![\s$]) (?P<dollar> (?: \\. | [^\\$\n] )+ ) (?<!\s) \$ (?![\w$])
  | \\\( (?P<parentheses> (?: \\[^()] | [^\\\n] | {_LINE_BREAK} )+ ) \\\)
"""
_inline = re.compile(_FORMULA, re.VERBOSE)
_block = re.compile(rf"(?:{_DISPLAYED}) \s*", re.VERBOSE)
_opaque = re.compile(rf"`[^`]*(?:`|\Z) | \\\\ | {_FORMULA}", re.VERBOSE)
_opening = re.compile(r"\$\$ | \\[\[(] | (?<![\w$\\]) \$ (?!\s)", re.VERBOSE)
_PROSE = re.compile(r"\b[^\W\d_]{2,}\s+[^\W\d_]{2,}\s|\n[ \t]*\n")
"""Shows that what follows an open formula's mark is text: two words, or an empty line."""


def add_formulas(parser: MarkdownIt) -> None:
    """Make a parser find formulas."""
    breaks: RuleOptionsType = {"alt": ["paragraph", "reference", "blockquote", "list"]}
    parser.block.ruler.before("fence", "formula", _parse_block, breaks)
    parser.inline.ruler.before("escape", "formula", _parse_inline)


def mask(text: str) -> str:
    """Return a text with its code and its formulas replaced by as many letters."""
    return _opaque.sub(lambda match: "x" * len(match[0]), text)


def cut_open_formula(text: str) -> str:
    """Return a text that goes on without the formula that it ends in."""
    masked = mask(text)
    for opening in _opening.finditer(masked):
        if not _PROSE.search(masked, opening.end()):
            return text[: opening.start()]
    return text


def _parse_inline(state: StateInline, silent: bool) -> bool:
    match = _inline.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        token = state.push("formula", "math", 0)
        token.content = _content(match)
        token.meta["display"] = match["dollars"] is not None or match["brackets"] is not None
    state.pos = match.end()
    return True


def _parse_block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    if state.is_code_block(first):
        return False
    start = state.bMarks[first] + state.tShift[first]
    if not state.src.startswith(("$$", "\\["), start):
        return False
    next_line = _end_of_block(state, first, last, state.src[start : start + 2])
    text = state.getLines(first, next_line, state.blkIndent, False).lstrip(" ")
    match = _block.fullmatch(text)
    if match is None:
        return False
    if silent:
        return True
    token = state.push("formula", "math", 0)
    token.block = True
    token.content = _content(match)
    token.meta["display"] = True
    token.map = [first, next_line]
    state.line = next_line
    return True


def _end_of_block(state: StateBlock, first: int, last: int, opening: str) -> int:
    """Return the line after the first one that closes a formula; before it closes, the first line
    that cannot belong to it."""
    closing = "$$" if opening == "$$" else "\\]"
    for number in range(first, last):
        line = state.src[state.bMarks[number] + state.tShift[number] : state.eMarks[number]]
        if number == first:
            line = line.removeprefix(opening)
        elif not line or state.sCount[number] < state.blkIndent:
            return number
        if closing in line:
            return number + 1
        if number > first and line.startswith(opening):
            return number
    return last


def _content(match: re.Match[str]) -> str:
    return next(text for text in match.groupdict().values() if text is not None).strip()
