"""The web page at `/`: static files, served without a build step."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files as resources
from types import MappingProxyType

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def files() -> Mapping[str, tuple[str, bytes]]:
    """Return (content type, body) of each file by URL path; index.html is `/`.

    The files are served without an API key; the page asks for it.
    """
    files: dict[str, tuple[str, bytes]] = {}
    for file in sorted(resources(__name__).iterdir(), key=lambda file: file.name):
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in CONTENT_TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            files[path] = (CONTENT_TYPES[suffix], file.read_bytes())
    return MappingProxyType(files)
