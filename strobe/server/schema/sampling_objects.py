"""Fields with settings of their own: drafting, and the end of answers that repeat themselves."""

from __future__ import annotations

from typing import Annotated

from strobe.sampling_params import METHODS, Method, RepetitionDetection, Speculation
from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import HERE, FieldNames
from strobe.server.schema.values import Bounds, Int, Must, OneOf
from strobe.validation import MAX_INT


class SpeculationOptions(RequestObject):
    """How a request drafts."""

    method: Annotated[Method, Must(f"one of {', '.join(METHODS)}")] | None = None
    num_drafts: Annotated[Int, Bounds(low=0, high=MAX_INT, hint="0 turns drafting off")] | None = (
        None
    )
    return_drafts: bool = False
    always: bool = False

    def setting(self) -> Speculation:
        return Speculation(**dict(self))


class RepetitionOptions(RequestObject):
    """When an answer that repeats itself ends."""

    max_pattern_size: Annotated[
        Int, Bounds(low=0, high=MAX_INT, hint="0 switches detection off")
    ] = 0
    min_pattern_size: Annotated[Int, Bounds(low=0, high=MAX_INT, hint="0 is the same as 1")] = 0
    min_count: Annotated[Int, Bounds(low=0, high=MAX_INT, hint="2 or more ends answers")] = 0

    def check(self) -> None:
        super().check()
        try:
            self.setting()
        except ValueError as error:
            raise FieldNames(repetition_detection=HERE).option_error(str(error)) from None

    def setting(self) -> RepetitionDetection:
        return RepetitionDetection(**dict(self))


SpeculationField = Annotated[
    bool | SpeculationOptions,
    OneOf(
        choose=lambda value: SpeculationOptions,
        requirement="true, false or an object with its fields",
        words=(True, False),
    ),
]
RepetitionField = Annotated[
    RepetitionOptions,
    OneOf(choose=lambda value: RepetitionOptions, requirement="an object with its fields"),
]


def to_argument(value: object) -> object:
    """Return a field's value as an argument of SamplingParams."""
    if isinstance(value, SpeculationOptions | RepetitionOptions):
        return value.setting()
    return value
