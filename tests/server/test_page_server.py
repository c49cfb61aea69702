"""The page beside its server, in a browser: the live line, links, pictures, races."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.support.browser import Page
from tests.server.support.mock_page_server import Json, MockServer, PathProxy, answer, step
from tests.server.support.page_actions import (
    HELLO,
    IDLE,
    SORTED,
    ask,
    ask_and_wait,
    origins,
    rounds,
    show,
    visit,
)
from tests.server.support.server_process import Served

pytestmark = pytest.mark.full


def state(**counts: Any) -> Json:
    idle = {"running": 0, "waiting": 0, "kv_used": 0.0, "tokens": 0, "draft_steps": 0,
            "verified": 0, "accepted": 0, "time": 0.0}  # fmt: skip
    return {"problem": None, **idle, **counts}


def press(page: Page, label: str, within: str = ".turn") -> None:
    page.evaluate(
        f"[...document.querySelectorAll('{within} button')]"
        f".find((one) => one.textContent == {json.dumps(label)}).click()"
    )


def copied(page: Page, *labels: str) -> str:
    """Press the last turn's button, then those of its menu, and return the text that is copied."""
    page.evaluate(
        "Object.defineProperty(navigator, 'clipboard', {configurable: true, "
        "value: {writeText: async (text) => (window.copied = text)}}), (window.copied = null)"
    )
    press(page, labels[0], ".turn:last-child")
    for label in labels[1:]:
        press(page, label, "#menu")
    return page.until("window.copied")


# ---- the live line ----


def test_live_line_shows_load_and_drafting(reading: Page, mock: MockServer):
    reading.until("document.querySelector('#live').textContent == 'idle'")
    mock.state = state(kv_used=0.04)
    reading.until("document.querySelector('#live').textContent == 'idle · K/V 4 %'")
    mock.state = state(running=2, waiting=1, tokens=100, time=10.0)
    reading.until("document.querySelector('#live').textContent.startsWith('2 running')")
    mock.state = state(
        running=2, waiting=1, tokens=150, draft_steps=20, verified=140, accepted=35, time=10.5,
        kv_used=0.125,
    )  # fmt: skip
    reading.until("document.querySelector('#live').textContent.includes('kept')")
    assert reading.text("#live").split(" · ") == [
        "2 running", "1 waiting", "14.3 tokens/s", "2.8 per step 35 of 140 drafts kept",
        "K/V 12.5 %",
    ]  # fmt: skip
    share = "document.querySelector('.meter').style.getPropertyValue('--share')"
    assert reading.evaluate(share) == "0.25"
    assert len([url for url in reading.requests if url.endswith("/events")]) == 1


def test_engine_restart_is_announced_and_its_end(reading: Page, mock: MockServer):
    mock.state = {"problem": "The engine is restarting."}
    reading.until("!document.querySelector('#server-note').hidden")
    assert reading.texts("#server-note[role=alert]") == ["The engine is restarting."]
    assert reading.text("#live") == ""  # it is told once
    mock.state = state()
    reading.until("document.querySelector('#server-note').hidden")
    assert reading.text("#status") == "The server can answer again."
    assert reading.text("#live") == "idle · K/V 0 %"
    assert reading.problems == []


def test_hidden_page_reads_no_events(reading: Page, mock: MockServer):
    mock.state = state()
    reading.until("document.querySelector('#live').textContent")
    reading.evaluate(
        "Object.defineProperty(document, 'hidden', {configurable: true, get: () => true}), "
        "document.dispatchEvent(new Event('visibilitychange')), 0"
    )
    mock.state = state(running=1)
    reading.evaluate("delete document.hidden, 0")
    assert reading.text("#live").startswith("idle")
    reading.evaluate("document.dispatchEvent(new Event('visibilitychange')), 0")
    reading.until("document.querySelector('#live').textContent.startsWith('1 running')")


# ---- keys and proxies ----


@pytest.fixture
def proxy() -> Iterator[PathProxy]:
    served = Served("--root-path=/strobe", "--api-key=sesame", "--no-adaptive")
    proxy = PathProxy(served.url, "/strobe")
    yield proxy
    proxy.close()
    assert served.stop() == 0


def test_page_works_below_a_path_with_a_key(page: Page, proxy: PathProxy):
    visit(page, proxy.url, "reading")
    assert "requires an API key" in page.text("#server-note")
    page.click("#server-note button")
    page.type("sesame")
    page.press("Enter")
    page.until("document.querySelector('#live').textContent.startsWith('idle')")
    page.click("#examples li:nth-child(4) button")
    ask_and_wait(page, "")
    page.until("document.querySelector('.code code') && location.hash")
    page.reload()
    page.until("document.querySelector('.code code')")
    assert page.text("#model").startswith("strobe-demo")
    assert [url for url in page.requests if not url.startswith(proxy.url)] == []
    page.goto("about:blank")


# ---- links ----


