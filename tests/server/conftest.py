"""One real server on the demo models, shared by the tests that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served


@pytest.fixture(scope="session")
def real_server() -> Iterator[Served]:
    """`strobe serve` with its defaults, but that every step drafts, however busy the machine is; by
    this name also where a module has a `server` of its own."""
    served = Served("--no-adaptive")
    yield served
    assert served.stop() == 0


@pytest.fixture(scope="session")
def server(real_server: Served) -> Served:
    """The same, as most tests call it."""
    return real_server


@pytest.fixture(scope="session")
def page_server(real_server: Served) -> str:
    """Where the real page is."""
    return f"{real_server.url}/"
