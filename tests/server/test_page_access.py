"""The page for everyone, in a browser: axe-core's rules, narrow windows, themes, motion."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.support.axe_rules import violations
from tests.server.support.browser import Page
from tests.server.support.mock_page_server import Gate, MockServer, answer, refusal, step
from tests.server.support.page_actions import (
    HELLO,
    IDLE,
    SORTED,
    THOUGHT,
    WIDE,
    ask,
    ask_and_wait,
    rounds,
    show,
    visit,
)

pytestmark = pytest.mark.full

RICH = """\
A **bold** word, `code`, a [link](https://example.com/) and a long_word_LONG.

1. one
2. two

```python
def f(x):  # comment
    return "LONG", 1
```

| a | b |
|---|---|
| 1 | LONG |

> quote

- [ ] a task
- [x] done

A formula $a^2$, and a wide one:

$$x = LONG + \\frac{1}{2} + y + y + y + y + y + y + y + y + y + y + y$$

## Heading
""".replace("LONG", "x" * 90)


def converse(page: Page, mock: MockServer) -> None:
    first = step(("ed", True), (":", False), rejected=[" by"], confidence=[0.95, 0.4])
    mock.reply(
        answer(*THOUGHT, seconds=0.1), answer(step((RICH, False), drafted=0)),
        answer(SORTED[0], first, *SORTED[1:], seconds=0.1), refusal(500, "It failed."),
    )  # fmt: skip
    for prompt in ("think", "write", "sort"):
        ask_and_wait(page, prompt)
    ask(page, "fail")
    page.until("document.querySelector('.turn.failed')")


def settings(page: Page, mock: MockServer) -> None:
    page.click("#open-settings")


def menu(page: Page, mock: MockServer) -> None:
    mock.reply(answer(HELLO))
    ask_and_wait(page, "hi")
    page.until("location.hash")
    if not page.evaluate("document.querySelector('#sidebar').checkVisibility()"):
        page.click("#open-sidebar")
    page.until("document.querySelector('#conversations .more')")
    page.click("#conversations .more")


def edit(page: Page, mock: MockServer) -> None:
    mock.reply(answer(HELLO))
    ask_and_wait(page, "hi")
    page.evaluate("document.querySelectorAll('.said button')[1].click()")


def race(page: Page, mock: MockServer) -> None:
    mock.reply(*rounds([0.3] * 3, [0.03] * 3))
    ask(page, "count", "#compare")
    page.until(f"document.querySelector('.verdict') && {IDLE}")


def streaming(page: Page, mock: MockServer) -> None:
    mock.reply(answer(*SORTED[:2], Gate()))
    ask(page, "sort")
    page.until("document.querySelector('.answer').textContent.includes('Sorted')")


STATES: dict[str, Callable[[Page, MockServer], None]] = {
    "welcome": lambda page, mock: None,
    "conversation": converse,
    "settings": settings,
    "menu": menu,
    "edit": edit,
    "race": race,
    "streaming": streaming,
}
LOOKS = {
    "light": (1400, "light", "reading"),
    "dark": (1400, "dark", "tokens"),
    "narrow": (320, "light", "tokens"),
    "narrow and dark": (320, "dark", "reading"),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", STATES)
def test_page_breaks_none_of_the_rules(name: str, look: str, page: Page, mock: MockServer):
    width, scheme, view = LOOKS[look]
    page.resize(width, 800)
    page.prefer(scheme=scheme, reduced_motion=True)
    visit(page, mock.url, view)
    STATES[name](page, mock)
    assert violations(page) == []
    assert page.evaluate(WIDE) == width
    assert [text for text in page.problems if "500" not in text] == []


@pytest.mark.parametrize("view", ["reading", "tokens"])
def test_narrowest_page_shows_everything(view: str, page: Page, mock: MockServer):
    page.resize(320, 640, phone=True)
    visit(page, mock.url, view)
    converse(page, mock)
    assert page.evaluate(WIDE) == 320
    buttons = "[...document.querySelectorAll('button')].filter((one) => one.checkVisibility())"
    assert page.evaluate(f"{buttons}.every((one) => one.getBoundingClientRect().right <= 320)")
    small = f"{buttons}.filter((one) => one.getBoundingClientRect().height < 24)"
    assert page.evaluate(f"{small}.length") == 0


def test_new_chat_begins_at_the_top(page: Page, mock: MockServer):
    page.resize(320, 640, phone=True)
    visit(page, mock.url, "tokens")
    assert page.evaluate("scrollY") == 0
    converse(page, mock)
    page.click("#new-chat")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.evaluate("scrollY") == 0
    assert page.evaluate("document.querySelector('.top').offsetHeight") < 100  # two rows


def test_nothing_moves_where_motion_is_reduced(page: Page, mock: MockServer):
    page.prefer(reduced_motion=True)
    visit(page, mock.url, "tokens")
    streaming(page, mock)
    assert page.evaluate("document.getAnimations().length") == 0
    page.prefer()
    page.until("document.getAnimations().length > 0")
    show(page, "reading")
    page.until("document.getAnimations().length > 0")
