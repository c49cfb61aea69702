"""What an answer must look like, as a caller asks for it. Knows nothing of grammars' machinery."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strobe.checks import listed, whole

STRUCTURES = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputs:
    """What an answer must look like; exactly one of the first five is given.

    json: a JSON schema, as an object or its text. json_object: any JSON object. regex: a regular
    expression the whole answer matches. choice: the answer is one of these texts. grammar: Lark, or
    EBNF in llama.cpp's form. Raises ValueError.

    For models that think first: after, token ids behind which the constraint begins; opener, the
    token that begins thinking, without which the constraint holds from the start; lead, a text that
    may stand before the constrained one. instead: a Lark grammar that the answer may follow in
    place of the constraint, such as that of a tool call.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    after: Sequence[int] = ()
    opener: int | None = None
    lead: str = ""
    instead: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURES if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            said = f"gives {' and '.join(given)}" if given else "gives none"
            raise ValueError(
                f"structured_outputs {said} of {', '.join(STRUCTURES)}; give exactly one."
            )
        if self.json is not None and not isinstance(self.json, str | Mapping):
            raise ValueError(
                f"structured_outputs.json is {reprlib.repr(self.json)}, but must be a JSON schema."
            )
        if not isinstance(self.json_object, bool):
            raise ValueError(
                f"structured_outputs.json_object is {self.json_object!r}, but must be True or "
                "False."
            )
        for name in ("regex", "grammar", "lead", "instead"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(
                    f"structured_outputs.{name} is {reprlib.repr(getattr(self, name))}, but must "
                    "be a text."
                )
        if self.choice is not None:
            choice = listed("structured_outputs.choice", self.choice, "texts")
            if not choice or not all(isinstance(text, str) for text in choice):
                raise ValueError(
                    f"structured_outputs.choice is {reprlib.repr(self.choice)}, but must be a list "
                    "of one or more texts."
                )
            object.__setattr__(self, "choice", choice)
        mend = "name token ids of the model's vocabulary."
        after = listed("structured_outputs.after", self.after, "token ids")
        for token in after:
            whole("structured_outputs.after", token, 0, mend)
        object.__setattr__(self, "after", after)
        for token in self.opener_ids:
            whole("structured_outputs.opener", token, 0, mend)
        if self.opener is not None and not after:
            raise ValueError(
                f"structured_outputs.opener is {self.opener}, but nothing in after ends what it "
                "begins; give both or none."
            )

    @property
    def opener_ids(self) -> tuple[int, ...]:
        """The opener, where there is one."""
        return () if self.opener is None else (self.opener,)

    @staticmethod
    def of(value: Any) -> StructuredOutputs | None:
        """Read an object with these fields, or None."""
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"structured_outputs is {reprlib.repr(value)}, but must be an object with one of "
                f"{', '.join(STRUCTURES)}."
            )
        known = (*STRUCTURES, "after", "opener", "lead", "instead")
        unknown = [name for name in value if name not in known]
        if unknown:
            raise ValueError(
                f"structured_outputs has no field {unknown[0]!r}; it has {', '.join(known)}."
            )
        return StructuredOutputs(**value)
