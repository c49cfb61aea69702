"""Small Python functions; the checker runs them and the reference on a few inputs."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

from scripts.demo_models.tasks.example import chat
from scripts.demo_models.tasks.function_specs import INPUTS, PARAMETERS, SPECS, Spec
from scripts.demo_models.tasks.wording import invented, pick, say, wordings, words
from strobe.demo_models import Example
from strobe.tools.eval.demo_code import run_function

FAMILY = "code"


_TAKES = {
    "list": ("a list of numbers", "It takes a list."),
    "text": ("a text", "It takes a text."),
    "number": ("a whole number", "It takes a whole number."),
    "pair": ("two numbers", "It takes two numbers."),
}
TEMPLATES = wordings(
    f"{FAMILY}/ask",
    "[Write|Give me] a Python function `{f}({p})` that {d}.",
    "[Write|Define] a function called `{f}` in Python that takes {t} `{p}` and {d}.",
    "I need a Python function `{f}` with {t} as input. It {d}. The input is called `{p}`.",
    "Define `{f}({p})` in Python so that it {d}.",
    "Write Python code: `{f}({p})` {d}.",
    "How do I write a Python function `{f}({p})` that {d}?",
    "Complete this function so that it {d}:\n```python\ndef {f}({p}):\n```",
    "Create a function `{f}` in Python. {s} It {d}. Call the input `{p}`.",
    "Python: a function `{f}` takes {t} called `{p}` and {d}. [Write|Show] the code.",
    "Please [write|implement] `{f}({p})`, which {d}, in Python.",
    "Give me code for `def {f}({p})` that {d}.",
    "Implement a Python function that {d}. Its name is `{f}` and it takes {t} `{p}`.",
    "Show me a function `{f}({p})` which {d}.",
    "Write a function that takes {t} and {d}. Use the name `{f}` and the input `{p}`.",
    "In Python, [write|define] `{f}` with the input `{p}` ({t}). It {d}.",
    "What does a Python function `{f}({p})` look like that {d}?",
    "The function `{f}({p})` {d}. [Write|Implement] it in Python.",
    "Make a Python function `{f}`: the input is {t} called `{p}`, and the function {d}.",
    "Name: `{f}`\nInput: `{p}`, {t}\nTask: the function {d}.\nWrite it in Python.",
    "My function `{f}({p})` {d}. Show me the Python code.",
    "Create `{f}({p})` in Python, a function which {d}.",
    "I want to have a function in Python that {d}. The name is `{f}`, the input is `{p}`.",
    "Show me the Python code of `{f}({p})`, a function that {d}.",
    "Please define a Python function called `{f}`. The input is {t} called `{p}`. The function "
    "{d}.",
    "Make a function `{f}({p})` in Python which {d}.",
    heldout=3,
)
HELDOUT = frozenset(w.name for w in TEMPLATES if w.heldout)
_GENERIC = words(
    "solve compute process run_task my_function helper calculate work_out convert do_it"
)


@lru_cache(maxsize=4096)
def _traced(solution: str, takes: str, index: int) -> str:
    """`input gives result` for one input of the reference solution."""
    arguments = INPUTS[takes][index]
    result = run_function("solution", solution, [arguments])[0]
    return f"{', '.join(map(repr, arguments))} gives {result!r}"


def _function_name(rng: random.Random, spec: Spec) -> str:
    draw = rng.random()
    if draw < 0.4:
        return spec.name
    if draw < 0.7:
        return rng.choice(_GENERIC)
    return f"{rng.choice(('get', 'make', 'find', 'do', 'the'))}_{invented(rng).lower()}"


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """A request for one function; the answer is a code block and a sentence."""
    spec = rng.choice(SPECS)
    wording = pick(rng, TEMPLATES, heldout)
    name, parameters = _function_name(rng, spec), rng.choice(PARAMETERS[spec.takes])
    first, _, second = parameters.partition(", ")
    slots: dict[str, Any] = {"a": first, "b": second, "k": rng.randint(2, 9)}
    every_way = spec.does.split("|")
    ways = every_way if heldout else every_way[:-1]
    takes, sentence = _TAKES[spec.takes]
    request = say(
        rng,
        wording.text,
        f=name,
        p=parameters,
        t=takes,
        s=sentence,
        d=rng.choice(ways).format(**slots),
    )
    body = spec.body.format(**slots)
    solution = f"def solution({parameters}):\n{body}"
    inputs = INPUTS[spec.takes]
    canonical = every_way[0].format(**slots)
    reasoning = (
        f"The function is called {name} and takes {takes}: {parameters}.\n"
        f"It {canonical}.\nPlan: {spec.plan.format(**slots)}.\n"
        f"Example: {_traced(solution, spec.takes, rng.randrange(len(inputs)))}."
    )
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, request),
        tools=(),
        thinking=thinking,
        reasoning=reasoning if thinking else "",
        answer=f"```python\ndef {name}({parameters}):\n{body}\n```\nThe function {canonical}.",
        reference={"name": name, "solution": solution, "inputs": [list(one) for one in inputs]},
    )
