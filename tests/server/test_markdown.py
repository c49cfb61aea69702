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
    assert [block.line for block in blocks(SAMPLE)] == [0, 2, 6, 10, 15, 17, 19, 21]


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
    assert names == {"comment", "keyword", "name", "string", "left", "right"}
    assert names < known[1]


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
