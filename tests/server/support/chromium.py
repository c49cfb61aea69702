"""Chromium, by the Chrome DevTools protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.support.browser import PATIENCE, Browser, Json, Page, is_root, write

FLAGS = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)
KEYS = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "Home": (36, ""),
    "End": (35, ""),
}
SHIFT = 8


class Chromium(Browser):
    names = ("chromium", "chromium-browser", "google-chrome")

    def __init__(self, program: str, profile: Path, *flags: str):
        self._pages: dict[str, ChromiumPage] = {}
        root = ["--no-sandbox"] if is_root() else []
        super().__init__([program, *FLAGS, *root, *flags, f"--user-data-dir={profile}"])
        # An incognito context, shared by all pages, keeps what they store in memory. On a busy disk
        # a database of the profile waits for its writes, which may take a minute.
        self._context = self.call("Target.createBrowserContext")["browserContextId"]

    def open(self) -> ChromiumPage:
        blank = {"url": "about:blank", "browserContextId": self._context}
        target = self.call("Target.createTarget", blank)
        attach = {"targetId": target["targetId"], "flatten": True}
        session = self.call("Target.attachToTarget", attach)["sessionId"]
        page = self._pages[session] = ChromiumPage(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.resize()
        return page

    def take(self, event: Json) -> None:
        if page := self._pages.get(event.get("sessionId", "")):
            page.take(event["method"], event["params"])

    def close(self) -> None:
        self.end("Browser.close")


class ChromiumPage(Page):
    def __init__(self, browser: Chromium, session: str):
        super().__init__()
        self._browser, self._session = browser, session

    def call(self, method: str, **params: Any) -> Json:
        return self._browser.call(method, params, sessionId=self._session)

    def take(self, method: str, params: Json) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str([arg.get("value") for arg in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])

    def goto(self, url: str) -> None:
        self.loaded.clear()
        self.call("Page.navigate", url=url)
        assert self.loaded.wait(PATIENCE), f"{url} did not load"

    def reload(self) -> None:
        self.loaded.clear()
        self.call("Page.reload")
        assert self.loaded.wait(PATIENCE), "the page did not load again"

    def evaluate(self, expression: str) -> Any:
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def move_mouse_away(self) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)

    def click(self, selector: str) -> None:
        place = self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            press = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **place, **press)

    def tap(self, selector: str) -> None:
        place = self.middle(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[place])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str, shift: bool = False) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        common["modifiers"] = SHIFT if shift else 0
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **down, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int = 1000, height: int = 800, *, phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )

    def prefer(self, *, scheme: str = "light", reduced_motion: bool = False) -> None:
        motion = "reduce" if reduced_motion else "no-preference"
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        pairs = [{"name": name, "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=pairs)

    def has_name(self, selector: str, name: str) -> bool:
        element = self.call("Runtime.evaluate", expression=f"document.querySelector('{selector}')")
        tree = self.call(
            "Accessibility.getPartialAXTree",
            objectId=element["result"]["objectId"],
            fetchRelatives=False,
        )
        return tree["nodes"][0]["name"]["value"].strip() == name

    def screenshot(self, path: Path) -> None:
        kind = path.suffix[1:]
        write(path, self.call("Page.captureScreenshot", format=kind, quality=85)["data"])
