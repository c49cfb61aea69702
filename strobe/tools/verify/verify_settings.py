"""The settings of a verification, as options of the command line."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from strobe.validation import option, settings

Count = Annotated[int, Field(ge=1, le=10**9)]


@settings
class VerifySettings:
    """The comparisons of a verification, and their extent. Raises ValueError."""

    error_prefix: ClassVar[str] = ""

    against: str | None = option(
        None,
        "Compare with another engine as well: transformers, or the URL of an OpenAI-compatible "
        "server.",
    )
    against_dtype: Literal["float32", "float16", "bfloat16"] = option(
        "bfloat16", "The dtype that the server of --against runs in, for the limit of its rounding."
    )
    prompts: str | None = option(
        None, "File with one prompt a line (JSON strings or plain text) in place of the built-in."
    )
    tokens: Count = option(
        2000, "Minimum number of generated tokens to check in each run; more find rarer faults."
    )
    max_tokens: Count = option(64, "Maximum tokens of each answer.")
    seeds: Annotated[int, Field(ge=0, le=10**6)] = option(
        48, "Seeds of each run for the test of distributions; 0 leaves it out."
    )
    reference: Literal["auto", "transformers", "strobe"] = option(
        "auto",
        "auto, transformers or strobe (plain torch, whole sequences): what recomputes every row; "
        "auto is transformers where it loads the checkpoint.",
    )
    output: str = option("", "File for the report as Markdown.")

    @model_validator(mode="after")
    def _check_against(self) -> VerifySettings:
        if self.against not in (None, "transformers") and not str(self.against).startswith("http"):
            raise ValueError(
                f"against is {self.against!r}, but must be transformers or a URL such as "
                "http://localhost:8000."
            )
        return self
