"""LiteLLM, with its provider for OpenAI's API and the one for Anthropic's."""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from shared import FUNCTION, MAX_TOKENS, MODEL, WEATHER, run, user


def answers(url: str, key: str, questions: list[str]) -> dict[str, Any]:
    common: Any = {"api_key": key, "temperature": 0, "max_tokens": MAX_TOKENS, "num_retries": 0}
    openai: Any = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", **common}
    anthropic: Any = {"model": f"anthropic/{MODEL}", "api_base": url, **common}

    def content(completion: Any) -> str:
        return completion.choices[0].message.content

    def streamed(question: str) -> str:
        chunks = litellm.completion(messages=user(question), stream=True, **openai)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    def called() -> str:
        completion = litellm.completion(messages=user(WEATHER), tools=[FUNCTION], **openai)
        (call,) = completion.choices[0].message.tool_calls
        return call.function.arguments

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(litellm.acompletion(messages=user(q), **openai) for q in questions)
        )

    return {
        "chat": [content(litellm.completion(messages=user(q), **openai)) for q in questions],
        "chat, streamed": [streamed(q) for q in questions],
        "chat, all at once": [content(c) for c in asyncio.run(ask())],
        "messages": [content(litellm.completion(messages=user(q), **anthropic)) for q in questions],
        "a tool": [called()],
    }


if __name__ == "__main__":
    run(answers)
