"""The settings of a verification, as options of the command line."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from strobe.validation import option, settings

Count = Annotated[int, Field(ge=1, le=10**9)]


@settings
class VerifySettings:
    """What is verified, and how much of it. Raises ValueError."""

    error_prefix: ClassVar[str] = ""

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
