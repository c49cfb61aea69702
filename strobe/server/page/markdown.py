"""Markdown as elements for the page: plain data that it builds its own elements of.

Nothing here writes HTML, and HTML in a text stays text. An element is a list: its tag, its
attributes, then its children, which are elements and strings.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Literal, Name, Operator, String
from pygments.util import ClassNotFound

from strobe.server.page.formulas import add_formulas, cut_open_formula, mask

Node = str | list[Any]

MAX_HIGHLIGHTED = 20_000
"""Characters of the longest code block that is highlighted."""

_TAGS = {
    "paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "blockquote": "blockquote",
    "hr": "hr", "table": "table", "thead": "thead", "tbody": "tbody", "tr": "tr", "th": "th",
    "td": "td", "strong": "strong", "em": "em", "s": "del", "softbreak": "br", "hardbreak": "br",
}  # fmt: skip

_CLASSES = {
    Comment: "comment", Keyword.Constant: "value", Keyword: "keyword", Operator.Word: "keyword",
    Name.Tag: "keyword", String: "string", Literal: "value", Name.Function: "name",
    Name.Class: "name", Name.Decorator: "name", Name.Builtin: "name", Name.Attribute: "name",
    Generic.Inserted: "string", Generic.Deleted: "value", Generic.Heading: "keyword",
}  # fmt: skip
"""Classes of code, by the kind of pygments' token; the first kind that holds it counts."""

_LINK = re.compile(r"(https?://|mailto:)", re.IGNORECASE)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_MARKERS_ONLY = re.compile(
    r"[\s\-=*_+#>|:`~]*(\d{1,9}[.)]?)?[ \t]*(\[([ xX](\][ \t]*[*~`!\[<\\$]*)?)?)?"
)
"""A line that may become a rule, a heading, a list, a task or a table, or the mark of one."""
_TASK = re.compile(r"\[([ xX])\][ \t]+")
_TABLE_RULE = re.compile(r"[\s|:\-]*-[\s|:\-]*\n")


class Block(NamedTuple):
    """A block of a text. line: its first line, from 0."""

    line: int
    node: Node


def blocks(text: str, *, is_open: bool = False) -> list[Block]:
    """Return the blocks of a Markdown text. is_open: the text goes on, so that its end is shown as
    it will probably be."""
    root = SyntaxTreeNode(_parser().parse(close(text) if is_open else text))
    return [
        Block(child.map[0] if child.map else 0, node)
        for child in root.children
        for node in _nodes(child)
    ]


def close(text: str) -> str:
    """Return a text that goes on, without a last line that may become a marker, and with its open
    code, emphasis and links closed."""
    head, newline, last = text.rpartition("\n")
    if _FENCE.match(last) or _MARKERS_ONLY.fullmatch(last):
        text = head + newline
    in_code, after_code = _fences(text)
    if in_code:
        return text
    text = text[:after_code] + cut_open_formula(text[after_code:])
    start = max(after_code, text.rfind("\n\n") + 2 if "\n\n" in text else 0)
    paragraph = text[start:]
    rows = map(_TABLE_RULE.fullmatch, paragraph.splitlines(keepends=True))
    if paragraph.lstrip().startswith("|") and not any(rows):
        return text[:start]  # a table begins with its second row
    return text[:start] + _close_inline(paragraph)


def _fences(text: str) -> tuple[bool, int]:
    """Return whether a text ends in a block of code between fences, and where its last closed one
    ends."""
    fence = ""
    end = 0
    position = 0
    for line in text.splitlines(keepends=True):
        position += len(line)
        match = _FENCE.match(line)
        if match is None:
            continue
        if not fence:
            fence = match[1]
        elif match[1].startswith(fence) and not line.strip().strip(fence[0]):
            fence = ""
            end = position
    return bool(fence), end


