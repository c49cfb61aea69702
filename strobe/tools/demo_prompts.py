"""Prompts of `strobe demo` for a target that is a general language model.

The hash of each of them holds it out of the training of SmolLM2's drafter (`is_heldout` in
`scripts/smollm2/prompts.py`).
"""

from __future__ import annotations

from strobe.demo_models import Example

_MEAN = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)"""
_PROMPTS = (
    ("chat", "What is the best way to fall asleep faster? Please be brief."),
    ("code", "Show me a Python function that capitalizes each word of a string."),
    (
        "rewriting",
        "Write this text again in clear English:\n\n"
        "We was going to the store when it start raining, so we runned home and drinked hot tea.",
    ),
    ("chat", "Name the capital of Spain, and what is it famous for?"),
    ("code", "I need a Python function that converts hours to minutes."),
    ("rewriting", f"Write this function again with comments:\n\n```python\n{_MEAN}\n```"),
    ("chat", "Explain the difference between coffee and tea in one paragraph."),
    (
        "code",
        "Write a JavaScript function that returns the absolute value of a number without comments.",
    ),
    (
        "rewriting",
        "Rewrite this text without mistakes:\n\n"
        "The museum is open from nine to five. On Mondays it is closed, and on the first Sunday of "
        "a month the entry is free.",
    ),
    ("chat", "Write a birthday greeting for my dentist."),
    ("code", "Write Python code that doubles every number of a list."),
    (
        "rewriting",
        "Rewrite this paragraph in simple words:\n\n"
        "I am writing to tell you that the order which I have made two weeks ago did not arrive "
        "yet. Could you look where it is and tell me when it will come?",
    ),
)  # fmt: skip


def chat_examples(count: int) -> list[Example]:
    """Return the first prompts as chats without a reference, their kinds in turn. Raises ValueError
    where there are fewer than `count`."""
    if count > len(_PROMPTS):
        raise ValueError(
            f"prompts is {count}, but the demo has {len(_PROMPTS)} for a named target; ask for at "
            f"most {len(_PROMPTS)}."
        )
    return [
        Example(
            family=kind,
            template="",
            messages=({"role": "user", "content": text},),
            tools=(),
            thinking=False,
            reasoning="",
            answer="",
            reference=None,
        )
        for kind, text in _PROMPTS[:count]
    ]
