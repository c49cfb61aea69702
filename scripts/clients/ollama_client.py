"""Ollama's client, with Ollama's API."""

from __future__ import annotations

from typing import Any

from ollama import Client
from pydantic import BaseModel
from shared import FUNCTION, MAX_TOKENS, MODEL, TURTLE, WEATHER, run, user


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    client = Client(host=url, headers={"Authorization": f"Bearer {key}"})
    common: Any = {"model": MODEL, "options": {"temperature": 0, "num_predict": MAX_TOKENS}}

    def streamed(question: str) -> str:
        parts = client.chat(messages=user(question), stream=True, **common)
        return "".join(part.message.content or "" for part in parts)

    assert f"{MODEL}:latest" in [model.model for model in client.list().models]
    called = client.chat(messages=user(WEATHER), tools=[FUNCTION], **common)
    (call,) = called.message.tool_calls or []
    formatted = client.chat(messages=user(TURTLE), format=Turtle.model_json_schema(), **common)
    turtle = Turtle.model_validate_json(formatted.message.content or "")
    return {
        "chat": [client.chat(messages=user(q), **common).message.content for q in questions],
        "chat, streamed": [streamed(text) for text in questions],
        "generate": [client.generate(prompt=text, **common).response for text in questions],
        "a tool": [call.function.arguments],
        "structured output": [turtle.model_dump()],
    }


if __name__ == "__main__":
    run(answers)
