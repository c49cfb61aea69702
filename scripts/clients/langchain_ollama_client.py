"""LangChain's ChatOllama, with Ollama's API."""

from __future__ import annotations

from typing import Any

from langchain_ollama import ChatOllama
from pydantic import BaseModel
from shared import FUNCTION, MAX_TOKENS, MODEL, TURTLE, WEATHER, run


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    options: Any = {"client_kwargs": {"headers": {"Authorization": f"Bearer {key}"}}}
    chat = ChatOllama(model=MODEL, base_url=url, temperature=0, num_predict=MAX_TOKENS, **options)
    (call,) = chat.bind_tools([FUNCTION]).invoke(WEATHER).tool_calls
    turtle = chat.with_structured_output(Turtle).invoke(TURTLE)
    assert isinstance(turtle, Turtle)
    return {
        "chat": [chat.invoke(text).content for text in questions],
        "chat, streamed": ["".join(c.content for c in chat.stream(text)) for text in questions],
        "chat, all at once": [message.content for message in chat.batch(questions)],
        "a tool": [call["args"]],
        "structured output": [turtle.model_dump()],
    }


if __name__ == "__main__":
    run(answers)
