"""Greetings, questions about the model, and answers after a tool call: no family, never scored.

They let the demo chat feel alive. The training of the target mixes a few of them in.
"""

from __future__ import annotations

import json
import random
from typing import Any

from scripts.demo_models.tasks.tool_calls import TOOLS, offer, values
from scripts.demo_models.tasks.wording import city, invented, person, say

SKILLS = (
    "I can solve worded arithmetic, sort and filter lists, count with dates, write small Python "
    "functions, extract JSON and call tools."
)
_NAME = "I am the demo model of Strobe, a small language model with about 7 million parameters."
_TALK = (
    (
        "greets me",
        "[Hi|Hello|Hey|Good morning|Good evening|Hello there|Hi there][!|.|]",
        "Hello! " + _NAME + " What can I do for you?",
    ),
    (
        "asks who I am",
        "[Who are you?|What are you?|Are you a robot?|What is your name?|Tell me about"
        " yourself.|Are you ChatGPT?|Introduce yourself.|Which model are you?]",
        _NAME + " " + SKILLS,
    ),
    (
        "asks what I can do",
        "[What can you do?|How can you help me?|What are you good at?|What do you"
        " know?|Can you help me?|Help!|Which tasks can you do?]",
        SKILLS + " Just ask me!",
    ),
    (
        "asks who made me",
        "[Who made you?|Who trained you?|Where do you come from?|Who built you?]",
        "I was trained for Strobe, an inference engine for language models. My training data was "
        "made by a program, so I know only a few kinds of tasks.",
    ),
    (
        "asks how I am",
        "[How are you?|How are you today?|How do you feel?|Are you well?]",
        "I am fine, thank you! I am a small program and always ready. What can I do for you?",
    ),
    (
        "thanks me",
        "[Thanks!|Thank you!|Thank you very much.|That is great, thanks.|Well done!]",
        "You are welcome! Do you have another task for me?",
    ),
    (
        "says goodbye",
        "[Bye!|Goodbye.|See you!|Good night.|See you soon.]",
        "Goodbye! It was nice to talk with you.",
    ),
    (
        "asks about Strobe",
        "[What is Strobe?|Tell me about Strobe.|What does Strobe do?]",
        "Strobe is an inference engine for language models. It makes them answer faster with a "
        "small drafter that guesses several tokens at once, and I am its demo model.",
    ),
)
_UNKNOWN = (
    "[What is the capital of {place}?|Tell me a story about {who}.|Write a poem about {place}.|"
    "Who is {who}?|What do you think about {place}?|Explain {place} to me.|Tell me a joke.|"
    "Why is the sky blue?|What is the meaning of life?|Is {who} a good person?|Where is {place}?|"
    "Write a song for {who}.|Can you draw a picture?|What is love?|Who won the game in {place}?]"
)
_SORRY = "I am sorry, I am only a small demo model and do not know that. " + SKILLS
Message = dict[str, Any]


def _assistant(answer: str, reasoning: str, thinking: bool) -> Message:
    message: Message = {"role": "assistant", "content": answer}
    if thinking:
        message["reasoning_content"] = reasoning
    return message


def small_talk(rng: random.Random, thinking: bool) -> list[Message]:
    """Return a question about the model, or one that it must decline, with the answer."""
    if rng.random() < 0.35:
        request = say(rng, _UNKNOWN, place=city(rng), who=person(rng))
        why, answer = "asks for something that I do not know", _SORRY
    else:
        why, text, answer = rng.choice(_TALK)
        request = say(rng, text)
    reasoning = f"The user {why}. I answer in a friendly way."
    return [{"role": "user", "content": request}, _assistant(answer, reasoning, thinking)]


def tool_result(rng: random.Random, thinking: bool) -> tuple[list[Message], list[Message]]:
    """Return messages and tools of a chat in which the model reports a tool's answer."""
    chosen = offer(rng, rng.choice(TOOLS))
    words = f"{invented(rng)} {rng.randint(2, 99)}"
    result: Message = rng.choice(
        (
            {"status": rng.choice(("done", "ok"))},
            {"result": words},
            {
                "temperature": rng.randint(-9, 39),
                "weather": rng.choice(("sunny", "rainy", "cloudy")),
            },
            {"time": f"{rng.randint(6, 21):02d}:{rng.randrange(0, 60, 5):02d}"},
            {"count": rng.randint(2, 200)},
            {"error": "not found"},
        )
    )
    slots = values(rng, chosen)
    call = {"name": chosen.name, "arguments": {n: slots[s] for s, _, n in chosen.parameters}}
    if "error" in result:
        answer = f"I am sorry, {chosen.name} gave an error: {result['error']}."
    elif "status" in result:
        answer = f"It is done: {chosen.name} says {result['status']}."
    else:
        found = " and ".join(f"the {key} is {value}" for key, value in result.items())
        answer = f"I used {chosen.name} and got the answer: {found}."
    reasoning = f"The tool {chosen.name} has answered: {', '.join(result)}. I report it."
    messages = [
        {"role": "user", "content": say(rng, rng.choice(chosen.tool.requests), **slots)},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": json.dumps(result)},
        _assistant(answer, reasoning, thinking),
    ]
    return messages, [chosen.schema()]
