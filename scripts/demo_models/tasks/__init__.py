"""Generated chat tasks with checkable answers: the training and test data of the demo models.

Six families, each with many wordings, of which some never occur in the training data. Everything
is deterministic in the seed, on every machine and Python version.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from scripts.demo_models.tasks import arithmetic, dates, functions, json_fields, lists, tool_calls
from scripts.demo_models.tasks.example import prompt_key
from strobe.demo_models import FAMILIES, Example
from strobe.tools.eval.demo_tasks import check

__all__ = [
    "FAMILIES",
    "HELDOUT_TEMPLATES",
    "Example",
    "check",
    "generate",
    "heldout",
    "split",
    "training",
]

_MODULES = {
    module.FAMILY: module
    for module in (arithmetic, lists, dates, functions, json_fields, tool_calls)
}
assert tuple(_MODULES) == FAMILIES
HELDOUT_TEMPLATES = frozenset[str]().union(*(module.HELDOUT for module in _MODULES.values()))
_HELDOUT_SHARE = 20  # one prompt in this many


def generate(
    rng: random.Random,
    *,
    family: str | None = None,
    thinking: bool | None = None,
    heldout_template: bool = False,
) -> Example:
    """Generate a random task; an argument that is None is drawn uniformly."""
    if family is None:
        family = rng.choice(FAMILIES)
    if thinking is None:
        thinking = rng.random() < 0.5
    if family not in _MODULES:
        raise ValueError(f"There is no family {family!r}; choose one of {', '.join(FAMILIES)}.")
    return _MODULES[family].make(rng, thinking, heldout_template)


def split(example: Example) -> str:
    """`train` or `heldout`: one prompt in twenty by its hash, and every held-out template."""
    if example.template in HELDOUT_TEMPLATES:
        return "heldout"
    return "heldout" if int(prompt_key(example)[:8], 16) % _HELDOUT_SHARE == 0 else "train"


def heldout(count_per_family: int, *, seed: int = 0, thinking: bool | None = None) -> list[Example]:
    """Return test tasks without duplicates: per family, half from held-out templates, half by hash.

    With `thinking` None, both modes take turns.
    """
    examples: list[Example] = []
    for family in FAMILIES:
        rng = random.Random(f"heldout {seed} {family}")
        seen: set[str] = set()
        for i in range(count_per_family):
            mode = (i // 2) % 2 == 0 if thinking is None else thinking
            while True:
                example = generate(rng, family=family, thinking=mode, heldout_template=i % 2 == 0)
                key = prompt_key(example)
                if split(example) == "heldout" and key not in seen:
                    break
            seen.add(key)
            examples.append(example)
    return examples


def training(count: int, *, seed: int) -> Iterator[Example]:
    """Yield `count` training tasks, with all families and both thinking modes mixed."""
    rng = random.Random(f"training {seed}")
    made = 0
    while made < count:
        example = generate(rng)
        if split(example) == "train":
            made += 1
            yield example
