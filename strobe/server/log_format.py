"""Logging of the server's processes: one record per line on stderr, JSON or plain, without users'
text unless the operator allows it."""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

TOKENS_ONLY = ("strobe.engine", "strobe.server.engine_process.worker")
"""Loggers of the engine process, which sees prompts only as token ids: their exceptions keep their
messages, such as why the engine cannot start."""


class Fields(dict[str, Any]):
    """A record's content as named values: `logger.info(Fields(status=200))`.

    In a JSON record the values are fields. In a plain record they are written as name=value,
    without None and without `time`, which the record has; values with spaces or other invisible
    characters are quoted as in JSON.
    """

    def __str__(self) -> str:
        return json.dumps(self, default=str)

    @property
    def plain(self) -> str:
        fields = {
            name: value for name, value in self.items() if value is not None and name != "time"
        }
        return " ".join(f"{name}={_value(value)}" for name, value in fields.items())


_plain = re.compile(r"[!#-<>-~]+")


def _value(value: object) -> str:
    if isinstance(value, str) and _plain.fullmatch(value):
        return value
    return json.dumps(value, default=str, separators=(",", ":"))


def redact(text: str, show: bool) -> str:
    """Return `text` if `show` is set, else its length."""
    return text if show else f"<{len(text)} characters>"


def timestamp(seconds: float) -> str:
    """Format seconds since 1970 as ISO 8601 in UTC with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, the engine if there are several, and its
    message or its fields."""

    def __init__(self, *, show_text: bool = False, engine: int | None = None):
        super().__init__()
        self.show_text = show_text
        self.engine = engine

    def format(self, record: logging.LogRecord) -> str:
        content: object = record.msg
        fields = Fields(
            time=timestamp(record.created), level=record.levelname, logger=_logger(record)
        )
        if (engine := getattr(record, "engine", self.engine)) is not None:
            fields["engine"] = engine
        if isinstance(content, Fields):
            fields.update(content)
        else:
            fields["message"] = _message(record, self.show_text)
        trace = _trace(record, self.show_text)
        if trace:
            fields["exception"] = trace
        return str(fields)


class PlainFormatter(logging.Formatter):
    """Time, level, logger, the engine if there are several, and message. Further lines of a record
    are indented, so that no text in it can pass for a record."""

    def __init__(self, *, show_text: bool = False, engine: int | None = None):
        super().__init__()
        self.show_text = show_text
        self.engine = engine

    def format(self, record: logging.LogRecord) -> str:
        head = f"{timestamp(record.created)} {record.levelname} {_logger(record)}: "
        trace = _trace(record, self.show_text)
        if (engine := getattr(record, "engine", self.engine)) is not None:
            head += f"engine {engine}: "
        fields = record.msg.plain if isinstance(record.msg, Fields) else None
        text = head + (fields or _message(record, self.show_text))
        text += f"\n{trace}" if trace else ""
        return "\n    ".join(text.splitlines())


def configure_logging(
    level: str = "info",
    *,
    as_json: bool = False,
    show_text: bool = False,
    engine: int | None = None,
) -> None:
    """Send this process's records to stderr; for programs, not for libraries.

    level: minimum level of Strobe's and uvicorn's records ("debug", "info", "warning", "error");
    other libraries log warnings and errors only. show_text: exceptions keep their messages, which
    may quote a prompt. engine: the number of this process's engine, if there are several. uvicorn's
    handlers are removed, and its access log is off, since "strobe.access" replaces it. Raises
    ValueError for an unknown level.
    """
    levels = logging.getLevelNamesMapping()
    number = levels.get(level.upper())
    if not number:
        raise ValueError(
            f"The log level is {level!r}, but must be debug, info, warning, error or critical."
        )
    make = JsonFormatter if as_json else PlainFormatter
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(make(show_text=show_text, engine=engine))
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)
    logging.getLogger("strobe").setLevel(number)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
        logger = logging.getLogger(name)
        logger.handlers.clear()  # set by an earlier uvicorn.Config
        logger.setLevel(number)
        logger.propagate = name != "uvicorn.access"


def engine_logger(
    logger: logging.Logger, engine: int | None
) -> logging.LoggerAdapter[logging.Logger]:
    """Return a logger whose records name that engine, if it is one of several."""
    return logging.LoggerAdapter(logger, {} if engine is None else {"engine": engine})


def _logger(record: logging.LogRecord) -> str:
    """The logger's name; "uvicorn.error" is uvicorn's general logger, not only for errors."""
    return "uvicorn" if record.name == "uvicorn.error" else record.name


def _message(record: logging.LogRecord, show_text: bool) -> str:
    message = record.getMessage()
    if record.name == "asyncio" and record.exc_info and not show_text:
        return message.partition("\n")[0]  # the lines below quote the exception
    return message


def _trace(record: logging.LogRecord, show_text: bool) -> str:
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return ""
    with_messages = show_text or any(
        record.name == name or record.name.startswith(f"{name}.") for name in TOKENS_ONLY
    )
    if with_messages:
        return "".join(traceback.format_exception(error)).rstrip()
    return "\n".join(_without_messages(error, set()))


def _without_messages(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Yield a traceback's lines, causes first, with each message replaced by its length."""
    seen.add(id(error))
    causes = [error.__cause__, None if error.__suppress_context__ else error.__context__]
    if isinstance(error, BaseExceptionGroup):
        causes += error.exceptions
    for cause in causes:
        if cause is not None and id(cause) not in seen:
            yield from _without_messages(cause, seen)
    yield "Traceback (most recent call last):"
    yield from "".join(traceback.format_tb(error.__traceback__)).splitlines()
    name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
    yield f"{name}: {redact(str(error), False)}"
