"""Requests below a proxy's path, `--root-path`, from proxies that strip it and that do not."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)


class RootPath:
    """Takes the root path off a path in which a proxy has left it.

    Uvicorn puts the root path before each path, since a proxy is expected to strip it. A path that
    then has it twice comes from a proxy that does not, or from a browser without a proxy.
    """

    def __init__(self, app: ASGIApp, root_path: str):
        self.app = app
        self.root_path = root_path
        self._said = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        twice = self.root_path * 2
        if scope["type"] == "http" and (scope["path"] + "/").startswith(twice + "/"):
            if not self._said:
                self._said = True
                logger.info(
                    "A request came with %s in its path: the proxy does not strip it, or there is "
                    "none. The server takes it off, so both work.",
                    self.root_path,
                )
            rest = scope["path"].removeprefix(twice) or "/"
            scope = {**scope, "path": self.root_path + rest}
            scope["raw_path"] = scope["path"].encode()
        await self.app(scope, receive, send)
