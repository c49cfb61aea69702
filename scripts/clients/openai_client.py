"""OpenAI's client: chats, the Responses API, structured outputs, tools, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
from pydantic import BaseModel
from shared import DEGREES, FUNCTION, MAX_TOKENS, MODEL, TURTLE, WEATHER, rejections, run, user

COMMON: Any = {"model": MODEL, "temperature": 0, "max_tokens": MAX_TOKENS}


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def created(client: openai.OpenAI, question: str) -> Any:
    return (
        client.chat.completions.create(messages=user(question), **COMMON).choices[0].message.content
    )


def streamed(client: openai.OpenAI, question: str) -> str:
    chunks = client.chat.completions.create(messages=user(question), stream=True, **COMMON)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def with_tools(client: openai.OpenAI) -> list[Any]:
    """Let the model call the tool, then send the tool's result."""
    messages = user(WEATHER)
    first = client.chat.completions.create(messages=messages, tools=[FUNCTION], **COMMON)
    message = first.choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": DEGREES}
    messages = [*messages, message.to_dict(), result]
    second = client.chat.completions.create(messages=messages, tools=[FUNCTION], **COMMON)
    return [call.function.arguments, second.choices[0].message.content]


def parsed(client: openai.OpenAI) -> dict[str, Any]:
    parse = client.chat.completions.parse(messages=user(TURTLE), response_format=Turtle, **COMMON)
    turtle = parse.choices[0].message.parsed
    assert isinstance(turtle, Turtle)
    return turtle.model_dump()


def responded(client: openai.OpenAI, question: str) -> str:
    response = client.responses.create(
        model=MODEL, input=question, temperature=0, max_output_tokens=MAX_TOKENS
    )
    return response.output_text


def at_once(client: openai.AsyncOpenAI, questions: list[str]) -> list[Any]:
    async def ask() -> list[Any]:
        calls = [client.chat.completions.create(messages=user(q), **COMMON) for q in questions]
        return await asyncio.gather(*calls)

    return [completion.choices[0].message.content for completion in asyncio.run(ask())]


def rejected(client: openai.OpenAI) -> list[str]:
    """Check the client's errors for requests that the server rejects."""
    wrong_key = client.with_options(api_key="wrong")
    tries: list[tuple[type[openai.APIStatusError], Callable[[], Any]]] = [
        (openai.AuthenticationError, lambda: created(wrong_key, "Hello.")),
        (openai.NotFoundError, lambda: client.chat.completions.create(
            messages=user("Hello."), **{**COMMON, "model": "x"})),
        (openai.BadRequestError, lambda: client.chat.completions.create(
            messages=user("Hello."), **{**COMMON, "temperature": -1})),
    ]  # fmt: skip
    return rejections(tries)


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    async_client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    assert MODEL in [model.id for model in client.models.list()]
    return {
        "chat": [created(client, text) for text in questions],
        "chat, streamed": [streamed(client, text) for text in questions],
        "chat, all at once": at_once(async_client, questions),
        "responses": [responded(client, text) for text in questions],
        "a tool and its result": [with_tools(client)],
        "structured output": [parsed(client)],
        "errors": [rejected(client)],
    }


if __name__ == "__main__":
    run(answers)