def test_link_reproduces_a_run(reading: Page, mock: MockServer):
    mock.reply(answer(HELLO), answer(HELLO), answer(HELLO))
    ask_and_wait(reading, "before")
    for name, value in {"temperature": 0.5, "system": "Be brief.", "stop": "END"}.items():
        reading.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")
    ask_and_wait(reading, "é <b>\nwhy?")
    link = copied(reading, "Link", "Copy a link to this run")
    reading.evaluate("localStorage.clear()")
    reading.goto("about:blank")
    visit(reading, link, "reading")
    reading.until("document.querySelector('#prompt').value")
    assert reading.evaluate("document.querySelector('#prompt').value") == "é <b>\nwhy?"
    seed = mock.received[1]["seed"]
    assert f"with seed {seed}. Send runs it." in reading.text("#page-note")
    assert len(mock.received) == 2  # nothing runs before it is sent
    ask_and_wait(reading, "")
    again, first = mock.received[2], mock.received[1]
    assert [m["content"] for m in first["messages"]] == [
        "Be brief.",
        "before",
        "Hel",
        "é <b>\nwhy?",
    ]
    assert [m["content"] for m in again.pop("messages")] == ["Be brief.", "é <b>\nwhy?"]
    assert again == {name: value for name, value in first.items() if name != "messages"}


def test_link_carries_earlier_messages_if_asked(reading: Page, mock: MockServer):
    mock.reply(answer(HELLO), answer(HELLO), answer(HELLO))
    ask_and_wait(reading, "one")
    ask_and_wait(reading, "two")
    link = copied(reading, "Link", "Copy it with the messages before")
    reading.goto("about:blank")
    visit(reading, link, "reading")
    reading.until("document.querySelector('#prompt').value")
    assert reading.texts(".message p") == ["one"]
    ask_and_wait(reading, "")
    assert mock.received[2]["messages"] == mock.received[1]["messages"]


@pytest.mark.parametrize("code", ["x", "AAAA", ""])
def test_broken_link_is_one_sentence(code: str, page: Page, mock: MockServer):
    page.goto("about:blank")
    visit(page, f"{mock.url}#run={code}", "reading")
    page.until("!document.querySelector('#page-note').hidden")
    assert page.text("#page-note") == ("The link holds no run that can be read; ask for it again.")
    assert page.problems == []


# ---- pictures ----


def test_picture_is_a_png_of_the_answer(chat: Page, mock: MockServer):
    first = step(("ed", True), (":", False), rejected=[" by"], confidence=[0.9, 0.4])
    mock.reply(answer(SORTED[0], first, *SORTED[1:]))
    ask_and_wait(chat, "Sort\nthese")
    chat.evaluate("URL.createObjectURL = (blob) => ((window.saved = blob), 'blob:x'), 0")
    chat.evaluate(
        "HTMLAnchorElement.prototype.click = function () { window.named = this.download; }, 0"
    )
    press(chat, "Picture")
    chat.until("window.saved")
    assert chat.evaluate("window.named") == "sort-these.png"
    size = "({width, height}) => [window.saved.type, width, height]"
    picture = chat.evaluate(f"createImageBitmap(window.saved).then({size})")
    assert picture[:2] == ["image/png", 2400]
    assert 500 < picture[2] < 1500
    assert chat.problems == []


# ---- races ----


def test_race_shows_both_times_and_runs_again(chat: Page, mock: MockServer):
    mock.reply(*rounds([0.3] * 3, [0.03] * 3))
    ask(chat, "count", "#compare")
    chat.until(f"document.querySelector('.verdict') && {IDLE}")
    assert chat.texts(".race dt") == ["Speculation off", "Speculation on"]
    shares = (
        "[...document.querySelectorAll('.lane')]"
        ".map((one) => +one.style.getPropertyValue('--share'))"
    )
    before = chat.evaluate(shares)
    assert before == pytest.approx([1, 0.1])
    assert chat.texts(".race dd") == ["0.40 s", "0.04 s"]
    tokens = origins(chat)
    press(chat, "Watch the race")
    chat.until("!document.querySelector('.race button').disabled")
    assert origins(chat) == tokens
    assert chat.evaluate(shares) == pytest.approx(before)
    assert len(mock.received) == 6
    assert chat.problems == []


def test_race_is_kept_with_its_verdict(chat: Page, mock: MockServer):
    mock.reply(*rounds([0.3] * 3, [0.03] * 3))
    ask(chat, "count", "#compare")
    chat.until(f"document.querySelector('.verdict') && {IDLE} && location.hash")
    verdict = chat.text(".verdict")
    chat.reload()
    chat.until("document.querySelector('.verdict')")
    assert chat.text(".verdict") == verdict
    assert chat.texts(".answer h3") == ["Speculation off", "Speculation on"]
    show(chat, "reading")
    chat.until("document.querySelectorAll('.reading > .prose > p').length == 2")


# ---- shadow mode ----


def test_shadow_mode_shows_its_report_when_opened(page: Page, mock: MockServer):
    visit(page, mock.url)
    page.until("document.querySelector('#model').textContent.includes('Strobe')")
    assert page.evaluate("document.querySelector('#shadow').hidden")
    mock.shadow = "drafter  group"
    visit(page, mock.url)
    page.until("!document.querySelector('#shadow').hidden")
    assert not [url for url in page.requests if url.endswith("/shadow")]
    page.evaluate("document.querySelector('#shadow summary').click()")
    page.until("document.querySelector('#shadow pre').textContent.includes('drafter  group')")


def test_page_names_the_command_that_verifies_its_models(page: Page, mock: MockServer):
    visit(page, mock.url)
    page.until("!document.querySelector('#verify-note').hidden")
    command = page.evaluate("document.querySelector('#verify-note code').textContent")
    assert command == "strobe verify 'a target' draft"
