"""Anthropic's client: messages, streams, tools and the client's own loop over them, structured
outputs, counts, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import anthropic
from anthropic.types import Message
from pydantic import BaseModel
from shared import (
    DEGREES,
    FUNCTION,
    MAX_TOKENS,
    MODEL,
    PARAMETERS,
    TURTLE,
    UNITS,
    WEATHER,
    rejections,
    run,
    user,
)

TOOL: Any = {
    "name": FUNCTION["function"]["name"],
    "description": FUNCTION["function"]["description"],
    "input_schema": PARAMETERS,
}
COMMON: Any = {"model": MODEL, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
PLAIN: Any = {**COMMON, "thinking": {"type": "disabled"}}


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def content_of(message: Any) -> list[Any]:
    """Return a message's blocks without ids, and its stop reason."""
    blocks = [block.to_dict() for block in message.content]
    for block in blocks:
        block.pop("id", None)
    return [*blocks, message.stop_reason]


def created(client: anthropic.Anthropic, question: str) -> list[Any]:
    return content_of(client.messages.create(messages=user(question), **PLAIN))


def streamed(client: anthropic.Anthropic, question: str) -> list[Any]:
    with client.messages.stream(messages=user(question), **PLAIN) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].to_dict()["text"], "the stream's text is not the message's"
    return content_of(message)


def with_tools(client: anthropic.Anthropic) -> list[Any]:
    """Stream an answer that thinks and calls the tool, then send the tool's result."""
    question = user(WEATHER)
    with client.messages.stream(messages=question, tools=[TOOL], **COMMON) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_message()
    assert {"thinking", "signature", "input_json"} <= kinds, kinds
    (use,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": DEGREES}
    answered: Any = {"role": "assistant", "content": first.content}
    messages = [*question, answered, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, tools=[TOOL], **PLAIN)
    usage = first.usage
    count = client.messages.count_tokens(model=MODEL, messages=question, tools=[TOOL])
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return [*content_of(first), *content_of(second)]


def tool_runner(client: anthropic.Anthropic) -> list[Any]:
    """Run the client's own loop over calls, which sends max_tokens beyond the context."""

    @anthropic.beta_tool
    def get_weather(city: str, unit: str) -> str:
        """Use this to know the weather in a city."""
        return DEGREES

    options: Any = {**COMMON, "max_tokens": 16384, "messages": user(WEATHER)}
    results = list(client.beta.messages.tool_runner(tools=[get_weather], **options))
    assert len(results) == 2, results
    return [*content_of(results[0]), *content_of(results[1])]


def forced(client: anthropic.Anthropic) -> list[Any]:
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    message = client.messages.create(
        messages=user("Hello."), tools=[TOOL], tool_choice=choice, **PLAIN
    )
    assert message.content[-1].to_dict()["input"]["unit"] in UNITS
    return content_of(message)


def parsed(client: anthropic.Anthropic) -> list[Any]:
    message = client.messages.parse(messages=user(TURTLE), output_format=Turtle, **PLAIN)
    assert isinstance(message.parsed_output, Turtle)
    return [message.parsed_output.model_dump()]


def stopped(client: anthropic.Anthropic, question: str) -> list[Any]:
    message = client.messages.create(messages=user(question), stop_sequences=["Answer"], **PLAIN)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Answer")
    return content_of(message)


def at_once(client: anthropic.AsyncAnthropic, questions: list[str]) -> list[Any]:
    async def ask() -> list[Message]:
        calls = [client.messages.create(messages=user(text), **PLAIN) for text in questions]
        return await asyncio.gather(*calls)

    return [content_of(message) for message in asyncio.run(ask())]


def rejected(client: anthropic.Anthropic, url: str) -> list[Any]:
    """Check the client's errors for requests that the server rejects."""
    wrong_key_client = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    tries: list[tuple[type[anthropic.APIStatusError], Callable[[], Any]]] = [
        (anthropic.AuthenticationError, lambda: created(wrong_key_client, "Hello.")),
        (anthropic.NotFoundError,
         lambda: client.messages.create(messages=user("Hello."), **{**PLAIN, "model": "x"})),
        (anthropic.BadRequestError, lambda: client.messages.create(messages=image, **PLAIN)),
        (anthropic.BadRequestError,
         lambda: client.messages.create(messages=image, stream=True, **PLAIN)),
    ]  # fmt: skip
    return rejections(tries)


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    async_client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    return {
        "messages": [created(client, text) for text in questions],
        "messages, streamed": [streamed(client, text) for text in questions],
        "messages, all at once": at_once(async_client, questions),
        "stop_sequences": [stopped(client, text) for text in questions],
        "thinking, a tool and its result, count_tokens": [with_tools(client)],
        "tool_runner": [tool_runner(client)],
        "tool_choice": [forced(client)],
        "structured output": [parsed(client)],
        "errors": [rejected(client, url)],
    }


if __name__ == "__main__":
    run(answers)
