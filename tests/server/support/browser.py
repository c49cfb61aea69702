"""Headless browsers for the page's tests, driven by JSON messages over a WebSocket."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from abc import ABC, abstractmethod
from base64 import b64decode
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from websockets import ConnectionClosed
from websockets.sync.client import connect

Json = dict[str, Any]

PATIENCE = 60.0  # timeout of waits in seconds
CLEAR = """(async () => {
  if (!location.protocol.startsWith("http")) return;
  sessionStorage.clear();
  localStorage.clear();
  await new Promise((resolve) => (indexedDB.deleteDatabase("strobe").onsuccess = resolve));
})()"""
"""Deletes what the page has stored."""


class Browser(ABC):
    """A running browser. profile: an empty directory."""

    names: ClassVar[Sequence[str]]
    """Its programs' names."""

    @classmethod
    def find(cls) -> str | None:
        """Return the first of the programs in PATH, None if there is none."""
        return next(filter(None, map(shutil.which, cls.names)), None)

    def __init__(self, command: Sequence[str], path: str = ""):
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            text=True, errors="replace",
        )  # fmt: skip
        address: Future[str] = Future()
        threading.Thread(target=self._read_log, args=(address,), daemon=True).start()
        self._socket = connect(address.result(PATIENCE) + path, max_size=None)
        self._ended = False
        self._numbers = itertools.count(1)
        self._answers: dict[int, Future[Json]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @abstractmethod
    def open(self) -> Page:
        """Open a new page, 1000 pixels wide."""

    @abstractmethod
    def take(self, event: Json) -> None:
        """Take note of a message that answers no command."""

    @abstractmethod
    def close(self) -> None:
        """Close the browser."""

    def call(self, method: str, params: Json | None = None, **fields: Any) -> Json:
        """Send a command and return its result. Raises RuntimeError if it fails. fields: of the
        message."""
        number = next(self._numbers)
        answer = self._answers[number] = Future()
        if self._ended:
            raise RuntimeError("The browser has ended.")
        message = {"id": number, "method": method, "params": params or {}, **fields}
        self._socket.send(json.dumps(message))
        reply = answer.result(PATIENCE + 5)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply.get('message', reply['error'])}")
        return reply["result"]

    def end(self, method: str) -> None:
        """Close the browser by a command and wait for its end."""
        if not self._ended:
            self.call(method)
        self._socket.close()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)

    def _read_log(self, address: Future[str]) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"listening on (ws://\S+)", line)
            if found and not address.done():
                address.set_result(found[1])
        if not address.done():
            address.set_exception(RuntimeError("The browser ended before it listened."))

    def _read(self) -> None:
        try:
            while True:
                message = json.loads(self._socket.recv())
                if message.get("id") is not None:
                    self._answers.pop(message["id"]).set_result(message)
                else:
                    self.take(message)
        except ConnectionClosed:
            self._ended = True
        for answer in self._answers.values():
            answer.set_result({"error": "The browser has ended."})


class Page(ABC):
    """One page. requests: all URLs that it loaded. problems: its console's errors and warnings."""

    def __init__(self):
        self.loaded = threading.Event()
        self.requests: list[str] = []
        self.problems: list[str] = []

    def reset(self) -> None:
        """Reset the page's state, which is faster than opening a new page."""
        self.resize()
        self.prefer()
        self.move_mouse_away()
        self.evaluate(CLEAR)
        self.problems.clear()
        self.requests.clear()

    @abstractmethod
    def goto(self, url: str) -> None:
        """Load a page, its modules included."""

    @abstractmethod
    def reload(self) -> None:
        """Load the page again."""

    @abstractmethod
    def evaluate(self, expression: str) -> Any:
        """Return an expression's value, or its promise's. Raises AssertionError if it throws."""

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

    def middle(self, selector: str) -> dict[str, int]:
        """Scroll an element into view and return its middle in the window."""
        return self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "nearest"}});
              const {{x, y, width, height}} = element.getClientRects()[0];
              return {{x: Math.floor(x + width / 2), y: Math.floor(y + height / 2)}};
            }})()"""
        )

    def type(self, text: str) -> None:
        """Insert text at the focus, as an input method does."""
        self.evaluate(
            f"""(async () => {{
              document.execCommand("insertText", false, {json.dumps(text)});
              // Firefox scrolls to it a frame later.
              for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
            }})()"""
        )

    @abstractmethod
    def move_mouse_away(self) -> None:
        """Move the mouse to the window's corner."""

    @abstractmethod
    def click(self, selector: str) -> None:
        """Click the middle of an element with the mouse."""

    @abstractmethod
    def tap(self, selector: str) -> None:
        """Tap the middle of an element."""

    @abstractmethod
    def press(self, key: str, shift: bool = False) -> None:
        """Press and release a key by its name: Enter, Tab, Escape, an arrow, Home, End."""

    @abstractmethod
    def resize(self, width: int = 1000, height: int = 800, *, phone: bool = False) -> None:
        """Resize the window. phone: with twice the pixels."""

    @abstractmethod
    def prefer(self, *, scheme: str = "light", reduced_motion: bool = False) -> None:
        """Set a user's preferences: the colour scheme, and whether things shall not move."""

    @abstractmethod
    def has_name(self, selector: str, name: str) -> bool:
        """Whether a screen reader announces an element by this name."""

    @abstractmethod
    def screenshot(self, path: Path) -> None:
        """Write a picture of the window; no test compares pixels."""


def write(path: Path, data: str) -> None:
    """Write base64 data."""
    path.write_bytes(b64decode(data))


def is_root() -> bool:
    return os.geteuid() == 0
