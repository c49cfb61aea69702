"""An HTTP client that can disconnect at any moment."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Mapping
from http.client import HTTPConnection, HTTPResponse
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from tests.server.support.polling import PATIENCE

CHAT = "/v1/chat/completions"


class Talk:
    """One request on its own connection. It is sent by the constructor and read on demand."""

    def __init__(
        self,
        url: str,
        path: str = CHAT,
        body: bytes | Mapping[str, Any] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ):
        self.http = HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        sent = json.dumps(body) if isinstance(body, Mapping) else body
        kind = {} if sent is None else {"Content-Type": "application/json"}
        method = method or ("GET" if sent is None else "POST")
        self.http.request(method, path, sent, kind | dict(headers or {}))
        self._response: HTTPResponse | None = None

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    @property
    def response(self) -> HTTPResponse:
        if self._response is None:
            self._response = self.http.getresponse()
        return self._response

    @property
    def status(self) -> int:
        return self.response.status

    def json(self) -> Any:
        return json.loads(self.response.read())

    @property
    def error(self) -> Any:
        """The error object of the body."""
        return self.json()["error"]

    def events(self) -> Iterator[Any]:
        """Yield a stream's events as they arrive; `[DONE]` is a str."""
        for line in self.response:
            if line.startswith(b"data: "):
                text = line[6:].decode().strip()
                yield text if text == "[DONE]" else json.loads(text)

    def leave(self) -> None:
        """Disconnect immediately with a reset, which the server notices at once."""
        if self.http.sock is not None:
            self.http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if self._response is not None:
            self._response.close()
        self.http.close()
