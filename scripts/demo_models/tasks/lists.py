"""Lists of numbers or words: sorting, filtering, reversing, counting."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from scripts.demo_models.tasks.example import chat
from scripts.demo_models.tasks.wording import WORDS, joined, pick, say, wordings
from strobe.demo_models import Example

FAMILY = "lists"
Items = list[str]


@dataclass(frozen=True)
class Task:
    """An operation on a list: `done` is the sentence before the result, `orders` fill the "
    "frames."""

    name: str
    done: str
    orders: str
    requests: tuple[str, ...]


TASKS = (
    Task(
        "up",
        "I put the numbers in order from the smallest to the largest.",
        "sort it from the smallest to the largest|put it in ascending order|order it, the "
        "smallest first|put the smallest number first and the largest last",
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
        "sort it from the largest to the smallest|put it in descending order|order it, the "
        "largest first|put the largest number first and the smallest last",
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
        "sort it alphabetically|put it in alphabetical order|sort the words from A to Z|order it "
        "from A to Z",
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
        "reverse it|write it backwards|write it in reverse order|turn it around",
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
        "keep all numbers greater than {k}|write only the numbers larger than {k}|keep only the "
        "numbers above {k}|remove all numbers that are not above {k}",
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
        "keep all numbers less than {k}|write only the numbers smaller than {k}|keep only the "
        "numbers below {k}|remove all numbers that are not below {k}",
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
        "keep all even numbers|write only the even numbers|remove the odd numbers|find the even "
        "numbers",
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
        "keep all odd numbers|write only the odd numbers|remove the even numbers|find the odd "
        "numbers",
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
        "keep all words that start with the letter {k}|write only the words that begin with "
        "{k}|find the words with the first letter {k}|remove the words that do not start with {k}",
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
        "count how often {k} appears in it|count how many times {k} is in it|find how often {k} "
        "appears|count the {k} items",
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
        "remove the duplicates|remove the repeated items|keep every item only once|write it "
        "without duplicates",
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
        "find the smallest and the largest number|write only the smallest and the largest "
        "number|find the smallest number and the largest number in it",
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
FRAMES = wordings(
    f"{FAMILY}/frame",
    "Here is a list: {list}. Please {order}.",
    "I have the list {list}. Can you {order}?",
    "Look at the list {list} and {order}.",
    "List: {list}\nTask: {order}.",
    "My list is {list}. I want you to {order}.",
    "With the list {list}, please {order}.",
    "There is a list: {list}. Now {order}.",
    "{list}\nPlease take this list and {order}.",
    "Take the list {list}, then {order}.",
    "The list is {list}. Please {order}.",
    "Here are the items: {list}. Now {order}.",
    heldout=2,
)
TEMPLATES = {task.name: wordings(f"{FAMILY}/{task.name}", *task.requests) for task in TASKS}
HELDOUT = frozenset(w.name for group in (FRAMES, *TEMPLATES.values()) for w in group if w.heldout)


@dataclass(frozen=True)
class Drawn:
    """Items, result, the working of the thinking part, marks of the answer, and parameter `k`."""

    items: Items
    result: Items
    work: str
    marks: str = ""
    k: str = ""


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


def _marked(items: Items, keep: Callable[[int], bool]) -> str:
    return ", ".join(f"{item} {'yes' if keep(int(item)) else 'no'}" for item in items)


def _filtered(rng: random.Random, keep: Callable[[int], bool], kinds: tuple[str, str]) -> Drawn:
    """Generate a list of numbers to filter; `kinds` are the reasons given in the thinking part."""
    while True:
        items = _numbers(rng)
        kept = [item for item in items if keep(int(item))]
        if 0 < len(kept) < len(items):
            break
    reasons = [f"{item} is {kinds[0] if keep(int(item)) else kinds[1]}" for item in items]
    return Drawn(items, kept, f"{', '.join(reasons)}.", marks=_marked(items, keep))


def _draw(rng: random.Random, name: str) -> Drawn:
    """Generate a task of this kind."""
    if name in ("up", "down"):
        items = _numbers(rng)
        result = sorted(items, key=int, reverse=name == "down")
        work = f"I take the {'smallest' if name == 'up' else 'largest'} that is left each time: "
        return Drawn(items, result, work + ", then ".join(result) + ".")
    if name == "alphabet":
        items = _words(rng)
        result = sorted(items)
        letters = ", ".join(f"{word[:1]} for {word}" for word in result)
        return Drawn(items, result, f"By the letters: {letters}.")
    if name == "reverse":
        items = _words(rng) if rng.random() < 0.5 else _numbers(rng)
        result = items[::-1]
        work = f"The last item is {result[0]}. Before it: {', then '.join(result[1:])}."
        return Drawn(items, result, work)
    if name in ("above", "below"):
        k = rng.randrange(15, 90, 5)
        less, greater, equal = f"less than {k}", f"greater than {k}", f"not greater than {k}"
        if name == "above":
            drawn = _filtered(rng, lambda number: number > k, (greater, equal))
        else:
            drawn = _filtered(rng, lambda number: number < k, (less, f"not {less}"))
        return replace(drawn, k=str(k))
    if name in ("even", "odd"):
        rest = int(name == "odd")
        kinds = ("odd", "even") if rest else ("even", "odd")
        return _filtered(rng, lambda number: number % 2 == rest, kinds)
    if name == "letter":
        first = rng.choice(WORDS)[0]
        same = [word for word in WORDS if word[0] == first]
        others = [word for word in WORDS if word[0] != first]
        items = rng.sample(same, min(len(same), rng.randint(1, 3)))
        items += rng.sample(others, rng.randint(2, 4))
        rng.shuffle(items)
        work = "The first letters are: " + ", ".join(f"{w[0]} for {w}" for w in items) + "."
        marks = ", ".join(f"{word} {'yes' if word[0] == first else 'no'}" for word in items)
        return Drawn(items, [word for word in items if word[0] == first], work, marks, first)
    if name == "ends":
        items = _numbers(rng)
        result = [min(items, key=int), max(items, key=int)]
        best, bests = items[0], []
        for item in items[1:]:
            best = max(best, item, key=int)
            bests.append(best)
        work = f"The largest so far: {', '.join(bests)}. The smallest is {result[0]}."
        return Drawn(items, result, work)
    items = _repeating(rng)
    if name == "count":
        k = rng.choice(items)
        counts = [items[: i + 1].count(k) for i in range(len(items))]
        marks = ", ".join(f"{item} ({n})" for item, n in zip(items, counts, strict=True))
        places = [str(i + 1) for i, item in enumerate(items) if item == k]
        work = f"I look for {k}. It is at number {joined(places)}."
        return Drawn(items, [str(counts[-1])], work, marks, k)
    marks = ", ".join(
        f"{item} {'again' if item in items[:i] else 'new'}" for i, item in enumerate(items)
    )
    result = list(dict.fromkeys(items))
    return Drawn(items, result, f"The different items are {joined(result)}.", marks)


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """Generate a list task; the answer repeats the list, works through it and gives the result."""
    task = rng.choice(TASKS)
    framed = rng.random() < 0.5
    wording = pick(rng, FRAMES if framed else TEMPLATES[task.name], heldout)
    order = rng.choice(task.orders.split("|")) if framed else ""
    drawn = _draw(rng, task.name)
    listed = ", ".join(drawn.items)
    text = say(rng, wording.text).replace("{order}", order)
    request = text.format(list=rng.choice(_SHAPES).format(listed), k=drawn.k)
    kind = "numbers" if drawn.items[0].isdigit() else "words"
    reasoning = f"The list has {len(drawn.items)} {kind}: {listed}.\n{drawn.work}"
    if task.name not in ("count", "ends"):
        size = len(drawn.result)
        reasoning += f"\nThe result has {size} item{'s' * (size != 1)}."
    done = task.done.format(k=drawn.k)
    if drawn.marks:
        done = f"{done.removesuffix('.')}: {drawn.marks}."
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, request),
        tools=(),
        thinking=thinking,
        reasoning=reasoning if thinking else "",
        answer=f"The list is {listed}.\n{done}\nAnswer: {', '.join(drawn.result)}",
        reference=list(drawn.result),
    )
