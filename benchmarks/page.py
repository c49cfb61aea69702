"""How fast the page is, in Chromium: its size, its first answer, its frames, its tokens per second.

    python benchmarks/page.py [--rounds 5] [--json FILE]

The size and the answers are those of `strobe serve` with the demo models. A scripted
answer of 2,000 tokens then streams in at 100 tokens/s, while the page's animation frames are
counted, and is scrolled through, while Chromium's tracing counts the frames on the screen.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import platform
import re
import statistics
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from strobe import __version__  # noqa: E402
from tests.server.support.browser import Json  # noqa: E402
from tests.server.support.chromium import Chromium, ChromiumPage  # noqa: E402
from tests.server.support.mock_page_server import Gate, MockServer, Reply, answer, step  # noqa: E402
from tests.server.support.page_actions import IDLE, figures, visit  # noqa: E402
from tests.server.support.server_process import Served  # noqa: E402

NUM_TOKENS = 2000
TOKENS_PER_STEP = 4
STEPS_PER_SECOND = 25
SCROLL_SPEED = 2000  # pixels per second
PROMPT = "Sort these words from A to Z: ocean, stone, umbrella, ember, water."
PAINTED = """new Promise((done) => {
  const started = performance.now();
  new MutationObserver((_, observer) => {
    if (!document.querySelector(".answer .parts")?.textContent.trim()) return;
    observer.disconnect();
    requestAnimationFrame(() => setTimeout(() => done(performance.now() - started)));
  }).observe(document.querySelector("#log"), {childList: true, subtree: true});
  document.querySelector("#send").click();
})"""
"""Sends the message; the milliseconds until the frame with the answer's first text is painted."""


class Traced(Chromium):
    """Chromium with its tracing."""

    def __init__(self, program: str, profile: Path):
        self._events: list[Json] = []
        self._complete = threading.Event()
        super().__init__(program, profile)

    def take(self, event: Json) -> None:
        if event["method"] == "Tracing.dataCollected":
            self._events += event["params"]["value"]
        elif event["method"] == "Tracing.tracingComplete":
            self._complete.set()
        else:
            super().take(event)

    @contextmanager
    def trace(self) -> Iterator[list[Json]]:
        """Trace frames; the list has the events afterwards."""
        self._events, self._complete = [], threading.Event()
        events: list[Json] = []
        categories = ["disabled-by-default-devtools.timeline.frame"]
        self.call("Tracing.start", {"traceConfig": {"includedCategories": categories}})
        yield events
        self.call("Tracing.end")
        assert self._complete.wait(60)
        events += self._events


class Pause(Gate):
    """A point in a stream that waits for a while."""

    async def passed(self) -> None:
        await asyncio.sleep(1 / STEPS_PER_SECOND)


def words() -> Iterator[str]:
    """The tokens of an endless answer in Markdown: paragraphs, a list, code."""
    for part in itertools.count(1):
        text = f"## Part {part}\n\n" + "Words of a *paragraph* that is **long** enough. " * 6
        text += "\n\n- one item\n- another with `code`\n\n```python\n"
        text += "def function(argument):\n    return [argument, 1, 'text']\n" * 3 + "```\n\n"
        yield from re.findall(r"\n+| *\S+", text)


