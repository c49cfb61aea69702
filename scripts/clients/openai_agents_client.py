"""OpenAI's Agents SDK, over chats and over the Responses API."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from shared import DEGREES, MAX_TOKENS, MODEL, WEATHER, run


@function_tool
def get_weather(city: str, unit: str) -> str:
    """Use this to know the weather in a city."""
    return DEGREES


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)

    async def ask() -> dict[str, Any]:
        results: dict[str, Any] = {}
        for name, model in (
            ("chat", OpenAIChatCompletionsModel(MODEL, client)),
            ("responses", OpenAIResponsesModel(MODEL, client)),
        ):
            agent = Agent("a", model=model, model_settings=settings)
            results[name] = [(await Runner.run(agent, text)).final_output for text in questions]
            agent = Agent("b", model=model, model_settings=settings, tools=[get_weather])
            run_with_tool = await Runner.run(agent, WEATHER)
            kinds = [item.type for item in run_with_tool.new_items]
            assert "tool_call_output_item" in kinds, kinds
            results[f"{name}, a tool and its result"] = [run_with_tool.final_output]
        return results

    return asyncio.run(ask())


if __name__ == "__main__":
    run(answers)
