"""One real server on the demo models, shared by the tests that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served


@pytest.fixture(scope="session")
def real_server() -> Iterator[Served]:
    """`strobe serve` with its defaults, except that every step drafts, however busy the machine is.
    For modules that have a `server` of their own."""
    served = Served("--no-adaptive")
    yield served
    assert served.stop() == 0


@pytest.fixture(scope="session")
def server(real_server: Served) -> Served:
    """The same server, under the usual name."""
    return real_server


@pytest.fixture(scope="session")
def page_server(real_server: Served) -> str:
    """The URL of the real page."""
    return f"{real_server.url}/"
