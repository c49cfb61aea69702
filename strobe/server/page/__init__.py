"""The page the server shows at `/`: plain files, served as they lie here, with no build step."""

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
    """URL path -> (content type, body) of every file of the page; index.html is `/`.

    All of them are public: the page asks for the API key itself, so they are served without one.
    """
    found: dict[str, tuple[str, bytes]] = {}
    for file in sorted(resources(__name__).iterdir(), key=lambda file: file.name):
        suffix = "." + file.name.rpartition(".")[2]
        if suffix in CONTENT_TYPES:
            path = "/" if file.name == "index.html" else f"/{file.name}"
            found[path] = (CONTENT_TYPES[suffix], file.read_bytes())
    return MappingProxyType(found)
