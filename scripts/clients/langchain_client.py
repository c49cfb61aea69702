"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any

from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from shared import FUNCTION, MAX_TOKENS, MODEL, TURTLE, WEATHER, run


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    options: Any = {"max_completion_tokens": MAX_TOKENS, "max_retries": 0}
    chat = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=key, temperature=0, **options)
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
