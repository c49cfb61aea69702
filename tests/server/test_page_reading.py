"""The page's answers to read, in a browser with a scripted server."""

from __future__ import annotations

import pytest

from tests.server.support.browser import Page
from tests.server.support.mock_page_server import Gate, Json, MockServer, answer, step
from tests.server.support.page_actions import (
    HELLO,
    IDLE,
    SORTED,
    THOUGHT,
    ask,
    ask_and_wait,
    show,
    visit,
)

pytestmark = pytest.mark.full

MARKDOWN = """\
A **bold** word, `code` and a [link](https://example.com/).

- one
- two

```python
def f():
    return 1
```

| a | b |
|---|---|
| 1 | 2 |

The end."""


def by_word(text: str) -> list[Json]:
    """A step for each word."""
    words = [word + " " for word in text.split(" ")]
    return [step((word, False), drafted=0) for word in words]


def test_markdown_is_rendered(reading: Page, mock: MockServer):
    mock.reply(answer(*by_word(MARKDOWN)))
    ask_and_wait(reading, "go")
    assert reading.texts(".prose strong") == ["bold"]
    assert reading.texts(".prose li") == ["one", "two"]
    assert reading.texts(".prose td") == ["1", "2"]
    assert reading.texts(".code header span") == ["python"]
    assert reading.texts(".code code") == ["def f():\n    return 1"]
    assert reading.texts(".code .keyword") == ["def ", "return "]
    assert reading.evaluate("document.querySelector('.prose a').rel") == "noopener noreferrer"
    assert reading.texts("#log :is(.token, .bar)") == []
    assert reading.problems == []


FORMULAS = r"""So $E = mc^2$ and \(a^2\), $\mathbb{R}\mathbb{k}\mathcal{L}$.

\[
\begin{aligned} x &= \frac{1}{2} \\ y &= \boxed{3} \end{aligned}
\]

Not one: $\undefined{x}$ and $\frac{1$.

- [ ] to do
- [x] done"""


def test_formulas_are_set_as_mathml(reading: Page, mock: MockServer):
    mock.reply(answer(*by_word(FORMULAS)))
    ask_and_wait(reading, "go")
    reading.until("document.querySelectorAll('.formula math').length == 4")
    assert [url for url in reading.requests if url.endswith("katex.js")] == [f"{mock.url}katex.js"]
    power = "document.querySelector('.formula msup').textContent"
    assert reading.evaluate(power) == "c2"
    assert reading.texts(".formula.display mtr:first-child mtd") == ["x", "=12"]
    sides = "[...document.querySelectorAll('mtr:first-child mtd')].map((one) => one.className)"
    assert reading.evaluate(sides) == ["right", "left"]
    assert reading.evaluate("document.querySelector('.formula math').namespaceURI.slice(-6)") == (
        "MathML"
    )
    assert reading.texts(".formula mi[mathvariant]") == [
        "\u211d",
        "\U0001d55c",
        "\u2112",
    ]
    assert reading.texts(".formula.raw") == [r"\undefined{x}", r"\frac{1"]
    assert reading.problems == []


def test_libraries_are_loaded_when_they_are_needed(reading: Page, mock: MockServer):
    def loaded() -> list[str]:
        names = [url.removeprefix(mock.url) for url in reading.requests]
        return [name for name in names if name in ("markdown-it.js", "highlight.js", "katex.js")]

    mock.reply(
        *(answer(*by_word(text)) for text in ("It is $5 or $10.", "`$x`", "```py\n1\n```", "$x$"))
    )
    assert loaded() == []
    ask_and_wait(reading, "one")
    reading.until("document.querySelector('.prose p')?.textContent == 'It is $5 or $10.'")
    ask_and_wait(reading, "two")
    assert loaded() == ["markdown-it.js"]
    ask_and_wait(reading, "three")
    reading.until("document.querySelector('.code .value')")
    assert loaded() == ["markdown-it.js", "highlight.js"]
    ask_and_wait(reading, "four")
    reading.until("document.querySelector('.formula math')")
    assert loaded() == ["markdown-it.js", "highlight.js", "katex.js"]


def test_code_is_plain_where_its_colours_fail(reading: Page, mock: MockServer):
    mock.missing = {"/highlight.js"}
    mock.reply(answer(*by_word("```py\nx = 1\n```")))
    ask_and_wait(reading, "go")
    assert reading.texts(".code code") == ["x = 1"]
    assert reading.texts(".code span") == ["py"]


def test_formulas_load_nothing_and_lead_nowhere(reading: Page, mock: MockServer):
    evil = r"$\href{javascript:window.hit=1}{x}$ $\includegraphics{http://127.0.0.1:1/z.png}$ "
    evil += r"$\def\a{\a\a}\a$ $\htmlStyle{color: red}{y}$ $\text{<img src=x>}$"
    mock.reply(answer(step((evil, False), drafted=0)))
    ask_and_wait(reading, "go")
    reading.until("document.querySelector('.formula math')")
    assert reading.evaluate("document.querySelectorAll('#log :is(a, img, [href])').length") == 0
    assert [url for url in reading.requests if not url.startswith(mock.url)] == []


def test_tasks_have_boxes(reading: Page, mock: MockServer):
    mock.reply(answer(*by_word(FORMULAS)))
    ask_and_wait(reading, "go")
    reading.until("document.querySelectorAll('.task input').length == 2")
    boxes = "[...document.querySelectorAll('.task input')]"
    assert reading.evaluate(f"{boxes}.map((one) => [one.checked, one.disabled])") == [
        [False, True],
        [True, True],
    ]
    assert reading.texts(".task") == ["to do", "done"]
    assert reading.has_name(".task input", "to do")


