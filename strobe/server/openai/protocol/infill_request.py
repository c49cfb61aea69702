"""The request and response of llama.cpp's /infill, and the gap that a completion fills in."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field

from strobe.server.schema.base import RequestObject
from strobe.server.schema.field_errors import FieldNames
from strobe.server.schema.sampling_fields import BOUNDS, SamplingFields
from strobe.server.schema.values import Bounds, Int, Text
from strobe.validation import MAX_INT


class InfillFile(RequestObject):
    """Another file of the repository."""

    schema_key: ClassVar[str] = "infill.file"

    filename: Text = "file"
    text: Text


class Gap(NamedTuple):
    """A text to fill in after a prompt. field: the request's field that asks for it. suffix: the
    text after it; files: names and texts of other files; start: the beginning of the answer."""

    field: str
    suffix: str
    files: tuple[tuple[str, str], ...] = ()
    start: str = ""


class InfillRequest(SamplingFields):
    """The body of POST /infill."""

    schema_key: ClassVar[str] = "infill"
    prompt_field: ClassVar[str] = "input_prefix"
    truncate_prompt_tokens: ClassVar[int | None] = None
    add_special_tokens: ClassVar[bool] = True

    input_prefix: str = Field("", description="The text before the answer.")
    input_suffix: str = Field("", description="The text after the answer.")
    input_extra: list[InfillFile] = Field(
        [], description="Other files of the repository: objects with `filename` and `text`."
    )
    prompt: str = Field("", description="The beginning of the answer, which the text leaves out.")
    n_predict: Annotated[Int, Bounds(low=-1, high=MAX_INT, hint="-1 asks for all that fit")] = (
        Field(
            -1,
            description="Maximum number of tokens to generate; -1: as many as fit. With 0 the "
            "prompt alone is computed, for the prefix cache.",
        )
    )
    repeat_penalty: Annotated[float, BOUNDS["repetition_penalty"]] | None = Field(
        None, description="Same as `repetition_penalty`."
    )

    def prompts(self) -> list[str | list[int]]:
        """The text before the answer, as the only prompt."""
        return [self.input_prefix]

    @property
    def gap(self) -> Gap:
        files = [(file.filename, file.text) for file in self.input_extra]
        return Gap(
            field="input_suffix", suffix=self.input_suffix, files=tuple(files), start=self.prompt
        )

    def check(self) -> None:
        super().check()
        options: dict[str, Any] = {}
        if self.repeat_penalty is not None:
            options["repetition_penalty"] = self.repeat_penalty
        if self.seed == -1:  # llama.cpp's value for a random seed
            options["seed"] = None
        self._sampling = self.read_sampling(
            None if self.n_predict < 0 else max(self.n_predict, 1),
            names=FieldNames(max_tokens="n_predict"),
            options=options,
        )
