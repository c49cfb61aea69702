"""Lists of numbers or words: sorting, filtering, reversing, counting."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from strobe.demo_pair.tasks.example import Example, chat, last_answer
from strobe.demo_pair.tasks.wording import WORDS, pick, say, wordings

FAMILY = "lists"
Items = list[str]


@dataclass(frozen=True)
class Task:
    """An operation on a list: `done` is the sentence before the result."""

    name: str
    done: str
    requests: tuple[str, ...]


TASKS = (
    Task(
        "up",
        "I put the numbers in order from the smallest to the largest.",
        (
            "[Sort|Order|Arrange] [these|the following] numbers from [smallest to largest|the "
            "smallest to the largest]: {list}",
            "[Sort|Order] the list {list} in ascending order.",
            "Put the numbers {list} in order, [starting with the smallest|the smallest first].",
            "Here is a list: {list}. [Sort|Arrange] it so that the smallest number comes first.",
            "What does the list {list} look like when it is sorted in ascending order?",
            "Take the numbers {list} and [sort|order] them, the smallest first.",
        ),
    ),
    Task(
        "down",
        "I put the numbers in order from the largest to the smallest.",
        (
            "[Sort|Order|Arrange] [these|the following] numbers from [largest to smallest|the "
            "largest to the smallest]: {list}",
            "[Sort|Order] the list {list} in descending order.",
            "Put the numbers {list} in order, [starting with the largest|the largest first].",
            "Here is a list: {list}. [Sort|Arrange] it so that the largest number comes first.",
            "What does the list {list} look like when it is sorted in descending order?",
            "Take the numbers {list} and [sort|order] them, the largest first.",
        ),
    ),
    Task(
        "alphabet",
        "I put the words in alphabetical order.",
        (
            "[Sort|Order|Arrange] [these|the following] words alphabetically: {list}",
            "Put the words {list} in alphabetical order.",
            "[Sort|Order] the list {list} from A to Z.",
            "Here is a list: {list}. [Sort|Arrange] it in alphabetical order.",
            "What does the list {list} look like when it is sorted alphabetically?",
            "Take the words {list} and [sort|order] them from A to Z.",
        ),
    ),
    Task(
        "reverse",
        "I write the items in reverse order, the last one first.",
        (
            "[Reverse|Turn around] [this|the following] list: {list}",
            "Write the list {list} in reverse order.",
            "Here is a list: {list}. Write it backwards.",
            "What does the list {list} look like when it is reversed?",
            "Write the items {list} again, [starting with the last|the last one first].",
            "Take the list {list} and write it in reverse order.",
        ),
    ),
    Task(
        "above",
        "I keep the numbers greater than {k}.",
        (
            "Which of [these|the following] numbers are [greater|larger] than {k}? {list}",
            "Keep only the numbers [greater|larger] than {k}: {list}",
            "From the list {list}, [list|write|keep] all numbers above {k}.",
            "Here is a list: {list}. Write only the numbers above {k}.",
            "Remove every number that is not [greater|larger] than {k} from the list {list}.",
            "Take the list {list} and keep all numbers [greater|larger] than {k}.",
        ),
    ),
    Task(
        "below",
        "I keep the numbers less than {k}.",
        (
            "Which of [these|the following] numbers are [less|smaller] than {k}? {list}",
            "Keep only the numbers [less|smaller] than {k}: {list}",
            "From the list {list}, [list|write|keep] all numbers below {k}.",
            "Here is a list: {list}. Write only the numbers below {k}.",
            "Remove every number that is not [less|smaller] than {k} from the list {list}.",
            "Take the list {list} and keep all numbers [less|smaller] than {k}.",
        ),
    ),
    Task(
        "even",
        "I keep the even numbers.",
        (
            "Which of [these|the following] numbers are even? {list}",
            "Keep only the even numbers: {list}",
            "From the list {list}, [list|write|keep] all even numbers.",
            "Here is a list: {list}. Write only the even numbers.",
            "Remove the odd numbers from the list {list}.",
            "Take the list {list} and keep all even numbers.",
        ),
    ),
    Task(
        "odd",
        "I keep the odd numbers.",
        (
            "Which of [these|the following] numbers are odd? {list}",
            "Keep only the odd numbers: {list}",
            "From the list {list}, [list|write|keep] all odd numbers.",
            "Here is a list: {list}. Write only the odd numbers.",
            "Remove the even numbers from the list {list}.",
            "Take the list {list} and keep all odd numbers.",
        ),
    ),
    Task(
        "letter",
        "I keep the words that start with the letter {k}.",
        (
            "Which of [these|the following] words [start|begin] with the letter {k}? {list}",
            "Keep only the words that [start|begin] with {k}: {list}",
            "From the list {list}, [list|write|keep] all words with the first letter {k}.",
            "Here is a list: {list}. Write only the words that [start|begin] with {k}.",
            "Remove the words that do not [start|begin] with the letter {k} from the list {list}.",
            "Take the list {list} and keep all words that [start|begin] with the letter {k}.",
        ),
    ),
    Task(
        "count",
        "I count how often {k} is in the list.",
        (
            "How [often|many times] [does {k} appear|is {k}] in the list {list}?",
            "Count how [often|many times] {k} appears in [this|the following] list: {list}",
            "Here is a list: {list}. How [often|many times] is {k} in it?",
            "How [often|many times] do you see {k} here? {list}",
            "Count the {k} items in the list {list}.",
            "Take the list {list} and count how [often|many times] {k} appears in it.",
        ),
    ),
    Task(
        "unique",
        "I keep the first one of every item and remove the repeated ones.",
        (
            "Remove the [repeated items|duplicates] from [this|the following] list: {list}",
            "Keep every item only once: {list}",
            "From the list {list}, [list|write|keep] every item once.",
            "Here is a list: {list}. Write it without [repeated items|duplicates].",
            "What does the list {list} look like without [repeated items|duplicates]?",
            "Take the list {list} and remove the [repeated items|duplicates].",
        ),
    ),
    Task(
        "ends",
        "I look for the smallest and the largest number.",
        (
            "What are the smallest and the largest number in the list {list}?",
            "Find the smallest and the largest of [these|the following] numbers: {list}",
            "From the list {list}, write the smallest and the largest number.",
            "Here is a list: {list}. Find the smallest and the largest number in it.",
            "Which number is the smallest and which is the largest? {list}",
            "Take the numbers {list} and find the smallest and the largest.",
        ),
    ),
)
TEMPLATES = {task.name: wordings(f"{FAMILY}/{task.name}", *task.requests) for task in TASKS}
HELDOUT = frozenset(w.name for group in TEMPLATES.values() for w in group if w.heldout)

_SHAPES = ("{}", "{}", "[{}]", "({})")


def _numbers(rng: random.Random) -> Items:
    return [str(n) for n in rng.sample(range(1, 100), rng.randint(4, 7))]


def _words(rng: random.Random) -> Items:
    return rng.sample(WORDS, rng.randint(4, 6))


def _repeating(rng: random.Random) -> Items:
    pool = _words(rng)[:3] if rng.random() < 0.5 else _numbers(rng)[:3]
    items = pool + [rng.choice(pool) for _ in range(rng.randint(2, 4))]
    rng.shuffle(items)
    return items


def _filtered(
    rng: random.Random, keep: Callable[[int], bool], question: str
) -> tuple[Items, Items, str]:
    """A list of numbers of which some stay and some go, and the working of that choice."""
    while True:
        items = _numbers(rng)
        kept = [item for item in items if keep(int(item))]
        if 0 < len(kept) < len(items):
            break
    marks = [f"{item} {'yes' if keep(int(item)) else 'no'}" for item in items]
    return items, kept, f"For each number, {question}: {', '.join(marks)}."


def _draw(rng: random.Random, name: str) -> tuple[Items, Items, str, str]:
    """Items, result, the parameter `k`, and the working of one task."""
    k = ""
    if name in ("up", "down"):
        items = _numbers(rng)
        result = sorted(items, key=int, reverse=name == "down")
        work = f"I take the {'smallest' if name == 'up' else 'largest'} that is left each time: "
        work += ", then ".join(result) + "."
    elif name == "alphabet":
        items = _words(rng)
        result = sorted(items)
        work = "By the letters: " + ", ".join(f"{word[:1]} for {word}" for word in result) + "."
    elif name == "reverse":
        items = _words(rng) if rng.random() < 0.5 else _numbers(rng)
        result = items[::-1]
        work = f"The last item is {result[0]}. Before it: {', then '.join(result[1:])}."
    elif name in ("above", "below"):
        k = str(rng.randrange(15, 90, 5))
        above, bound = name == "above", int(k)
        items, result, work = _filtered(
            rng,
            lambda number: number > bound if above else number < bound,
            f"is it {'greater' if above else 'less'} than {k}",
        )
    elif name in ("even", "odd"):
        rest = int(name == "odd")
        items, result, work = _filtered(rng, lambda number: number % 2 == rest, f"is it {name}")
    elif name == "letter":
        first = rng.choice(WORDS)[0]
        same = [word for word in WORDS if word[0] == first]
        others = [word for word in WORDS if word[0] != first]
        items = rng.sample(same, min(len(same), rng.randint(1, 3)))
        items += rng.sample(others, rng.randint(2, 4))
        rng.shuffle(items)
        k, result = first, [word for word in items if word[0] == first]
        work = "The first letters are: " + ", ".join(f"{w[0]} for {w}" for w in items) + "."
    elif name == "count":
        items = _repeating(rng)
        k = rng.choice(items)
        result = [str(items.count(k))]
        seen, marks = 0, []
        for item in items:
            seen += item == k
            marks.append(f"{item} ({seen})")
        work = f"I go through the list and count {k}: {', '.join(marks)}."
    elif name == "unique":
        items = _repeating(rng)
        result = list(dict.fromkeys(items))
        marks = [
            f"{item} {'again' if item in items[:i] else 'new'}" for i, item in enumerate(items)
        ]
        work = f"I mark what is new: {', '.join(marks)}."
    else:
        items = _numbers(rng)
        result = [min(items, key=int), max(items, key=int)]
        best, marks = items[0], []
        for item in items[1:]:
            best = max(best, item, key=int)
            marks.append(best)
        work = f"The largest so far: {', '.join(marks)}. The smallest is {result[0]}."
    return items, result, k, work


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """A list task whose answer repeats the list, says what is done, and gives the result."""
    task = rng.choice(TASKS)
    wording = pick(rng, TEMPLATES[task.name], heldout)
    items, result, k, work = _draw(rng, task.name)
    listed = ", ".join(items)
    request = say(rng, wording.text).format(list=rng.choice(_SHAPES).format(listed), k=k)
    kind = "numbers" if items[0].isdigit() else "words"
    reasoning = f"The list has {len(items)} {kind}: {listed}.\n{work}"
    if task.name not in ("count", "ends"):
        size = f"{len(result)} item" + "s" * (len(result) != 1)
        reasoning += f"\nThe result has {size}."
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, request),
        tools=(),
        thinking=thinking,
        reasoning=reasoning if thinking else "",
        answer=f"The list is {listed}.\n{task.done.format(k=k)}\nAnswer: {', '.join(result)}",
        reference=tuple(result),
    )


def check(example: Example, text: str) -> bool:
    """Whether the last line has the right items in the right order."""
    answer = last_answer(text)
    if answer is None:
        return False
    return tuple(item.strip() for item in answer.strip("[]()").split(",")) == example.reference
