"""A headless Chromium, driven through a pipe, for the page's tests.

The Chrome DevTools protocol is JSON messages, each ended by a zero byte, on file descriptors 3 (to
the browser) and 4 (from it).
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shutil
import threading
from base64 import b64decode
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60.0  # timeout of waits in seconds
FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1000,800",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
KEYS = {
    "Enter": ("Enter", 13, "\r"),
    "Tab": ("Tab", 9, ""),
    "Escape": ("Escape", 27, ""),
    "ArrowLeft": ("ArrowLeft", 37, ""),
    "ArrowUp": ("ArrowUp", 38, ""),
    "ArrowRight": ("ArrowRight", 39, ""),
    "ArrowDown": ("ArrowDown", 40, ""),
    "Home": ("Home", 36, ""),
    "End": ("End", 35, ""),
}
SHIFT = 8


def find_chromium() -> str | None:
    """Return the first Chromium in PATH, None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running Chromium. profile: an empty directory."""

    def __init__(self, program: str, profile: Path):
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
        inward, self._to = os.pipe()
        self._from, outward = os.pipe()
        # First move both away from 3 and 4, so that neither is overwritten before it is copied.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (inward, outward)]
        self._process = os.posix_spawn(
            program,
            command,
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, ends[0], 3),
                (os.POSIX_SPAWN_DUP2, ends[1], 4),
            ],
        )
        for end in (inward, outward, *ends):
            os.close(end)
        self._ended = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Any]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def open(self) -> Page:
        """Open a new page, 1000 pixels wide."""
        target = self.call("Target.createTarget", url="about:blank")
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[session["sessionId"]] = Page(self, session["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def close(self) -> None:
        """Close Chromium and wait for its end."""
        if not self._ended:
            self.call("Browser.close")
        os.waitpid(self._process, 0)
        self._reader.join(PATIENCE)
        os.close(self._to)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send a command of the protocol and return its result. Raises RuntimeError if it fails."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answer = self._answers[number] = Future()
        if self._ended:
            raise RuntimeError("Chromium has ended.")
        os.write(self._to, json.dumps(message).encode() + b"\0")
        reply = answer.result(PATIENCE + 5)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']['message']}")
        return reply["result"]

    def _read(self) -> None:
        with os.fdopen(self._from, "rb") as pipe:
            rest = b""
            while data := pipe.read1(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers.pop(message["id"]).set_result(message)
                    elif message.get("sessionId") in self._pages:
                        self._pages[message["sessionId"]].take(message["method"], message["params"])
        self._ended = True
        for answer in self._answers.values():
            answer.set_result({"error": {"message": "Chromium has ended."}})


class Page:
    """One page. requests: all URLs that it loaded. problems: its console's errors and warnings."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        self._loaded = threading.Event()
        self.requests: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def take(self, method: str, params: dict[str, Any]) -> None:
        """Record an event of the protocol."""
        if method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def reset(self) -> None:
        """Reset the page's state, which is faster than opening a new page."""
        self.call("Emulation.clearDeviceMetricsOverride")
        self.prefer()
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        self.evaluate(
            "location.protocol == 'about:' || (sessionStorage.clear(), localStorage.clear(), "
            "new Promise((resolve) => indexedDB.deleteDatabase('strobe').onsuccess = resolve))"
        )
        self.problems.clear()
        self.requests.clear()

    def goto(self, url: str) -> None:
        """Load a page, its modules included."""
        self._loaded.clear()
        self.call("Page.navigate", url=url)
        assert self._loaded.wait(PATIENCE), f"{url} did not load"

    def reload(self) -> None:
        """Load the page again."""
        self._loaded.clear()
        self.call("Page.reload")
        assert self._loaded.wait(PATIENCE), "the page did not load again"

    def evaluate(self, expression: str) -> Any:
        """Return an expression's value, or its promise's. Raises AssertionError if it throws."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true and return its value."""
        code = """(async () => {
            for (const end = performance.now() + %d; performance.now() < end; ) {
              const value = (%s);
              if (value) return value;
              await new Promise((resolve) => setTimeout(resolve, 4));
            }
            throw new Error(%s + document.querySelector("main")?.innerText);
        })()"""
        failure = f"It never came true: {expression}\nThe page says:\n"
        return self.evaluate(code % (1000 * PATIENCE, expression, json.dumps(failure)))

    def text(self, selector: str) -> str:
        """Return an element's visible text."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        """Return the exact text of each element, visible or not."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
        )

    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""
        place = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            press = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **place, **press)

    def tap(self, selector: str) -> None:
        """Tap the middle of an element."""
        place = self._middle(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[place])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def _middle(self, selector: str) -> dict[str, float]:
        return self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "nearest"}});
              const {{x, y, width, height}} = element.getClientRects()[0];
              return {{x: x + width / 2, y: y + height / 2}};
            }})()"""
        )

    def type(self, text: str) -> None:
        """Insert text at the focus, as an input method does."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, shift: bool = False) -> None:
        """Press and release one of KEYS."""
        name, code, text = KEYS[key]
        common = {"key": name, "code": name, "windowsVirtualKeyCode": code}
        common["modifiers"] = SHIFT if shift else 0
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, **features: str) -> None:
        """Emulate media features, such as prefers_color_scheme="dark"."""
        pairs = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def accessible_names(self, selectors: Sequence[str]) -> list[str]:
        """Return the names that a screen reader announces for elements."""
        names: list[str] = []
        for selector in selectors:
            element = self.call(
                "Runtime.evaluate", expression=f"document.querySelector({json.dumps(selector)})"
            )
            tree = self.call(
                "Accessibility.getPartialAXTree",
                objectId=element["result"]["objectId"],
                fetchRelatives=False,
            )
            names.append(tree["nodes"][0]["name"]["value"].strip())
        return names

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """Write a PNG of the window for debugging; no test compares pixels."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(b64decode(data))
