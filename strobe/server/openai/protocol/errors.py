"""What is wrong with a request, as a sentence, a field's name and OpenAI's error object."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout",
    413: "request_too_large",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    431: "request_too_large",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable",
    504: "timeout",
}
"""The error object's `type` for each HTTP status that the API answers with."""

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "tuple": "a list",
    "dict": "an object",
    "model": "an object",
}
"""What pydantic's error types ask for."""


class FieldError(ValueError):
    """A field of a request that cannot be served: an HTTP 400.

    param: the field's path, such as "messages[0].content"; None where the body as a whole is
    wrong. code: one of OpenAI's words for the kind of mistake.
    """

    def __init__(self, message: str, param: str | None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        """The JSON body of the 400."""
        return error_body(str(self), param=self.param, code=self.code)

    def with_names(self, names: Names) -> FieldError:
        """The same mistake with the names that another endpoint has for its fields."""
        param = None if self.param is None else rename_fields(self.param, names)
        return FieldError(rename_fields(str(self), names), param, self.code)


Names = Mapping[re.Pattern[str], str]
"""Fields of one endpoint, and what stands for them in another's sentences and paths."""


def rename_fields(sentence: str, names: Names) -> str:
    """A sentence, or a field's path, with the names of another endpoint."""
    for pattern, name in names.items():
        sentence = pattern.sub(name, sentence)
    return sentence


class HasErrors(Protocol):
    """pydantic's ValidationError, or what a framework makes of its list."""

    def errors(self) -> Sequence[Any]: ...


def error_body(
    message: str, *, status: int = 400, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object, also for a chunk of a stream. status: a key of ERROR_TYPES."""
    kind = ERROR_TYPES[status]
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def counted(number: int, noun: str) -> str:
    """A number of things, such as 1 token or 2 tokens."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def short_json(value: Any) -> str:
    """A value as a sentence names it: as JSON where that is short."""
    if isinstance(value, str):
        text = json.dumps(value[:60], ensure_ascii=False)
        return text if len(value) <= 60 else f'{text[:-1]}…"'
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return _JSON.repr(value)


class _Json(reprlib.Repr):
    """Lists and objects as JSON writes them, cut where they are long or deep."""

    def repr_str(self, x: str, level: int) -> str:
        return short_json(x)

    def repr_bool(self, x: bool, level: int) -> str:
        return short_json(x)

    def repr_NoneType(self, x: None, level: int) -> str:
        return short_json(x)

    def repr_tuple(self, x: tuple[Any, ...], level: int) -> str:
        return self.repr_list(list(x), level)


_JSON = _Json()


def invalid_value(path: str | None, value: Any, requirement: str, hint: str = "") -> FieldError:
    """ "PATH is VALUE, but must be MUST; HINT" """
    tail = f"; {hint}" if hint else ""
    return FieldError(
        f"{path or 'The body'} is {short_json(value)}, but must be {requirement}{tail}.", path
    )


def to_field_error(error: HasErrors) -> FieldError:
    """The first mistake of a validation as one sentence.

    error: pydantic's ValidationError, or a framework's with the same `errors()`, whose places may
    begin with "body".
    """
    first: Mapping[str, Any] = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        return cause
    place = list(first["loc"])
    if place[:1] == ["body"]:
        place = place[1:]
    if first["type"] == "json_invalid":
        return FieldError("The body is not JSON; send one JSON object.", None, "invalid_json")
    param = _path(place)
    if cause is not None:
        return FieldError(str(cause), param)
    kind: str = first["type"]
    if kind == "missing":
        sentence = f"{param or 'The body'} is missing; the request needs it."
        return FieldError(sentence, param, "missing_required_parameter")
    if kind == "literal_error":
        return invalid_value(
            param, first["input"], f"one of {first['ctx']['expected']}".replace("'", '"')
        )
    must = KINDS.get(kind) or KINDS.get(kind.split("_")[0])
    if must is None:
        message = str(first["msg"])
        return FieldError(
            f"{param or 'The body'} is {short_json(first['input'])}: "
            f"{message[:1].lower()}{message[1:]}.",
            param,
        )
    bad = invalid_value(param, first["input"], must)
    bad.code = "invalid_type"
    return bad


def _path(location: Sequence[str | int]) -> str | None:
    """A place in the body in OpenAI's notation: messages[0].content."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path or None
