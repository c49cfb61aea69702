"""One real server on the demo models, shared by the tests that speak HTTP; and a browser with a
scripted server, shared by the tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from fastapi import routing

from tests.server.support.browser import Browser, Page
from tests.server.support.chromium import Chromium
from tests.server.support.firefox import Firefox
from tests.server.support.mock_page_server import MockServer
from tests.server.support.page_actions import visit
from tests.server.support.server_process import Served


@pytest.fixture(autouse=True, scope="session")
def shared_response_models() -> Iterator[None]:
    """Make the validator of each response model once, not for each application: most tests have an
    application of their own."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(routing, "create_model_field", cache(routing.create_model_field))
        yield


@pytest.fixture(scope="session")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`strobe serve` with its defaults, except that every step drafts, however busy the machine is.
    For modules that have a `server` of their own."""
    served = Served("--no-adaptive", f"--batch-dir={tmp_path_factory.mktemp('batches')}")
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


@pytest.fixture(
    scope="session",
    params=[
        pytest.param(Chromium, id="Chromium"),
        pytest.param(Firefox, id="Firefox", marks=[pytest.mark.full, pytest.mark.nightly]),
    ],
)
def browser(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    kind: type[Chromium | Firefox] = request.param
    program = kind.find()
    if program is None:
        pytest.skip(
            f"None of {', '.join(kind.names)} is in PATH; install Debian's package {kind.names[0]}."
        )
    browser = kind(program, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="session")
def one_mock() -> Iterator[MockServer]:
    mock = MockServer()
    yield mock
    mock.close()


@pytest.fixture
def mock(one_mock: MockServer) -> MockServer:
    """The page's scripted server, reset."""
    one_mock.reset()
    return one_mock


@pytest.fixture(scope="session")
def one_page(browser: Browser) -> Page:
    return browser.open()


@pytest.fixture
def page(one_page: Page) -> Page:
    """A page, reset."""
    one_page.reset()
    return one_page


@pytest.fixture
def chat(page: Page, mock: MockServer) -> Page:
    """The page, loaded from the scripted server, with answers token by token."""
    return visit(page, mock.url)


@pytest.fixture
def reading(page: Page, mock: MockServer) -> Page:
    """The page with answers to read."""
    return visit(page, mock.url, "reading")
