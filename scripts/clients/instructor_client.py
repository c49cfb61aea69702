"""Instructor over OpenAI's client: structured outputs by JSON schema and by a tool."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from pydantic import BaseModel
from shared import MAX_TOKENS, MODEL, TURTLE, run, user


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    results: dict[str, Any] = {}
    for name in ("JSON_SCHEMA", "TOOLS"):
        by_mode = instructor.from_openai(client, mode=instructor.Mode[name])
        turtle = by_mode.chat.completions.create(
            model=MODEL,
            messages=user(TURTLE),
            response_model=Turtle,
            max_retries=0,
            temperature=0,
            max_tokens=MAX_TOKENS,
        )
        results[f"structured output, {name}"] = [turtle.model_dump()]
    return results


if __name__ == "__main__":
    run(answers)
