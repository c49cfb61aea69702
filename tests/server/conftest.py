"""One real server on the pair in the box, shared by the tests that speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from served import Served


@pytest.fixture(scope="session")
def page_server(server: Served) -> str:
    """Where the real page is."""
    return f"{server.url}/"


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    """`strobe serve` with its defaults."""
    served = Served()
    yield served
    assert served.stop() == 0
