"""Settings that validate their values on construction, with one-sentence errors.

`settings` turns a class into a frozen pydantic dataclass with strict checks: integers convert to
floats, and nothing else is converted.
"""

from __future__ import annotations

import functools
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

MAX_INT = 2**31 - 1
"""The largest count that a field accepts."""

_REQUIREMENTS = {
    "int_type": "be a whole number",
    "int_from_float": "be a whole number",
    "float_type": "be a number",
    "finite_number": "be a finite number",
    "bool_type": "be True or False",
    "string_type": "be a text",
    "string_unicode": "be whole Unicode characters",
    "string_too_short": "be a text of one character or more",
    "greater_than_equal": "be at least {ge}",
    "greater_than": "be above {gt}",
    "less_than_equal": "be at most {le}",
    "literal_error": "be {expected}",
    "dict_type": "be a mapping",
    "no_list": "be a list",
    "too_short": "hold one or more",
    "too_long": "hold at most {max_length}",
}
"""Requirements on a value, by pydantic's error type; they follow "must" in error sentences."""

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 100


def option(default: T, help: str, hint: str = "", *, facts: object = None) -> T:
    """A dataclass field with its help for the command line and the docs, and a hint for errors.
    facts: what else the class's readers must know of the field."""
    return field(default=default, metadata={"help": help, "hint": hint, "facts": facts})


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Class decorator; a class attribute `error_prefix` precedes field names in errors."""
    strict = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    checked: Any = dataclass(frozen=True, config=strict)(cls)
    construct: Callable[..., None] = checked.__init__

    @functools.wraps(construct)
    def init(self: T, *args: object, **kwargs: object) -> None:
        try:
            construct(self, *args, **kwargs)
        except ValidationError as error:
            raise _to_error(error, checked) from None

    checked.__init__ = init
    return checked


def _to_error(error: ValidationError, cls: type[DataclassInstance]) -> Exception:
    """Convert pydantic's first error to an exception with a one-sentence message."""
    first = error.errors(include_url=False)[0]
    context: dict[str, Any] = first.get("ctx", {})
    if first["type"] == "value_error":
        return context["error"]
    name = str(first["loc"][0])
    path = first["loc"][1:]
    if first["type"].startswith("unexpected_"):
        return TypeError(f"{cls.__name__} has no field {name!r}.")
    prefix = getattr(cls, "error_prefix", "")
    hints = {f.name: f.metadata.get("hint", "") for f in fields(cls)}
    location = "" if "[key]" in path else "".join(f"[{part!r}]" for part in path)
    limits = {k: f"{v:g}" if isinstance(v, float) else v for k, v in context.items()}
    requirement = _REQUIREMENTS[first["type"]].format_map(limits)
    hint = f"; {hints[name]}" if hints.get(name) else "."
    return ValueError(
        f"{prefix}{name}{location} is {brief(first['input'])}, but must {requirement}{hint}"
    )


def brief(value: object) -> str:
    """Return a value's repr on one line, shortened if long."""
    return _repr.repr(value).replace("\n", " ")


def as_tuple(value: object) -> tuple[object, ...]:
    """Convert an iterable to a tuple, and None to an empty one."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable | None):
        raise PydanticCustomError("no_list", "no list")
    return () if value is None else tuple(value)


Texts = Annotated[Sequence[str], BeforeValidator(as_tuple)]
Token = Annotated[int, Field(ge=0, le=MAX_INT)]
Tokens = Annotated[Sequence[Token], BeforeValidator(as_tuple)]
"""Token ids, from any iterable."""
