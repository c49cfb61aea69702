"""Chromium without a window, driven over its own pipe: what the page's tests need and no more.

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
PATIENCE = 60.0  # seconds until a wait is given up; a wait ends as soon as it can
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
    """The first Chromium in PATH, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running Chromium. profile: an empty directory of its own."""

    def __init__(self, program: str, profile: Path):
        root = ["--no-sandbox"] if os.geteuid() == 0 else []
        command = [program, *FLAGS, *root, f"--user-data-dir={profile}", "about:blank"]
        inward, self._to = os.pipe()
        self._from, outward = os.pipe()
        # Out of the way of 3 and 4 first, so that neither is overwritten before it is copied.
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
        """A new page, 1000 pixels wide."""
        target = self.call("Target.createTarget", url="about:blank")
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = self._pages[session["sessionId"]] = Page(self, session["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        return page

    def close(self) -> None:
        """End Chromium, and wait until it has."""
        if not self._ended:
            self.call("Browser.close")
        os.waitpid(self._process, 0)
        self._reader.join(PATIENCE)
        os.close(self._to)

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """One command of the protocol and its result. Raises RuntimeError where it is refused."""
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
    """One page. requests: every URL it asked for. problems: errors and warnings of its console."""

    def __init__(self, browser: Browser, session: str):
        self._browser, self._session = browser, session
        self._loaded = threading.Event()
        self.requests: list[str] = []
        self.problems: list[str] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def take(self, method: str, params: dict[str, Any]) -> None:
        """An event of the protocol."""
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
        """Like a new page once it goes to the site it has last been at; cheaper than a new one."""
        self.call("Emulation.clearDeviceMetricsOverride")
        self.prefer()
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
        self.evaluate("location.protocol == 'about:' || sessionStorage.clear()")
        self.problems.clear()
        self.requests.clear()

    def goto(self, url: str) -> None:
        """Load a page, its modules included."""
        self._loaded.clear()
        self.call("Page.navigate", url=url)
        assert self._loaded.wait(PATIENCE), f"{url} did not load"

    def evaluate(self, expression: str) -> Any:
        """The value of an expression; a promise is awaited. Raises AssertionError if it throws."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression holds, and give its value."""
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
        """What an element says, as the reader sees it."""
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def texts(self, selector: str) -> list[str]:
        """The exact text of each element, seen or not."""
        return self.evaluate(
            f"[...document.querySelectorAll({json.dumps(selector)})].map((e) => e.textContent)"
        )

    def click(self, selector: str) -> None:
        """A press of the mouse in the middle of an element, at its place on the screen."""
        place = self._middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            press = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **place, **press)

    def tap(self, selector: str) -> None:
        """A finger's press in the middle of an element."""
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
        """Put text in where the focus is, as an input method does."""
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
        """Media features, such as prefers_color_scheme="dark"."""
        pairs = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def accessible_names(self, selectors: Sequence[str]) -> list[str]:
        """The names a screen reader says for elements."""
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
            names.append(tree["nodes"][0]["name"]["value"])
        return names

    def screenshot(self, path: Path, *, full: bool = False) -> None:
        """A PNG of the window, for eyes: no test compares pixels."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=full)["data"]
        path.write_bytes(b64decode(data))
