"""What the page's tests share: scripted answers, and what they read from the page."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.server.support.browser import Page
from tests.server.support.mock_page_server import Reply, answer, step

IDLE = "!document.querySelector('#stop').checkVisibility()"
WIDTH = 360
WIDE = "document.documentElement.scrollWidth"

HELLO = step(("Hel", False), drafted=0)
SORTED = (
    step(("Sort", False), drafted=0),
    step(("ed", True), (": ", True), ("fig", False)),
    step((", pear", False)),
    step((",\n  ", True), ("plum", True), ("!", False), finish="stop"),
)
"""Four steps: the prefill, one with two accepted drafts, one with none, one with two."""


def visit(page: Page, url: str, view: str = "tokens") -> Page:
    page.goto(url)
    page.until("document.title != 'Strobe' || !document.querySelector('#server-note').hidden")
    show(page, view)
    return page


def show(page: Page, view: str) -> None:
    """Choose a view: reading or tokens."""
    page.evaluate(f"document.querySelector('#views [value={view}]').click()")


def ask(page: Page, text: str, button: str = "#send") -> None:
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type(text)
    page.click(button)


def ask_and_wait(page: Page, text: str, button: str = "#send") -> None:
    turns = len(page.texts(".turn:not(.failed)"))
    ask(page, text, button)
    page.until(f"document.querySelectorAll('.turn').length > {turns} && {IDLE}")


def origins(page: Page, within: str = ".answer") -> list[list[str]]:
    """[text, class] of each token."""
    return page.evaluate(
        f"[...document.querySelectorAll('{within} .token')]"
        ".map((e) => [e.textContent, e.classList[1]])"
    )


def bars(page: Page, within: str = ".answer") -> list[list[int]]:
    """[accepted, own, drafted + 1] of each bar."""
    return page.evaluate(
        f"[...document.querySelectorAll('{within} .bar')].map((bar) => "
        "['--kept', '--own', '--drafted'].map((name) => +bar.style.getPropertyValue(name)))"
    )


def figures(page: Page, within: str = ".answer") -> dict[str, str]:
    return page.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('{within} .figures div')]"
        ".map((row) => [row.dataset.name, row.querySelector('dd').textContent]))"
    )


THOUGHT = (
    step(("<think>", False), drafted=0, calls=[]),
    step(("\n", True), ("Hm", True), (",", False), thinking="Hm,"),
    step((" t", True), ("\n", True), ("</think>", True), ("\n\n", True), ("t", False),
         thinking=" t", content="t"),
    step((" is", True), (" <", False), content=" is"),  # "<" is held back: it may begin a marker
    step((" 5", True), (".", False), content=" < 5.", finish="stop"),
)  # fmt: skip


def run(*words: str, drafted: int, seconds: float | None = None) -> Reply:
    first, *rest = words
    accepted = [(word, True) for word in rest[:-1]] if drafted else []
    parts = [step((first, False), drafted=0)]
    if drafted:
        parts.append(step(*accepted, (rest[-1], False), drafted=drafted))
    else:
        parts += [step((word, False), drafted=0) for word in rest]
    return answer(*parts, seconds=seconds)


def rounds(off: Sequence[float], on: Sequence[float]) -> list[Reply]:
    """Replies for a comparison: answers of three tokens after the first, with decoding times."""
    words = ("one ", "two ", "three ", "four")
    return [
        run(*words, drafted=drafted, seconds=seconds)
        for pair in zip(off, on, strict=True)
        for drafted, seconds in zip((0, 15), pair, strict=True)
    ]


def contrast(first: str, second: str) -> float:
    """The WCAG contrast ratio of two CSS colours."""

    def luminance(colour: str) -> float:
        channels = [int(c) / 255 for c in re.findall(r"\d+", colour)[:3]]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)
