"""Log records on stderr: format, level, and no users' text."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn

from strobe.server.log_format import (
    Fields,
    configure_logging,
    redact,
)

SECRET = "the prompt of a user"


@pytest.fixture
def stderr(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Return a function for the text written since its last call."""
    return lambda: capsys.readouterr().err


def raised() -> BaseException:
    """An exception with causes and a group, all of which quote a prompt."""
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            parts = [ValueError(SECRET), TypeError(SECRET)]
            raise ExceptionGroup(SECRET, parts) from error
    except ExceptionGroup as error:
        return error


def test_json_records_are_one_object_per_line(stderr: Callable[[], str]):
    configure_logging("info", as_json=True)
    logging.getLogger("strobe.server").info("listening on %s", "port\n8000")
    logging.getLogger("strobe.access").info(Fields(time="earlier", status=200, path="/a\nb"))
    plain, access = map(json.loads, stderr().splitlines())
    assert plain.pop("time").endswith("+00:00")
    assert plain == {
        "level": "INFO",
        "logger": "strobe.server",
        "message": "listening on port\n8000",
    }
    assert access == {
        "time": "earlier",
        "level": "INFO",
        "logger": "strobe.access",
        "status": 200,
        "path": "/a\nb",
    }


def test_plain_records_list_fields_as_name_value(stderr: Callable[[], str]):
    configure_logging("info")
    logging.getLogger("strobe.server").info("a\n2026 INFO strobe.server: forged")
    fields = Fields(time="earlier", status=200, path="/a b\nc", client=None, id="x=1", sizes=[1, 2])
    logging.getLogger("strobe.access").info(fields)
    first, forged, access = stderr().splitlines()
    assert first.endswith(" INFO strobe.server: a")
    assert forged.startswith("    ")
    line = access.partition("strobe.access: ")[2]
    assert line == 'status=200 path="/a b\\nc" id="x=1" sizes=[1,2]'


@pytest.mark.parametrize("as_json", [True, False])
def test_exception_messages_are_redacted_but_frames_kept(stderr: Callable[[], str], as_json: bool):
    configure_logging("info", as_json=as_json)
    logging.getLogger("uvicorn.error").error("Exception in application", exc_info=raised())
    text = stderr()
    assert SECRET not in text
    for name in ("KeyError", "ValueError", "TypeError", "ExceptionGroup"):
        assert f"{name}: <" in text
    assert f"ValueError: <{len(SECRET)} characters>" in text
    assert "in raised" in text


def test_messages_are_kept_if_enabled_and_in_the_engine(stderr: Callable[[], str]):
    configure_logging("info")
    for name in ("strobe.engine.engine", "strobe.server.engine_process.worker"):
        logging.getLogger(name).error("failed", exc_info=raised())
        assert SECRET in stderr()
    logging.getLogger("strobe.engineering").error("failed", exc_info=raised())
    assert SECRET not in stderr()
    configure_logging("info", show_text=True)
    logging.getLogger("uvicorn.error").error("failed", exc_info=raised())
    assert SECRET in stderr()


def test_unawaited_task_error_omits_text(stderr: Callable[[], str]):
    configure_logging("info")

    async def fails() -> None:
        raise ValueError(SECRET)

    async def forget() -> None:
        task = asyncio.create_task(fails())
        await asyncio.wait([task])
        del task

    asyncio.run(forget())
    text = stderr()
    assert "Task exception was never retrieved" in text
    assert f"ValueError: <{len(SECRET)} characters>" in text
    assert SECRET not in text


def test_level_applies_to_strobe_and_warning_to_libraries(stderr: Callable[[], str]):
    configure_logging("debug")
    for name in ("strobe.x", "uvicorn.error", "a.library"):
        logging.getLogger(name).debug("debug of %s", name)
        logging.getLogger(name).warning("warning of %s", name)
    text = stderr()
    assert ["debug of " + n in text for n in ("strobe.x", "uvicorn.error")] == [True, True]
    assert "debug of a.library" not in text
    assert text.count("warning of") == 3
    configure_logging("ERROR")
    logging.getLogger("strobe.x").warning("quiet")
    logging.getLogger("other").warning("quiet")
    assert "quiet" not in stderr()


def test_repeated_configuration_logs_once_without_uvicorn_access_log(stderr: Callable[[], str]):
    configure_logging()
    configure_logging()
    logging.getLogger("strobe.x").info("once")
    logging.getLogger("uvicorn.access").info("GET /?key=secret")
    text = stderr()
    assert text.count("once") == 1
    assert "secret" not in text
    assert not logging.getLogger("uvicorn.access").hasHandlers(), "uvicorn asks this"


def test_uvicorn_logging_is_replaced(stderr: Callable[[], str]):
    uvicorn.Config("nothing:here", log_level="critical")
    configure_logging("info")
    logging.getLogger("uvicorn.error").info("listening")
    logging.getLogger("uvicorn.error").error("failed", exc_info=raised())
    logging.getLogger("uvicorn.access").info("GET /?key=%s", SECRET)
    text = stderr()
    assert text.count("listening") == text.count(" uvicorn: failed") == 1
    assert "uvicorn.error" not in text
    assert SECRET not in text


@pytest.mark.parametrize("level", ["loud", "notset", ""])
def test_unknown_level_is_rejected(level: str, stderr: Callable[[], str]):
    with pytest.raises(ValueError, match=f"The log level is '{level}'"):
        configure_logging(level)


def test_text_is_logged_only_when_enabled():
    assert redact("Who am I?", False) == "<9 characters>"
    assert redact("Who am I?", True) == "Who am I?"


def test_non_json_values_are_logged_as_text():
    value: Any = {1}
    assert json.loads(str(Fields(a=value))) == {"a": "{1}"}