def long_answer() -> Reply:
    """A reply of NUM_TOKENS tokens, in steps of three drafts and the target's own token."""
    tokens = words()
    parts: list[Json | Gate] = []
    for _ in range(NUM_TOKENS // TOKENS_PER_STEP):
        kept = [(next(tokens), place < TOKENS_PER_STEP - 1) for place in range(TOKENS_PER_STEP)]
        parts += [step(*kept, drafted=7, rejected=["no"], confidence=[0.9] * 7), Pause()]
    return answer(*parts)


def count_frames(events: list[Json]) -> Json:
    """Return a scroll's presented and dropped frames, and the presented ones per second."""
    presented: dict[int, float] = {}  # by number: a frame may be presented in two parts
    dropped = 0
    for event in events:
        if event["name"] == "PipelineReporter" and event["ph"] == "b":
            frame = event["args"]["frame_reporter"]
            if frame["scroll_state"] == "SCROLL_NONE":
                continue
            if frame["state"].startswith("STATE_PRESENTED"):
                presented.setdefault(frame["frame_sequence"], event["ts"])
            dropped += frame["state"] == "STATE_DROPPED"
    seconds = (max(presented.values()) - min(presented.values())) / 1e6
    return {
        "presented": len(presented),
        "dropped": dropped,
        "per_second": round((len(presented) - 1) / seconds, 1),
    }


def measure_frames(browser: Traced, page: ChromiumPage, mock: MockServer, view: str) -> Json:
    """Stream the long answer into a view, then scroll through it."""
    mock.reset()
    mock.reply(long_answer())
    visit(page, mock.url, view)
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type("Go on.")
    page.evaluate(
        """(window.frames = [], (function tick(now) {
          window.frames.push(now);
          requestAnimationFrame(tick);
        })(performance.now()), document.querySelector("#send").click(), 0)"""
    )
    page.until(f"document.querySelector('.answer') && {IDLE}")
    gaps = page.evaluate(
        "((times) => times.slice(1).map((time, i) => time - times[i]))(window.frames.slice(1))"
    )
    page.until("location.hash")
    page.reload()
    page.until("document.querySelector('.answer .parts')?.textContent.includes('Part 2')")
    height = page.evaluate("(scrollTo(0, 0), document.documentElement.scrollHeight - innerHeight)")
    with browser.trace() as scrolled:
        page.call(
            "Input.synthesizeScrollGesture",
            x=500,
            y=400,
            yDistance=-height,
            speed=SCROLL_SPEED,
        )
    gaps.sort()
    return {
        "view": view,
        "streaming": {
            "per_second": round(1000 * len(gaps) / sum(gaps), 1),
            "p99_gap_ms": round(gaps[int(0.99 * len(gaps))], 1),
        },
        "scrolling": count_frames(scrolled) | {"pixels": height},
    }


def transfer(page: ChromiumPage, url: str) -> int:
    """Return the bytes that the page's first load transfers."""
    page.goto(url)
    page.until("document.title != 'Strobe'")
    sizes = page.evaluate(
        "performance.getEntries().filter(({transferSize}) => transferSize)"
        ".map(({transferSize}) => transferSize)"
    )
    return sum(sizes)


CLOCK = """new Promise((done) => (indexedDB.open("strobe").onsuccess = ({target}) => {
  const database = target.result;
  const store = database.transaction("conversations").objectStore("conversations");
  store.get(location.hash.slice(1)).onsuccess = ({target}) => {
    const {record} = target.result.nodes.at(-1);
    database.close();
    const decoded = record.usage.completion_tokens - record.firstTokens;
    const {first, last} = record.times;
    done([decoded / record.report.decode_seconds, (1000 * decoded) / (last - first)]);
  };
}))"""
"""The stored answer's tokens per second by the engine's clock and by the browser's."""


def ask_page(page: ChromiumPage, url: str) -> tuple[float, float, float]:
    """Return milliseconds to the first painted text, and the page's tokens/s by the engine's
    clock and by the browser's."""
    visit(page, url, "reading")
    page.evaluate("document.querySelector('[name=temperature]').value = 0")
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type(PROMPT)
    page.evaluate("new Promise((done) => setTimeout(done, 1000))")  # the page has long loaded
    painted = page.evaluate(PAINTED)
    page.until(f"{IDLE} && location.hash")
    shown = float(figures(page)["tokens/s"].replace(",", ""))
    engine, browser = page.evaluate(CLOCK)
    assert abs(shown - engine) <= 0.5, (shown, engine)
    page.goto("about:blank")
    return painted, engine, browser


def ask_alone(url: str) -> float:
    """Return the same answer's tokens/s by the engine's clock for a client without a page."""
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "chat_template_kwargs": {"enable_thinking": True},
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_speculation": True,
        "speculation": {"return_drafts": True},
        "temperature": 0,
    }
    request = urllib.request.Request(
        url + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    first = next(event["choices"][0]["step"] for event in events if event["choices"])
    decoded = events[-1]["usage"]["completion_tokens"] - len(first["tokens"])
    return decoded / events[-1]["speculation"]["decode_seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    program = Chromium.find()
    assert program, "This needs Chromium: install Debian's package chromium."
    served, mock = Served(), MockServer()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Traced(program, Path(profile))
        page = browser.open()
        size = transfer(page, served.url)
        ask_alone(served.url)
        asked = [(*ask_page(page, served.url), ask_alone(served.url)) for _ in range(args.rounds)]
        frames = [measure_frames(browser, page, mock, view) for view in ("reading", "tokens")]
        agent = browser.call("Browser.getVersion")["product"]
        page.goto("about:blank")
        browser.close()
    mock.close()
    served.stop()
    painted, engine, seen, alone = map(statistics.median, zip(*asked, strict=True))
    result = {
        "date": str(date.today()),
        "machine": f"{platform.processor() or platform.machine()}, Linux {platform.release()}",
        "versions": {"chromium": agent, "torch": version("torch"), "strobe": __version__},
        "bytes": size,
        "first_painted_ms": round(painted, 1),
        "tokens_per_second": {
            "engine": round(engine, 1), "browser": round(seen, 1), "alone": round(alone, 1)
        },
        "frames": frames,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
