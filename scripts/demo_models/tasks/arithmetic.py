"""Worded arithmetic: two or three steps with small numbers, the last line `Answer: 42`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from scripts.demo_models.tasks.example import chat
from scripts.demo_models.tasks.wording import THINGS, person, pick, say, wordings
from strobe.demo_models import Example

FAMILY = "arithmetic"
Numbers = dict[str, int]


@dataclass(frozen=True)
class Scenario:
    """A kind of story: how its numbers are drawn, its steps, and the ways to tell it.

    A step is `words|left op right = result|unit`, its letters being numbers of the story.
    """

    name: str
    draw: Callable[[random.Random], Numbers]
    facts: str
    steps: tuple[str, ...]
    stories: tuple[str, ...]


def _shop(rng: random.Random) -> Numbers:
    n, p = rng.randint(2, 9), rng.randint(2, 12)
    return {"n": n, "p": p, "m": n * p + rng.randint(1, 30)}


def _gather(rng: random.Random) -> Numbers:
    a, b = rng.randint(5, 60), rng.randint(3, 40)
    return {"a": a, "b": b, "c": rng.randint(2, min(40, a + b - 1))}


def _boxes(rng: random.Random) -> Numbers:
    return {"k": rng.randint(2, 9), "m": rng.randint(3, 12), "r": rng.randint(2, 30)}


def _share(rng: random.Random) -> Numbers:
    k, each = rng.randint(2, 9), rng.randint(3, 12)
    a = rng.randint(1, k * each - 1)
    return {"a": a, "b": k * each - a, "k": k}


def _basket(rng: random.Random) -> Numbers:
    return {name: rng.randint(2, 9) for name in ("n", "p", "q", "s")}


def _less(rng: random.Random) -> Numbers:
    k, m = rng.randint(3, 9), rng.randint(3, 12)
    return {"k": k, "m": m, "r": rng.randint(1, min(30, k * m - 1))}


def _pages(rng: random.Random) -> Numbers:
    d, r = rng.randint(2, 9), rng.randint(4, 12)
    return {"d": d, "r": r, "t": d * r + rng.randint(3, 40)}


def _times(rng: random.Random) -> Numbers:
    return {"a": rng.randint(3, 12), "k": rng.randint(2, 6)}


def _bus(rng: random.Random) -> Numbers:
    a = rng.randint(12, 60)
    return {"a": a, "b": rng.randint(2, a - 3), "c": rng.randint(2, 30)}


SCENARIOS = (
    Scenario(
        "shop",
        _shop,
        "{n} {things}, {p} coins for each, {m} coins to pay with",
        ("The {things} cost|n * p = t|coins", "The coins left are|m - t = r|coins"),
        (
            "{who} buys {n} {things} for {p} coins each and pays with {m} coins. [How much change "
            "does {who} get|How many coins does {who} get back]?",
            "A {thing} costs {p} coins. {who} [buys|takes|orders] {n} of them and [hands "
            "over|gives] {m} coins. How many coins [come back|are left]?",
            "One {thing} is sold for {p} coins. {who} wants {n} {things} and has {m} coins. How "
            "many coins are left [at the end|after that]?",
            "{who} has {m} coins and spends some of them on {n} {things} at {p} coins each. How "
            "many coins [remain|are left]?",
            "Each {thing} costs {p} coins. [Find|Work out] the change from {m} coins when {who} "
            "[buys|takes] {n} {things}.",
            "With {m} coins to spend, {who} takes {n} {things} for {p} coins each. How many coins "
            "[remain|are left] after that?",
            "With {m} coins {who} buys {n} {things}. Each {thing} costs {p} coins. How many coins "
            "[remain|are left] at the end?",
        ),
    ),
    Scenario(
        "gather",
        _gather,
        "{a} {things} at first, {b} more, then {c} given away",
        (
            "After getting more there are|a + b = t|{things}",
            "After giving some away there are|t - c = r|{things}",
        ),
        (
            "{who} has {a} {things}, [gets|finds|buys] {b} more and then gives {c} of them to "
            "{other}. How many {things} does {who} have now?",
            "{other} gives {b} {things} to {who}, who already had {a}. Later {who} loses {c} "
            "{things}. How many are left?",
            "There are {a} {things} [on the table|in the bag|in a box]. {who} adds {b} {things} "
            "and {other} takes {c} away. How many {things} are there [now|at the end]?",
            "{who} starts with {a} {things}. First {who} [collects|finds] {b} more, then {c} are "
            "[lost|sold|given away]. How many {things} remain?",
            "{who} collects {things}. Yesterday there were {a}, today {b} new ones came, and {c} "
            "were given away. [Work out|Find] how many {things} {who} has.",
            "{who} had {a} {things} and [found|bought] {b} more. Then {c} of them were [sold|given "
            "away]. How many {things} are left?",
            "{who} had {a} {things} and {other} brought {b} more. Now {c} are lost. How many "
            "{things} does {who} have?",
            "{who} had {a} {things} and got {b} more from {other}. Then {c} were lost. How many "
            "{things} does {who} have at the end?",
        ),
    ),
    Scenario(
        "boxes",
        _boxes,
        "{k} boxes with {m} {things} each, and {r} more",
        (
            "The boxes hold|k * m = t|{things}",
            "Together with the others there are|t + r = s|{things}",
        ),
        (
            "{who} has {k} boxes with {m} {things} in each and {r} more {things} on the table. How "
            "many {things} does {who} have [in total|altogether]?",
            "There are {m} {things} in every box. {who} [packs|fills] {k} boxes and has {r} "
            "{things} left over. How many {things} are there [in total|altogether]?",
            "{k} bags hold {m} {things} each, and {who} brings {r} extra {things}. What is the "
            "total number of {things}?",
            "In a shop {who} counts {k} full boxes of {m} {things} and {r} single {things}. How "
            "many {things} is that [in total|altogether]?",
            "{who} packs {m} {things} into each of {k} bags. {other} adds {r} {things}. [Work out|"
            "Find] the total number of {things}.",
            "Each of {k} boxes holds {m} {things}. Besides, {who} has {r} single {things}. What is "
            "the total number of {things}?",
        ),
    ),
    Scenario(
        "share",
        _share,
        "{a} {things} and {b} {things}, shared by {k} people",
        ("Together there are|a + b = t|{things}", "Each person gets|t / k = r|{things}"),
        (
            "{who} has {a} {things} and {other} has {b}. They [put them together and share|share] "
            "all of them equally among {k} children. How many {things} does each child get?",
            "{a} {things} and {b} {things} are put together and shared equally by {k} friends. How "
            "many {things} does each friend get?",
            "{who} [bakes|brings|collects] {a} {things} in the morning and {b} in the evening, "
            "then divides them equally among {k} people. How many does each person get?",
            "{k} friends share {things} equally. {who} brings {a} and {other} brings {b}. How many "
            "{things} does each of them get?",
            "[Work out|Find] how many {things} each of {k} children gets when {who} gives {a} and "
            "{other} gives {b} {things} and all get the same.",
            "{who} brings {a} {things} and {other} brings {b} {things}. All of them are shared "
            "equally among {k} children. How many does each child get?",
        ),
    ),
    Scenario(
        "basket",
        _basket,
        "{n} {things} for {p} coins each and {q} {extras} for {s} coins each",
        (
            "The {things} cost|n * p = t|coins",
            "The {extras} cost|q * s = u|coins",
            "Together that is|t + u = v|coins",
        ),
        (
            "{who} buys {n} {things} for {p} coins each and {q} {extras} for {s} coins each. How "
            "much does {who} pay [in total|altogether]?",
            "A {thing} costs {p} coins and a {extra} costs {s} coins. What is the [total "
            "price|price] of {n} {things} and {q} {extras}?",
            "{who} orders {n} {things} and {q} {extras}. Each {thing} costs {p} coins, each "
            "{extra} costs {s} coins. How many coins does {who} need?",
            "In a shop one {thing} is sold for {p} coins and one {extra} for {s} coins. {who} "
            "takes {n} {things} and {q} {extras}. How many coins is that [in total|altogether]?",
            "[Work out|Find] what {who} pays for {n} {things} at {p} coins each and {q} {extras} "
            "at {s} coins each.",
            "{who} wants {n} {things} at {p} coins each and also {q} {extras} at {s} coins each. "
            "How many coins does {who} pay altogether?",
        ),
    ),
    Scenario(
        "saving",
        _less,
        "{m} coins a week for {k} weeks, then {r} coins spent",
        ("The savings are|k * m = t|coins", "After the purchase there are|t - r = s|coins"),
        (
            "{who} saves {m} coins every week for {k} weeks and then spends {r} coins. How many "
            "coins are left?",
            "For {k} weeks {who} puts {m} coins a week into a box. Then {who} [takes out|spends] "
            "{r} coins. How many coins [remain|are left]?",
            "{who} earns {m} coins a week. After {k} weeks {who} buys a {thing} for {r} coins. How "
            "many coins does {who} have left?",
            "Every week {who} gets {m} coins. How many coins does {who} have after {k} weeks if "
            "{r} coins were spent on a {thing}?",
            "[Work out|Find] the coins that remain when {who} earns {m} coins a week for {k} weeks "
            "and gives {r} coins to {other}.",
            "{who} gets {m} coins every week for {k} weeks and buys a {thing} for {r} coins. How "
            "many coins remain?",
        ),
    ),
    Scenario(
        "pages",
        _pages,
        "{t} pages in total, {r} pages a day for {d} days",
        ("The pages read so far are|d * r = u|pages", "The pages left are|t - u = v|pages"),
        (
            "{who} reads a book of {t} pages. {who} reads {r} pages a day for {d} days. How many "
            "pages are left?",
            "A book has {t} pages. For {d} days {who} reads {r} pages every day. How many pages "
            "[remain|are left]?",
            "{who} reads {r} pages every day. How many pages of a book with {t} pages are left "
            "after {d} days?",
            "After {d} days with {r} pages a day, how many of the {t} pages of the book does {who} "
            "still have to read?",
            "[Work out|Find] how many pages {who} still has to read: the book has {t} pages and "
            "{who} read {r} pages on each of {d} days.",
            "{who} has a book with {t} pages and reads {r} pages a day. How many pages remain "
            "after {d} days?",
        ),
    ),
    Scenario(
        "garden",
        _less,
        "{k} rows of {m} {things}, and {r} taken away",
        ("The rows hold|k * m = t|{things}", "After taking some away there are|t - r = s|{things}"),
        (
            "{who} puts {k} rows of {m} {things} on a table. Then {r} {things} are taken away. How "
            "many {things} are left?",
            "There are {k} rows with {m} {things} in each row. {other} takes {r} of them. How many "
            "{things} [remain|are left]?",
            "In every one of {k} rows there are {m} {things}. {who} [sells|removes] {r} {things}. "
            "How many {things} does {who} still have?",
            "{who} has {m} {things} in each of {k} rows and gives {r} to {other}. How many "
            "{things} are there now?",
            "{who} lays out {things} in {k} rows of {m}. [Work out|Find] how many remain after {r} "
            "{things} are [lost|sold].",
            "{who} has {k} rows with {m} {things} in each row and sells {r} of them. How many "
            "{things} are left?",
        ),
    ),
    Scenario(
        "times",
        _times,
        "{a} {things} for one, {k} times as many for the other",
        ("The larger number is|k * a = t|{things}", "Together there are|a + t = s|{things}"),
        (
            "{who} has {a} {things}. {other} has {k} times as many. How many {things} do they have "
            "[together|altogether]?",
            "{other} has {k} times as many {things} as {who}, who has {a}. How many {things} do "
            "they have [in total|together]?",
            "{who} finds {a} {things} and {other} finds {k} times as many. What is the total "
            "number of {things}?",
            "{who} collects {a} {things}. If {other} collects {k} times that number, how many "
            "{things} are there [in total|altogether]?",
            "[Work out|Find] the total number of {things} when {who} has {a} and {other} has {k} "
            "times as many.",
            "{who} brings {a} {things} and {other} brings {k} times as many {things}. How many do "
            "they have together?",
        ),
    ),
    Scenario(
        "bus",
        _bus,
        "{a} people at first, {b} leave, {c} join",
        (
            "After some leave there are|a - b = t|people",
            "After some join there are|t + c = s|people",
        ),
        (
            "A [bus|train] carries {a} people. At a stop {b} people get off and {c} get on. How "
            "many people are on it now?",
            "There are {a} people in a [room|park|library]. {b} of them leave and {c} new people "
            "come. How many people are there now?",
            "{a} people wait in a line. {b} people go home, then {c} others join. How many people "
            "are in the line [now|at the end]?",
            "{who} counts {a} people on a [bus|train]. {b} people leave and {c} people join. What "
            "is the number of people then?",
            "[Work out|Find] how many people are in the [room|park] at the end: {a} were there, "
            "{b} went home and {c} came.",
            "There are {a} people on a [bus|train]. {b} people leave at a stop and {c} new people "
            "join. How many people are there at the end?",
        ),
    ),
)
TEMPLATES = {
    scenario.name: wordings(f"{FAMILY}/{scenario.name}", *scenario.stories)
    for scenario in SCENARIOS
}
HELDOUT = frozenset(w.name for group in TEMPLATES.values() for w in group if w.heldout)


def _work(left: int, op: str, right: int, result: int) -> str:
    """Write one step by tens and ones, as in mental arithmetic."""
    whole = f"{left} {op} {right} = {result}"
    if op == "*" and right > 10:
        tens, ones = left * 10, left * (right - 10)
        return f"{left} * 10 = {tens} and {left} * {right - 10} = {ones}, so {whole}."
    if op == "/":
        return f"{right} * {result} = {left}, so {whole}."
    if op in "+-" and right > 10 and right % 10:
        sign = 1 if op == "+" else -1
        tens, ones = right // 10 * 10, right % 10
        middle = left + sign * tens
        return f"{left} {op} {tens} = {middle} and {middle} {op} {ones} = {result}, so {whole}."
    return f"{whole}."


def _check_line(left: int, op: str, right: int, result: int) -> str:
    back = {
        "+": f"{result} - {right} = {left}",
        "-": f"{result} + {right} = {left}",
        "*": f"{result} / {left} = {right}",
        "/": f"{result} * {right} = {left}",
    }
    return f"Check: {back[op]}."


def _apply(left: int, op: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[op]


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """Generate a word problem whose answer names every step."""
    scenario = rng.choice(SCENARIOS)
    wording = pick(rng, TEMPLATES[scenario.name], heldout)
    (thing, things), (extra, extras) = rng.sample(THINGS, 2)
    who = other = person(rng)
    while other == who:
        other = person(rng)
    numbers = scenario.draw(rng)
    slots = {
        "thing": thing,
        "things": things,
        "extra": extra,
        "extras": extras,
        "who": who,
        "other": other,
        **numbers,
    }
    request = say(rng, wording.text, **slots)
    values = dict(numbers)
    lines: list[str] = []
    thoughts = [f"The numbers are: {scenario.facts.format(**slots)}."]
    step = (0, "+", 0, 0)
    for i, text in enumerate(scenario.steps):
        words, formula, unit = text.format(**slots).split("|")
        left, op, right, _, name = formula.split()
        result = values[name] = _apply(values[left], op, values[right])
        step = (values[left], op, values[right], result)
        lines.append(f"Step {i + 1}: {words} {step[0]} {op} {step[2]} = {result} {unit}.")
        order = "First" if i == 0 else "Then" if i == 1 else "Last"
        thoughts.append(f"{order} {step[0]} {op} {step[2]}: {_work(*step)}")
    thoughts.append(_check_line(*step))
    result = step[3]
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, request),
        tools=(),
        thinking=thinking,
        reasoning="\n".join(thoughts) if thinking else "",
        answer="\n".join([*lines, f"Answer: {result}"]),
        reference=result,
    )