def _close_inline(text: str) -> str:
    text = text.rstrip("*~`![<\\")  # they may open or close something
    if text.count("`") % 2:
        return text + "`"
    prose = mask(text)
    link = re.search(r"!?\[([^\[\]]*)(\]\(?[^()\s]*)?$", prose)
    if link is not None:
        text = text[: link.start()] + link[1]
        prose = prose[: link.start()] + link[1]
    ends = ""
    for mark in ("~~", "**"):
        if prose.count(mark) % 2:
            ends = mark + ends
        prose = prose.replace(mark, "  ")
    if len(re.findall(r"(?<![\w*])\*(?=\S)|(?<=[^\s*])\*(?![\w*])", prose)) % 2:
        ends = "*" + ends
    return text.rstrip() + ends if ends else text


@functools.cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "breaks": True})
    parser.disable(["html_block", "html_inline"])
    add_formulas(parser)
    return parser.enable(["table", "strikethrough"])


def _nodes(node: SyntaxTreeNode) -> Iterator[Node]:
    """Yield a node's elements: several for one without a tag of its own."""
    kind = node.type
    if kind == "text":
        if node.content:
            yield node.content
    elif kind == "code_inline":
        yield ["code", {}, node.content]
    elif kind in ("fence", "code_block"):
        language = node.info.split()[0] if kind == "fence" and node.info.strip() else ""
        yield ["pre", {"language": language}, *highlight(node.content.removesuffix("\n"), language)]
    elif kind == "formula":
        yield ["math", {"display": node.meta["display"]}, node.content]
    elif kind == "list_item":
        yield _list_item(node)
    elif kind == "image":  # a link, since the page loads nothing from elsewhere
        yield from _link(str(node.attrs["src"]), [node.content or str(node.attrs["src"])])
    elif kind == "link":
        yield from _link(str(node.attrs["href"]), _children(node))
    elif kind == "heading":  # under the page's own headings
        yield [f"h{min(int(node.tag[1]) + 2, 6)}", {}, *_children(node)]
    elif kind in _TAGS and not node.hidden:
        yield [_TAGS[kind], _attributes(node), *_children(node)]
    else:
        yield from _children(node)


def _list_item(node: SyntaxTreeNode) -> Node:
    """Return a list's item; [ ] or [x] at its beginning makes it a task with a box."""
    children = _children(node)
    first: object = children[0] if children else ""
    is_paragraph = not isinstance(first, str) and first[0] == "p" and len(first) > 2
    text = first[2] if is_paragraph else first
    task = _TASK.match(text) if isinstance(text, str) else None
    if task is None:
        return ["li", {}, *children]
    rest = [text[task.end() :]] if task.end() < len(text) else []
    children[:1] = [["p", {}, *rest, *first[3:]]] if is_paragraph else rest
    return ["li", {"class": "task"}, ["input", {"checked": task[1] != " "}], *children]


def _children(node: SyntaxTreeNode) -> list[Node]:
    return [part for child in node.children for part in _nodes(child)]


def _attributes(node: SyntaxTreeNode) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    if node.type == "ordered_list" and node.attrs.get("start", 1) != 1:
        attributes["start"] = node.attrs["start"]
    if "style" in node.attrs:
        attributes["class"] = str(node.attrs["style"]).removeprefix("text-align:")
    return attributes


def _link(address: str, children: Sequence[Node]) -> Iterable[Node]:
    return [["a", {"href": address}, *children]] if _LINK.match(address) else children


@functools.lru_cache(64)
def _lexer(language: str) -> Lexer | None:
    try:
        return get_lexer_by_name(language, stripnl=False, ensurenl=False)
    except ClassNotFound:
        return None


@functools.cache
def _class(kind: Any) -> str:
    return next((name for outer, name in _CLASSES.items() if kind in outer), "")


def highlight(code: str, language: str) -> list[Node]:
    """Return code as text and spans with classes, as text alone if its language is not known."""
    lexer = _lexer(language.lower()) if language else None
    if lexer is None or len(code) > MAX_HIGHLIGHTED:
        return [code] if code else []
    parts: list[tuple[str, str]] = []
    for kind, piece in lexer.get_tokens(code):
        name = _class(kind)
        if parts and (parts[-1][0] == name or not piece.strip()):
            parts[-1] = parts[-1][0], parts[-1][1] + piece
        else:
            parts.append((name, piece))
    return [["span", {"class": name}, piece] if name else piece for name, piece in parts]
