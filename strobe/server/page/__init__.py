"""The web page at `/`: static files, served without a build step."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files as resources
from types import MappingProxyType

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def files(root_path: str = "") -> Mapping[str, tuple[str, bytes]]:
    """Return (content type, body) of each file by URL path; index.html is `/`.

    The files are served without an API key; the page asks for it. root_path: the path below which
    a proxy shows the page; its files are found there even if the page's address lacks the slash.
    """
    files: dict[str, tuple[str, bytes]] = {}
    for file in sorted(resources(__name__).iterdir(), key=lambda file: file.name):
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in CONTENT_TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            body = file.read_bytes()
            if path == "/" and root_path:
                base = f'<base href="{escape(root_path)}/">'.encode()
                body = body.replace(b"base-uri 'none'", b"base-uri 'self'")
                body = body.replace(b"<link", base + b"\n    <link", 1)
            files[path] = (CONTENT_TYPES[suffix], body)
    return MappingProxyType(files)
