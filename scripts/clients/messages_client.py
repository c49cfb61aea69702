"""Send requests to the server with Anthropic's client, in that client's environment.

    python messages_client.py URL KEY QUESTIONS OUT

QUESTIONS is a JSON list of texts. OUT gets a JSON object: the answers by kind of request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
from anthropic.types import Message
from pydantic import BaseModel

MODEL = "strobe-demo"
WEATHER = "What is the weather in Athens in celsius?"
TURTLE = (
    "Take this text and write a JSON object with the keys animal, name and age. "
    "The white turtle of Noah is called Bamin and is 12 years old."
)
UNITS = ["celsius", "kelvin"]
TOOL: Any = {
    "name": "get_weather",
    "description": "Use this to know the weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "unit": {"enum": UNITS}},
        "required": ["city", "unit"],
    },
}
COMMON: Any = {"model": MODEL, "max_tokens": 256, "extra_body": {"temperature": 0}}
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


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


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
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"degrees": 31}'}
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
        return '{"degrees": 31}'

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
    names: list[str] = []
    for kind, attempt in tries:
        try:
            attempt()
        except kind as error:
            names += [type(error).__name__] if error.request_id else []
    assert len(names) == len(tries), names
    return names


def main(url: str, key: str, questions_file: str, out: str) -> None:
    questions: list[str] = json.loads(Path(questions_file).read_text(encoding="utf-8"))
    client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    async_client = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    results = {
        "create": [created(client, text) for text in questions],
        "stream": [streamed(client, text) for text in questions],
        "async, all at once": at_once(async_client, questions),
        "stop_sequences": [stopped(client, text) for text in questions],
        "stream with thinking and a tool, its result, count_tokens": [with_tools(client)],
        "tool_runner": [tool_runner(client)],
        "tool_choice": [forced(client)],
        "parse": [parsed(client)],
        "errors": [rejected(client, url)],
    }
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
