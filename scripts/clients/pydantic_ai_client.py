"""Pydantic AI's agents: text, structured output, a tool."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from shared import DEGREES, MAX_TOKENS, MODEL, TURTLE, WEATHER, run


class Turtle(BaseModel):
    animal: str
    name: str
    age: int


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key=key))
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)
    agent = Agent(model, model_settings=settings)

    async def streamed(question: str) -> str:
        async with agent.run_stream(question) as stream:
            return await stream.get_output()

    async def ask() -> dict[str, Any]:
        structured = Agent(model, output_type=NativeOutput(Turtle), model_settings=settings)
        tools = Agent(model, model_settings=settings)
        calls: list[str] = []

        @tools.tool_plain
        def get_weather(city: str, unit: str) -> str:
            """Use this to know the weather in a city."""
            calls.append(city)
            return DEGREES

        with_tool = await tools.run(WEATHER)
        assert calls, with_tool
        return {
            "chat": [(await agent.run(text)).output for text in questions],
            "chat, streamed": [await streamed(text) for text in questions],
            "a tool and its result": [with_tool.output],
            "structured output": [(await structured.run(TURTLE)).output.model_dump()],
        }

    return asyncio.run(ask())


if __name__ == "__main__":
    run(answers)
