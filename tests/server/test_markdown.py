"""Markdown as the page's elements, and the end of a text that goes on."""

from __future__ import annotations

import re
from typing import Any

import pytest

from strobe.server.page import files
from strobe.server.page.markdown import MAX_HIGHLIGHTED, blocks, close, highlight

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


def text_of(node: Any) -> str:
    """An element's text, without breaks."""
    return node if isinstance(node, str) else "".join(map(text_of, node[2:]))


def shown(text: str, *, is_open: bool = False) -> str:
    """The text that a reader sees, without blanks."""
    parts = [text_of(block.node) for block in blocks(text, is_open=is_open)]
    return re.sub(r"\s", "", "".join(parts))


def tags(node: Any) -> set[str]:
    if isinstance(node, str):
        return set()
    return {node[0]}.union(*map(tags, node[2:]))


def nodes(text: str) -> list[Any]:
    return [block.node for block in blocks(text)]


def test_blocks_have_their_first_lines():
    assert [block.line for block in blocks(SAMPLE)] == [0, 2, 6, 10, 15, 17, 19, 21, 23, 28, 32, 34]


@pytest.mark.parametrize(
    "text",
    ["<script>alert(1)</script>", "a <b onclick='x'>c</b>", "<div>\n*x*\n</div>", "&lt;i&gt;"],
)
def test_html_stays_text(text: str):
    (block,) = blocks(text)
    assert tags(block.node) <= {"p", "br", "em"}
    assert shown(text) == re.sub(r"\s", "", text.replace("&lt;", "<").replace("&gt;", ">")).replace(
        "*", ""
    )


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
def test_links_lead_to_other_sites_only(text: str, node: Any):
    assert nodes(text) == [["p", {}, node]]


def test_page_builds_every_element_and_class():
    script = files()["/markdown.js"][1].decode()
    known = [set(words.split()) for words in re.findall(r'new Set\(\s*"([^"]+)"', script)]
    text = SAMPLE + "\n\n> a  \n> b\n\n###### x\n\n![a](https://b.c)"
    used = set[str]().union(*(tags(node) for node in nodes(text)))
    assert used == known[0] - {"h3", "h5"}
    names = set(re.findall(r"'class': '(\w+)'", str(nodes(text))))
    assert names == {"comment", "keyword", "name", "string", "left", "right", "task"}
    assert names < known[1]


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
def test_formulas_within_a_paragraph(text: str, parts: list[Any]):
    assert nodes(text) == [["p", {}, *parts]]


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
def test_formulas_of_several_lines(text: str, blocks: list[Any]):
    assert nodes(text) == blocks


def test_lists_of_tasks_have_boxes():
    task: list[Any] = ["li", {"class": "task"}]
    box: list[Any] = [["input", {"checked": done}] for done in (False, True)]
    assert nodes("- [ ] a\n- [X] **b** c\n- [ ]\n- [x](https://d.e)") == [
        ["ul", {}, [*task, box[0], "a"], [*task, box[1], ["strong", {}, "b"], " c"],
         ["li", {}, "[ ]"], ["li", {}, ["a", {"href": "https://d.e"}, "x"]]]
    ]  # fmt: skip
    assert nodes("1. [x] a\n\n   b") == [
        ["ol", {}, [*task, box[1], ["p", {}, "a"], ["p", {}, "b"]]]
    ]


@pytest.mark.parametrize("language", ["python", "JSON", "c++", "sh", "html", "diff", "none", ""])
def test_highlighting_changes_no_character(language: str):
    code = '{"a": [1, "x"]}\n\n- if (a < b) { return None; } // <b>\n\t#'
    parts = highlight(code, language)
    assert "".join(map(text_of, parts)) == code


def test_long_code_is_not_highlighted():
    assert highlight("1" * MAX_HIGHLIGHTED, "python") != ["1" * MAX_HIGHLIGHTED]
    assert highlight("1" * (MAX_HIGHLIGHTED + 1), "python") == ["1" * (MAX_HIGHLIGHTED + 1)]


def test_open_text_only_grows():
    """No mark of Markdown is ever shown and then taken back."""
    whole = shown(SAMPLE)
    for end in range(len(SAMPLE) + 1):
        part = shown(SAMPLE[:end], is_open=True)
        assert whole.startswith(part), SAMPLE[:end]
    assert part == whole


def test_text_from_its_last_block_on_gives_the_same_blocks():
    """As the page asks for a text that grows."""
    for end in range(len(SAMPLE) + 1):
        text = SAMPLE[:end]
        whole = blocks(text, is_open=True)
        if whole:
            rest = "".join(text.splitlines(keepends=True)[whole[-1].line :])
            assert [block.node for block in blocks(rest, is_open=True)] == [whole[-1].node]


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
def test_end_of_an_open_text(text: str, closed: str):
    assert close(text) == closed
