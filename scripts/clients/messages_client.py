"""What is asked of the server through Anthropic's own client; it runs in that client's environment.

    python messages_client.py URL KEY QUESTIONS OUT

QUESTIONS is a JSON list of texts. OUT gets a JSON object: by way of asking, what was answered.
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


def said(message: Any) -> list[Any]:
    """A message without ids: its blocks and why it stopped."""
    blocks = [block.to_dict() for block in message.content]
    for block in blocks:
        block.pop("id", None)
    return [*blocks, message.stop_reason]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def whole(client: anthropic.Anthropic, question: str) -> list[Any]:
    return said(client.messages.create(messages=user(question), **PLAIN))


def streamed(client: anthropic.Anthropic, question: str) -> list[Any]:
    with client.messages.stream(messages=user(question), **PLAIN) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].to_dict()["text"], "the stream's text is not the message's"
    return said(message)


def with_tools(client: anthropic.Anthropic) -> list[Any]:
    """Thinks and calls the tool in a stream, then reads its result."""
    asked = user(WEATHER)
    with client.messages.stream(messages=asked, tools=[TOOL], **COMMON) as stream:
        kinds = {event.type for event in stream}
        first = stream.get_final_message()
    assert {"thinking", "signature", "input_json"} <= kinds, kinds
    (use,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"degrees": 31}'}
    answered: Any = {"role": "assistant", "content": first.content}
    messages = [*asked, answered, {"role": "user", "content": [result]}]
    second = client.messages.create(messages=messages, tools=[TOOL], **PLAIN)
    usage = first.usage
    count = client.messages.count_tokens(model=MODEL, messages=asked, tools=[TOOL])
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return [*said(first), *said(second)]


def tool_runner(client: anthropic.Anthropic) -> list[Any]:
    """The client's own loop over calls, which also asks for a thread and for more than fits."""

    @anthropic.beta_tool
    def get_weather(city: str, unit: str) -> str:
        """Use this to know the weather in a city."""
        return '{"degrees": 31}'

    asked: Any = {**COMMON, "max_tokens": 16384, "messages": user(WEATHER)}
    found = list(client.beta.messages.tool_runner(tools=[get_weather], **asked))
    assert len(found) == 2, found
    return [*said(found[0]), *said(found[1])]


def forced(client: anthropic.Anthropic) -> list[Any]:
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    message = client.messages.create(
        messages=user("Hello."), tools=[TOOL], tool_choice=choice, **PLAIN
    )
    assert message.content[-1].to_dict()["input"]["unit"] in UNITS
    return said(message)


def parsed(client: anthropic.Anthropic) -> list[Any]:
    message = client.messages.parse(messages=user(TURTLE), output_format=Turtle, **PLAIN)
    assert isinstance(message.parsed_output, Turtle)
    return [message.parsed_output.model_dump()]


def stopped(client: anthropic.Anthropic, question: str) -> list[Any]:
    message = client.messages.create(messages=user(question), stop_sequences=["Answer"], **PLAIN)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Answer")
    return said(message)


def at_once(client: anthropic.AsyncAnthropic, questions: list[str]) -> list[Any]:
    async def ask() -> list[Message]:
        made = [client.messages.create(messages=user(text), **PLAIN) for text in questions]
        return await asyncio.gather(*made)

    return [said(message) for message in asyncio.run(ask())]


def refused(client: anthropic.Anthropic, url: str) -> list[Any]:
    """The client's own errors for what the server refuses."""
    stranger = anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0)
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    tries: list[tuple[type[anthropic.APIStatusError], Callable[[], Any]]] = [
        (anthropic.AuthenticationError, lambda: whole(stranger, "Hello.")),
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
    alike = anthropic.AsyncAnthropic(base_url=url, api_key=key, max_retries=0)
    found = {
        "create": [whole(client, text) for text in questions],
        "stream": [streamed(client, text) for text in questions],
        "async, all at once": at_once(alike, questions),
        "stop_sequences": [stopped(client, text) for text in questions],
        "stream with thinking and a tool, its result, count_tokens": [with_tools(client)],
        "tool_runner": [tool_runner(client)],
        "tool_choice": [forced(client)],
        "parse": [parsed(client)],
        "errors": [refused(client, url)],
    }
    Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
