"""Markdown as the page's elements, and the end of a text that goes on, in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.server.support.browser import Page
from tests.server.support.mock_page_server import MockServer

pytestmark = pytest.mark.full

MAX_HIGHLIGHTED = 20_000
"""Characters of the longest code block that is highlighted."""

SAMPLE = """\
Here is **a *nested* answer** with `a * b` and a [link](https://example.com/a_b), 2 * 3 = 6.

1. First point
   - inner **point**
2. Second ~~point~~

| name | value |
|:-----|------:|
| `a`  | **1** |

```python
def f(x):
    return "`" * x  # a comment
```

## A heading

> quoted *text*

---

The formula $E = mc^2$ and \\(a_1 * b_2\\), then

\\[
x
= \\frac{1}{2} \\\\[2pt]
\\]

- [ ] to do
- [x] **done**
- [link](https://example.com)

It costs $5, or $10 in all.

The *end*."""


class Markdown:
    """The page's modules markdown.js, code.js and tex.js, after Highlight.js has been loaded."""

    def __init__(self, page: Page):
        self._page = page
        self.highlight("1", "python")
        self._page.evaluate('import("./code.js").then(({ pendingColours }) => pendingColours())')

    def blocks(self, texts: Sequence[str], *, is_open: bool = False) -> list[list[Any]]:
        """Return the blocks of each text, as [line, node]."""
        made = "blocks.map(({ line, node }) => [line, node])"
        return self._page.evaluate(
            f"""import("./markdown.js").then(({{ loadParser }}) => loadParser()).then((parse) =>
              {json.dumps(texts)}.map((text) => {{
                const blocks = parse(text, {json.dumps(is_open)});
                return {made};
              }}))"""
        )

    def nodes(self, text: str) -> list[Any]:
        return [node for _, node in self.blocks([text])[0]]

    def shown(self, texts: Sequence[str], *, is_open: bool = False) -> list[str]:
        """Return the text that a reader sees of each text, without blanks."""
        return [
            re.sub(r"\s", "", "".join(text_of(node) for _, node in blocks))
            for blocks in self.blocks(texts, is_open=is_open)
        ]

    def close(self, text: str) -> str:
        return self._call("markdown.js", "close", text)

    def highlight(self, code: str, language: str) -> list[Any]:
        return self._call("code.js", "highlight", code, language)

    def _call(self, module: str, function: str, *arguments: str) -> Any:
        values = ", ".join(map(json.dumps, arguments))
        return self._page.evaluate(f'import("./{module}").then((m) => m.{function}({values}))')


@pytest.fixture(scope="module")
def markdown(one_page: Page, one_mock: MockServer) -> Markdown:
    one_mock.reset()
    one_page.goto(one_mock.url)
    return Markdown(one_page)


def text_of(node: Any) -> str:
    """An element's text, without breaks."""
    return node if isinstance(node, str) else "".join(map(text_of, node[2:]))


def tags(node: Any) -> set[str]:
    if isinstance(node, str):
        return set()
    return {node[0]}.union(*map(tags, node[2:]))


def test_blocks_have_their_first_lines(markdown: Markdown):
    lines = [line for line, _ in markdown.blocks([SAMPLE])[0]]
    assert lines == [0, 2, 6, 10, 15, 17, 19, 21, 23, 28, 32, 34]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "a <b onclick='x'>c</b>", "<div>\n*x*\n</div>", "&lt;i&gt;"],
)
def test_html_stays_text(markdown: Markdown, text: str):
    (node,) = markdown.nodes(text)
    assert tags(node) <= {"p", "br", "em"}
    seen = text.replace("&lt;", "<").replace("&gt;", ">").replace("*", "")
    assert markdown.shown([text]) == [re.sub(r"\s", "", seen)]


@pytest.mark.parametrize(
    ("text", "node"),
    [
        ("[a](https://x.y/z)", ["a", {"href": "https://x.y/z"}, "a"]),
        ("![a](http://x.y/z.png)", ["a", {"href": "http://x.y/z.png"}, "a"]),
        ("<mailto:a@b.c>", ["a", {"href": "mailto:a@b.c"}, "mailto:a@b.c"]),
        ("[a](/reset_prefix_cache)", "a"),
        ("[a](javascript:alert(1))", "[a](javascript:alert(1))"),
        ("![a](data:image/png;base64,AA)", "a"),
    ],
)
def test_links_lead_to_other_sites_only(markdown: Markdown, text: str, node: Any):
    assert markdown.nodes(text) == [["p", {}, node]]


def test_elements_and_classes_are_those_that_the_styles_know(markdown: Markdown):
    nodes = markdown.nodes(SAMPLE + "\n\n> a  \n> b\n\n###### x\n\n![a](https://b.c)")
    used = set[str]().union(*map(tags, nodes))
    assert used == {
        "p", "ul", "ol", "li", "blockquote", "hr", "table", "thead", "tbody", "tr", "th", "td",
        "strong", "em", "del", "br", "code", "pre", "a", "h4", "h6", "span", "math", "input",
    }  # fmt: skip
    names = set(re.findall(r"'class': '(\w+)'", str(nodes)))
    assert names == {"comment", "keyword", "name", "string", "left", "right", "task"}


def math(text: str, display: bool = False) -> list[Any]:
    return ["math", {"display": display}, text]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("$E = mc^2$.", [math("E = mc^2"), "."]),
        (r"\(a^2\) and $b$", [math("a^2"), " and ", math("b")]),
        (r"see \[x_1\] or $$y$$", ["see ", math("x_1", True), " or ", math("y", True)]),
        (r"$\text{5\$}$", [math(r"\text{5\$}")]),
        ("$a*b$ *c*", [math("a*b"), " ", ["em", {}, "c"]]),
        ("It is $5, or $10; US$5 or CA$6.", ["It is $5, or $10; US$5 or CA$6."]),
        ("$HOME/bin:$PATH", ["$HOME/bin:$PATH"]),
        ("`$a$` \\$a$ \\\\(a\\\\)", [["code", {}, "$a$"], " $a$ \\(a\\)"]),
        ("$ a $", ["$ a $"]),
        (r"\(a", ["(a"]),
    ],
)
def test_formulas_within_a_paragraph(markdown: Markdown, text: str, parts: list[Any]):
    assert markdown.nodes(text) == [["p", {}, *parts]]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("a\n$$\nx\n=\ny\n$$\nb", [["p", {}, "a"], math("x\n=\ny", True), ["p", {}, "b"]]),
        ("\\[\n- x\n\\]", [math("- x", True)]),
        ("\\[a \\\\[2pt] b\\]", [math("a \\\\[2pt] b", True)]),
        ("1. a\n\n   $$\n   x\n   $$", [["ol", {}, ["li", {}, ["p", {}, "a"], math("x", True)]]]),
        ("> $$\n> x\n> $$", [["blockquote", {}, math("x", True)]]),
        ("$$a\n\nb$$", [["p", {}, "$$a"], ["p", {}, "b$$"]]),
    ],
)
def test_formulas_of_several_lines(markdown: Markdown, text: str, blocks: list[Any]):
    assert markdown.nodes(text) == blocks


def test_lists_of_tasks_have_boxes(markdown: Markdown):
    task: list[Any] = ["li", {"class": "task"}]
    box: list[Any] = [["input", {"checked": done}] for done in (False, True)]
    assert markdown.nodes("- [ ] a\n- [X] **b** c\n- [ ]\n- [x](https://d.e)") == [
        ["ul", {}, [*task, box[0], "a"], [*task, box[1], ["strong", {}, "b"], " c"],
         ["li", {}, "[ ]"], ["li", {}, ["a", {"href": "https://d.e"}, "x"]]]
    ]  # fmt: skip
    assert markdown.nodes("1. [x] a\n\n   b") == [
        ["ol", {}, [*task, box[1], ["p", {}, "a"], ["p", {}, "b"]]]
    ]


@pytest.mark.parametrize("language", ["python", "JSON", "c++", "sh", "html", "diff", "none", ""])
def test_highlighting_changes_no_character(markdown: Markdown, language: str):
    code = '{"a": [1, "x"]}\n\n- if (a < b) { return None; } // <b>\n\t#'
    parts = markdown.highlight(code, language)
    assert "".join(map(text_of, parts)) == code


@pytest.mark.parametrize(
    ("language", "code", "spans"),
    [
        (
            "py",
            "def f():\n    return 'a' + 1",
            "keyword def|name f|keyword return|string 'a'|value 1",
        ),
        ("json", '{"a": [1, true]}', 'name "a"|value 1|keyword true'),
        ("html", "<p class='a'>b</p>", "keyword p|name class|string 'a'|keyword p"),
        ("js", "`a${1}` // c", "string `a|value 1|string `|comment // c"),
        ("dockerfile", "FROM a", "keyword FROM"),
    ],
)
def test_code_has_classes(markdown: Markdown, language: str, code: str, spans: str):
    parts = [part for part in markdown.highlight(code, language) if not isinstance(part, str)]
    shown = [f"{attributes['class']} {text.strip()}" for _, attributes, text in parts]
    assert "|".join(shown) == spans


def test_long_code_is_not_highlighted(markdown: Markdown):
    assert markdown.highlight("1" * MAX_HIGHLIGHTED, "python") != ["1" * MAX_HIGHLIGHTED]
    assert markdown.highlight("1" * (MAX_HIGHLIGHTED + 1), "python") == [
        "1" * (MAX_HIGHLIGHTED + 1)
    ]


def test_open_text_only_grows(markdown: Markdown):
    """No mark of Markdown is ever shown and then taken back."""
    (whole,) = markdown.shown([SAMPLE])
    texts = [SAMPLE[:end] for end in range(len(SAMPLE) + 1)]
    parts = markdown.shown(texts, is_open=True)
    for text, part in zip(texts, parts, strict=True):
        assert whole.startswith(part), text
    assert parts[-1] == whole


def test_text_from_its_last_block_on_gives_the_same_blocks(markdown: Markdown):
    """As the page parses a text that grows."""
    texts = [SAMPLE[:end] for end in range(len(SAMPLE) + 1)]
    last = [
        (text, *blocks[-1])
        for text, blocks in zip(texts, markdown.blocks(texts, is_open=True), strict=True)
        if blocks
    ]
    rests = ["".join(text.splitlines(keepends=True)[line:]) for text, line, _ in last]
    again = [[node for _, node in blocks] for blocks in markdown.blocks(rests, is_open=True)]
    assert again == [[node] for _, _, node in last]


@pytest.mark.parametrize(
    ("text", "closed"),
    [
        ("a **b", "a **b**"),
        ("a **", "a "),
        ("a *b", "a *b*"),
        ("a * b", "a * b"),
        ("a `b * c", "a `b * c`"),
        ("a `b` `", "a `b` "),
        ("a ~~b", "a ~~b~~"),
        ("a [b](http", "a b"),
        ("a $x", "a "),
        ("a $", "a "),
        ("a \\(x \\", "a "),
        ("a $x$ b", "a $x$ b"),
        ("a `$x", "a `$x`"),
        ("b\n\n\\[\nx\n", "b\n\n"),
        ("b\n\n$$x$", "b\n\n"),
        ("It costs $5 in all shops", "It costs $5 in all shops"),
        ("$x *y*$ *z", "$x *y*$ *z*"),
        ("- [", ""),
        ("- a\n- [x]", "- a\n"),
        ("- [x] b", "- [x] b"),
        ("a\n-", "a\n"),
        ("a\n2.", "a\n"),
        ("a\n```py", "a\n"),
        ("```py\nb\n``", "```py\nb\n"),
        ("```py\n*b", "```py\n*b"),
        ("| a |", ""),
        ("| a |\n|---|\n| *b", "| a |\n|---|\n| *b*"),
    ],
)
def test_end_of_an_open_text(markdown: Markdown, text: str, closed: str):
    assert markdown.close(text) == closed


@pytest.mark.parametrize(
    "piece", ["*", "[a]", "`", "$", "\\(", "![", "> ", "**a", "| ", "~~~\n", "[a][b]("]
)
def test_long_texts_of_marks_are_parsed_soon(markdown: Markdown, piece: str):
    """Within the time that the page has for an answer, and not in the square of its length."""
    text = piece * (100_000 // len(piece))
    assert markdown.close(text) is not None
    assert markdown.blocks([text], is_open=True)
