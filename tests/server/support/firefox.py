"""Firefox, by WebDriver BiDi."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from tests.server.support.browser import Browser, Json, Page, write

FLAGS = ("--headless", "--no-remote", "--remote-debugging-port=0", "--remote-allow-system-access")
EVENTS = ("log.entryAdded", "network.beforeRequestSent")
PREFERENCES = 'user_pref("ui.useOverlayScrollbars", 1);'
KEYS = {
    "Enter": "\ue007",
    "Tab": "\ue004",
    "Escape": "\ue00c",
    "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013",
    "ArrowRight": "\ue014",
    "ArrowDown": "\ue015",
    "Home": "\ue011",
    "End": "\ue010",
}
SHIFT = "\ue008"


class Firefox(Browser):
    names = ("firefox-esr", "firefox")

    def __init__(self, program: str, profile: Path):
        self._pages: dict[str, FirefoxPage] = {}
        (profile / "user.js").write_text(PREFERENCES, encoding="utf-8")
        super().__init__([program, *FLAGS, "--profile", str(profile), "about:blank"], "/session")
        self.call("session.new", {"capabilities": {}})
        self.call("session.subscribe", {"events": list(EVENTS)})

    def open(self) -> FirefoxPage:
        context = self.call("browsingContext.create", {"type": "tab"})["context"]
        page = self._pages[context] = FirefoxPage(self, context)
        page.resize()
        return page

    def take(self, event: Json) -> None:
        params = event["params"]
        context = params.get("context") or params.get("source", {}).get("context")
        if page := self._pages.get(context):
            page.take(event["method"], params)

    def close(self) -> None:
        self.end("browser.close")

    def evaluate(self, expression: str, context: str) -> Any:
        target = {"target": {"context": context}, "awaitPromise": True}
        result = self.call("script.evaluate", {"expression": expression, **target})
        if result["type"] == "exception":
            raise AssertionError(result["exceptionDetails"]["text"])
        return plain(result["result"])


class FirefoxPage(Page):
    def __init__(self, browser: Firefox, context: str):
        super().__init__()
        self._browser, self._context = browser, context
        self._icon, self._left = "", set[str]()
        """The page's icon and those of pages left, which Firefox may load later."""

    def call(self, method: str, **params: Any) -> Json:
        return self._browser.call(method, {"context": self._context, **params})

    def take(self, method: str, params: Json) -> None:
        if method == "network.beforeRequestSent":
            url = params["request"]["url"]
            if url not in self._left or url == self._icon:
                self.requests.append(url)
        elif params["level"] in ("error", "warn"):
            self.problems.append(params["text"])

    def goto(self, url: str) -> None:
        self._left.add(self._icon)
        self._icon = urljoin(url, "icon.svg")
        self.call("browsingContext.navigate", url=url, wait="complete")

    def reload(self) -> None:
        self.call("browsingContext.reload", wait="complete")

    def evaluate(self, expression: str) -> Any:
        return self._browser.evaluate(expression, self._context)

    def move_mouse_away(self) -> None:
        self.act("pointer", {"type": "pointerMove", "x": 0, "y": 0})

    def click(self, selector: str) -> None:
        self.act("pointer", *press_at(self.middle(selector)))

    def tap(self, selector: str) -> None:
        self.act("pointer", *press_at(self.middle(selector)), parameters={"pointerType": "touch"})

    def press(self, key: str, shift: bool = False) -> None:
        keys = [SHIFT, KEYS[key]] if shift else [KEYS[key]]
        down = [{"type": "keyDown", "value": value} for value in keys]
        self.act("key", *down, *({"type": "keyUp", "value": value} for value in reversed(keys)))

    def act(self, kind: str, *actions: Json, **fields: Any) -> None:
        """Perform actions of one input device."""
        device = {"type": kind, "id": f"{kind} {fields}", "actions": list(actions), **fields}
        self.call("input.performActions", actions=[device])

    def resize(self, width: int = 1000, height: int = 800, *, phone: bool = False) -> None:
        self.call(
            "browsingContext.setViewport",
            viewport={"width": width, "height": height},
            devicePixelRatio=2 if phone else 1,
        )

    def prefer(self, *, scheme: str = "light", reduced_motion: bool = False) -> None:
        motion = "reduce" if reduced_motion else "no-preference"
        tree = self._browser.call("browsingContext.getTree", {"moz:scope": "chrome"})
        wanted = {"prefersColorSchemeOverride": scheme, "prefersReducedMotionOverride": motion}
        tab = "gBrowser.selectedBrowser.browsingContext"
        window = tree["contexts"][0]["context"]
        self._browser.evaluate(f"Object.assign({tab}, {json.dumps(wanted)}), 0", window)

    def has_name(self, selector: str, name: str) -> bool:
        locator = {"type": "accessibility", "value": {"name": name}}
        for node in self.call("browsingContext.locateNodes", locator=locator)["nodes"]:
            call = {
                "functionDeclaration": f"(element) => element.matches('{selector}')",
                "arguments": [{"sharedId": node["sharedId"]}],
                "target": {"context": self._context},
                "awaitPromise": False,
            }
            if plain(self._browser.call("script.callFunction", call)["result"]):
                return True
        return False

    def screenshot(self, path: Path) -> None:
        write(path, self.call("browsingContext.captureScreenshot")["data"])


def press_at(place: dict[str, int]) -> list[Json]:
    """Pointer actions that press and release at a place."""
    return [
        {"type": "pointerMove", **place},
        {"type": "pointerDown", "button": 0},
        {"type": "pointerUp", "button": 0},
    ]


def plain(value: Json) -> Any:
    """Return a value of the protocol as Python's."""
    inner = value.get("value")
    if value["type"] == "array":
        return [plain(part) for part in inner or ()]
    if value["type"] == "object":
        return {name: plain(part) for name, part in inner or ()}
    return inner
