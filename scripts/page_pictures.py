"""Take the pictures of the page in docs/page/, with SmolLM2 and Chromium.

python scripts/page_pictures.py [--out docs/page]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.server.support.chromium import Chromium, ChromiumPage  # noqa: E402
from tests.server.support.page_actions import IDLE, visit  # noqa: E402
from tests.server.support.server_process import Served  # noqa: E402

QUESTIONS = (
    "What is the capital of France?",
    "Show me a Python function that capitalizes each word of a string.",
    "Write this text again in clear English: We was going to the store when it start raining, so "
    "we runned home and drinked hot tea.",
)


def ask(page: ChromiumPage, question: str, button: str = "#send") -> None:
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type(question)
    page.click(button)
    page.until(f"{IDLE} && document.querySelector('.turn:last-child .figures div')")
    if button == "#compare":
        page.until("document.querySelector('.turn:last-child .verdict')")
    page.move_mouse_away()


def take(page: ChromiumPage, path: Path) -> None:
    """Write a picture once its frame is complete."""
    page.evaluate("document.activeElement.blur(), 0")
    page.until("document.querySelector('#live').textContent.startsWith('idle')")
    page.evaluate("new Promise((done) => setTimeout(() => requestAnimationFrame(done), 200)), 0")
    page.screenshot(path)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "page")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    program = Chromium.find()
    assert program, "The pictures need Chromium: install Debian's package chromium."
    served = Served("smollm2", patience=300)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Chromium(program, Path(profile))
        page = browser.open()
        page.prefer(reduced_motion=True)
        page.resize(1280, 800)
        visit(page, served.url, "reading")
        page.evaluate("document.querySelector('[name=temperature]').value = 0")
        fact, code, rewriting = QUESTIONS
        ask(page, rewriting)
        page.click("#new-chat")
        ask(page, fact)
        ask(page, code)
        take(page, out / "light.webp")
        page.prefer(scheme="dark", reduced_motion=True)
        page.click("#views [value=tokens]")
        page.click("#conversations li:last-child > button")
        take(page, out / "dark.webp")
        page.prefer(reduced_motion=True)
        page.click("#views [value=reading]")
        page.click("#conversations li > button")
        page.resize(390, 844, phone=True)
        take(page, out / "narrow.webp")
        page.resize(1280, 920)
        page.click("#views [value=tokens]")
        page.click("#new-chat")
        ask(page, rewriting, "#compare")
        take(page, out / "race.webp")
        assert page.problems == [], page.problems
        browser.close()
    served.stop()


if __name__ == "__main__":
    main()