def test_elements_are_kept_while_the_answer_grows(reading: Page, mock: MockServer):
    gates = [Gate(), Gate(), Gate()]
    mock.reply(
        answer(
            step(("First **one", False)), gates[0], step((" two** three", False)), gates[1],
            step(("\n\n```py\nx = 1", False)), gates[2], step(("\ny = 2\n```\n\nEnd.", False)),
        )
    )  # fmt: skip
    ask(reading, "go")
    reading.until("document.querySelector('.prose p')?.textContent == 'First one'")
    elements = "[...document.querySelectorAll('.prose :is(p, strong)')]"
    reading.evaluate(f"(window.kept = {elements}).length")
    gates[0].open()
    reading.until("document.querySelector('.prose p').textContent == 'First one two three'")
    gates[1].open()
    reading.until("document.querySelector('.code code')?.textContent == 'x = 1'")
    reading.evaluate("window.kept.push(document.querySelector('.code')), 0")
    gates[2].open()
    reading.until(IDLE)
    assert reading.texts(".prose > p") == ["First one two three", "End."]
    assert reading.texts(".code code") == ["x = 1\ny = 2"]
    assert reading.evaluate("window.kept.every((e) => e.isConnected) && window.kept.length") == 3


def test_html_in_an_answer_is_inert(reading: Page, mock: MockServer):
    evil = "<img src=x onerror='window.hit = 1'>\n\n<script>window.hit = 1</script>\n\n"
    evil += "[x](javascript:window.hit=1) ![y](http://127.0.0.1:1/z.png)"
    mock.reply(answer(step((evil, False), drafted=0)))
    ask_and_wait(reading, evil)
    assert reading.evaluate("document.querySelectorAll('#log :is(script, img)').length") == 0
    assert reading.texts(".prose a") == ["y"]
    assert reading.evaluate("window.hit") is None
    assert [url for url in reading.requests if not url.startswith(mock.url)] == []


def test_copy_button_copies_the_code(reading: Page, mock: MockServer):
    mock.reply(answer(*by_word(MARKDOWN)))
    ask_and_wait(reading, "go")
    reading.evaluate(
        "Object.defineProperty(navigator, 'clipboard', "
        "{value: {writeText: async (text) => (window.copied = text)}}), 0"
    )
    reading.click(".code button")
    reading.until("document.querySelector('.code button').textContent == 'Copied'")
    assert reading.evaluate("window.copied") == "def f():\n    return 1"


def test_thinking_folds_and_views_switch(reading: Page, mock: MockServer):
    mock.reply(answer(*THOUGHT))
    ask_and_wait(reading, "think")
    assert reading.texts(".thinking .prose") == ["Hm, t"]
    assert not reading.evaluate("document.querySelector('.thinking').open")
    assert reading.texts(".reading > .prose") == ["t is < 5."]
    assert not reading.evaluate("document.querySelector('.legend').checkVisibility()")
    show(reading, "tokens")
    assert reading.texts(".parts > .tokens .token") == ["t", " is", " <", " 5", "."]
    assert reading.evaluate("document.querySelector('.legend').checkVisibility()")
    show(reading, "reading")
    reading.until("document.querySelector('.reading > .prose')?.textContent == 't is < 5.'")


def test_view_may_change_while_the_answer_streams(reading: Page, mock: MockServer):
    gate = Gate()
    mock.reply(answer(*SORTED[:2], gate, *SORTED[2:]))
    ask(reading, "sort")
    reading.until("document.querySelector('.prose p')?.textContent == 'Sorted: fig'")
    show(reading, "tokens")
    assert reading.texts("#log .token") == ["Sort", "ed", ": ", "fig"]
    gate.open()
    reading.until(IDLE)
    assert "".join(reading.texts("#log .token")) == "Sorted: fig, pear,\n  plum!"


def test_view_is_remembered(page: Page, mock: MockServer):
    visit(page, mock.url, "tokens")
    page.goto(mock.url)
    page.until("document.title != 'Strobe'")
    assert page.evaluate("document.body.dataset.view") == "tokens"
    assert page.texts("#views [aria-pressed=true]") == ["Tokens"]


def test_answer_is_plain_text_where_markdown_fails(reading: Page, mock: MockServer):
    mock.missing = {"/markdown-it.js"}
    mock.reply(answer(step(("a **b**\nc", False), drafted=0)))
    ask_and_wait(reading, "go")
    assert reading.texts(".prose .plain") == ["a **b**\nc"]


def test_models_that_do_not_think_have_no_switch_for_it(page: Page, mock: MockServer):
    mock.template = {"reasoning": None, "tools": None, "variables": ["messages"]}
    visit(page, mock.url)
    assert page.text("#in-effect") == "speculation on"
    page.click("#open-settings")
    for name in ("thinking", "tools"):
        assert not page.evaluate(f"document.querySelector('[name={name}]').checkVisibility()")
    page.press("Escape")
    mock.reply(answer(HELLO))
    ask_and_wait(page, "hi")
    assert "chat_template_kwargs" not in mock.received[0]


def test_warnings_of_the_server_are_shown(reading: Page, mock: MockServer):
    first = HELLO | {"warnings": ["seed has no effect: it is a test."]}
    mock.reply(answer(first))
    ask_and_wait(reading, "hi")
    assert reading.texts(".notes .note") == ["seed has no effect: it is a test."]
