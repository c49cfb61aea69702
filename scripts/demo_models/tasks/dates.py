"""Calendar questions: days before and after, weekdays, ISO dates, days between."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from datetime import date, timedelta

from scripts.demo_models.tasks.example import chat
from scripts.demo_models.tasks.wording import Wording, pick, say, wordings
from strobe.demo_models import Example

FAMILY = "dates"
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

TEMPLATES: dict[str, tuple[Wording, ...]] = {
    kind: wordings(f"{FAMILY}/{kind}", *texts)
    for kind, texts in {
        "after": (
            "[What|Which] date is {n} days after {day}?",
            "Today is {day}. [What|Which] date [is it|will it be] in {n} days?",
            "Add {n} days to {day}. What is the [date|result]?",
            "A [meeting|trip|party] is {n} days after {day}. On [what|which] date is it?",
            "[Find|Work out] the date that comes {n} days after {day}.",
            "The start is on {day}. [What|Which] date is {n} days later?",
            "A [trip|party] starts {n} days from {day}. [Find|Work out] the date.",
            "Today is {day}. A [meeting|trip] is in {n} days. Which date is that?",
        ),
        "before": (
            "[What|Which] date was {n} days before {day}?",
            "Today is {day}. [What|Which] date was it {n} days ago?",
            "[Subtract|Take away] {n} days from {day}. What is the [date|result]?",
            "A [meeting|trip|party] was {n} days before {day}. On [what|which] date was it?",
            "[Find|Work out] the date that comes {n} days before {day}.",
            "Go back {n} days from {day}. [What|Which] date is it then?",
            "Today is {day}. A [meeting|trip] was {n} days ago. Which date was that?",
        ),
        "later": (
            "Today is {weekday}. [What|Which] day of the week [is it|will it be] in {n} days?",
            "[What|Which] weekday is {n} days after {weekday}?",
            "If today is {weekday}, [what|which] weekday [is it|will it be] {n} days from now?",
            "A [meeting|trip|party] is {n} days after a {weekday}. On [what|which] weekday is it?",
            "[Find|Work out] the weekday that comes {n} days after {weekday}.",
            "Today is {weekday}. A [meeting|trip] is in {n} days. Which weekday is that?",
        ),
        "earlier": (
            "Today is {weekday}. [What|Which] day of the week was it {n} days ago?",
            "[What|Which] weekday was {n} days before {weekday}?",
            "If today is {weekday}, [what|which] weekday was it {n} days ago?",
            "A [meeting|trip|party] was {n} days before a {weekday}. On [what|which] weekday was "
            "it?",
            "[Find|Work out] the weekday that comes {n} days before {weekday}.",
            "Today is {weekday}. A [meeting|trip] was {n} days ago. Which weekday was that?",
        ),
        "iso": (
            "[Write|Give] the date {words} in ISO format.",
            "[Convert|Change] {words} to the format YYYY-MM-DD.",
            "What is {words} in ISO format?",
            "How do you write {words} as YYYY-MM-DD?",
            "[Write|Give] {words} with year, month and day as numbers (YYYY-MM-DD).",
            "Here is a date: {words}. [Convert|Change] it to ISO format.",
            "Take the date {words} and write it as YYYY-MM-DD.",
        ),
        "words": (
            "[Write|Give] the date {iso} with the name of the month.",
            "[Convert|Change] the ISO date {iso} to [words|a date in words].",
            "Which date is {iso}? [Write|Give] it with the name of the month.",
            "How do you write {iso} with the month as a word?",
            "Here is an ISO date: {iso}. [Write|Give] the day, the name of the month and the year.",
            "Take the ISO date {iso} and write it with the name of the month.",
        ),
        "between": (
            "How many days are there between {day} and {end}?",
            "How many days [pass|are there] from {day} to {end}?",
            "A trip starts on {day} and ends on {end}. How many days later is the end?",
            "Count the days from {day} to {end}.",
            "[Find|Work out] the number of days between {day} and {end}.",
            "Today is {day}. How many days are there until {end}?",
            "A trip ends on {end} and starts on {day}. How many days later is the end?",
            "The end is on {end} and the start is on {day}. How many days are there between them?",
            "A [meeting|party] is on {end}. Today is {day}. How many days are left until it?",
            "A [meeting|party] is on {end} and today is {day}. How many days are there until then?",
        ),
    }.items()
}
HELDOUT = frozenset(w.name for group in TEMPLATES.values() for w in group if w.heldout)


def month_days(year: int, month: int) -> int:
    """Return the number of days of the month."""
    return (date(year + month // 12, month % 12 + 1, 1) - date(year, month, 1)).days


def _words(day: date) -> str:
    return f"{day.day} {MONTHS[day.month - 1]} {day.year}"


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number < 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _spoken(rng: random.Random, day: date) -> str:
    month = MONTHS[day.month - 1]
    return rng.choice(
        (
            f"{day.day} {month} {day.year}",
            f"{month} {day.day}, {day.year}",
            f"the {_ordinal(day.day)} of {month} {day.year}",
            f"{month} {_ordinal(day.day)}, {day.year}",
        )
    )


def _written(rng: random.Random, day: date) -> str:
    return day.isoformat() if rng.random() < 0.3 else _spoken(rng, day)


def _month_line(day: date) -> str:
    month = MONTHS[day.month - 1]
    days = month_days(day.year, day.month)
    if day.month == 2:
        leap = "a leap year" if days == 29 else "no leap year"
        return f"{day.year} is {leap}, so {month} has {days} days."
    return f"{month} has {days} days."


def _some_day(rng: random.Random) -> date:
    return date(2001, 1, 1) + timedelta(days=rng.randrange(14600))


Drawn = tuple[Mapping[str, object], str, str, str]  # slots, thoughts, lines of the answer, result


def _after(rng: random.Random) -> Drawn:
    start, n = _some_day(rng), rng.randint(2, 28)
    end, total = start + timedelta(days=n), start.day + n
    days = month_days(start.year, start.month)
    lines = f"The date is {_words(start)}. {_month_line(start)}\n{start.day} + {n} = {total}"
    if total > days:
        month = MONTHS[end.month - 1]
        lines += f", which is more than {days}, and {total} - {days} = {end.day}. "
        lines += f"The next month is {month}, so it is {_words(end)}."
        thoughts = f"{total} is after the end of the month, so I go on in {month}."
    else:
        lines += f", which is not more than {days}, so it is {_words(end)}."
        thoughts = f"{total} is still in {MONTHS[end.month - 1]}."
    thoughts = f"I go forward from day {start.day}: {start.day} + {n} = {total}. {thoughts}"
    thoughts = f"{_month_line(start)} {thoughts}"
    return {"day": _written(rng, start), "n": n}, thoughts, lines, end.isoformat()


def _before(rng: random.Random) -> Drawn:
    end, n = _some_day(rng), rng.randint(2, 28)
    start = end - timedelta(days=n)
    lines = f"The date is {_words(end)}.\n"
    if n < end.day:
        lines += f"{end.day} - {n} = {start.day}, which is in the same month, "
        lines += f"so it is {_words(start)}."
        thoughts = f"{n} is less than {end.day}, so I stay in {MONTHS[end.month - 1]}."
    else:
        days, month = month_days(start.year, start.month), MONTHS[start.month - 1]
        lines += f"The month before is {month}. {_month_line(start)} {end.day} + {days} = "
        lines += f"{end.day + days} and {end.day + days} - {n} = {start.day}, "
        lines += f"so it is {_words(start)}."
        thoughts = f"{n} is not less than {end.day}, so I go back to {month}. {_month_line(start)}"
    thoughts = f"I go back {n} days from day {end.day}. {thoughts}"
    return {"day": _written(rng, end), "n": n}, thoughts, lines, start.isoformat()


def _weekday(rng: random.Random, sign: int) -> Drawn:
    start, n = rng.randrange(7), rng.randint(2, 60)
    weeks, rest = divmod(n, 7)
    way = "forward" if sign > 0 else "back"
    steps = [WEEKDAYS[(start + sign * i) % 7] for i in range(1, rest + 1)]
    result = WEEKDAYS[(start + sign * n) % 7]
    unit = "day" if rest == 1 else "days"
    lines = f"A week has 7 days, and {n} = 7 * {weeks} + {rest}.\n"
    if rest:
        lines += f"I go {way} {rest} {unit} from {WEEKDAYS[start]}: {', '.join(steps)}."
    else:
        lines += f"No days are left, so it is {WEEKDAYS[start]} again."
    thoughts = f"Full weeks do not change the weekday. {n} days have {weeks} full weeks, because "
    thoughts += f"7 * {weeks} = {7 * weeks} and {n} - {7 * weeks} = {rest}."
    return {"weekday": WEEKDAYS[start], "n": n}, thoughts, lines, result


def _iso(rng: random.Random) -> Drawn:
    day = _some_day(rng)
    month = MONTHS[day.month - 1]
    lines = f"The year is {day.year:04d}, the month {month} is number {day.month:02d}, "
    lines += f"and the day is {day.day:02d}."
    thoughts = f"{month} is month {day.month}, with two digits {day.month:02d}. "
    thoughts += f"The day {day.day} with two digits is {day.day:02d}."
    return {"words": _spoken(rng, day)}, thoughts, lines, day.isoformat()


def _from_iso(rng: random.Random) -> Drawn:
    day = _some_day(rng)
    month = MONTHS[day.month - 1]
    lines = f"The year is {day.year:04d}, the month number {day.month:02d} is {month}, "
    lines += f"and the day is {day.day}."
    thoughts = f"The parts are {day.year:04d}, {day.month:02d} and {day.day:02d}. "
    thoughts += f"Month {day.month} is {month}."
    return {"iso": day.isoformat()}, thoughts, lines, _words(day)


def _between(rng: random.Random) -> Drawn:
    start = _some_day(rng)
    gap = rng.randint(3, 45)
    end = start + timedelta(days=gap)
    days = month_days(start.year, start.month)
    while (end.year - start.year) * 12 + end.month - start.month > 1:
        gap -= 10
        end = start + timedelta(days=gap)
    if end.month == start.month:
        lines = f"Both days are in {MONTHS[start.month - 1]}.\n"
        lines += f"From day {start.day} to day {end.day}: {end.day} - {start.day} = {gap} days."
        thoughts = "The month is the same, so I subtract the days."
    else:
        rest = days - start.day
        lines = f"{_month_line(start)} From {start.day} to {days}: {days} - {start.day} = {rest} "
        lines += f"days.\nThen {end.day} more days in {MONTHS[end.month - 1]}: "
        lines += f"{rest} + {end.day} = {gap} days."
        thoughts = f"The first day is in {MONTHS[start.month - 1]} and the last day is in "
        thoughts += f"{MONTHS[end.month - 1]}. I count to the end of the first month, then go on."
    slots = {"day": _written(rng, start), "end": _written(rng, end)}
    thoughts = f"The days are {_words(start)} and {_words(end)}. {thoughts}"
    return slots, thoughts, lines, str(gap)


_DRAW: dict[str, Callable[[random.Random], Drawn]] = {
    "after": _after,
    "before": _before,
    "later": lambda rng: _weekday(rng, 1),
    "earlier": lambda rng: _weekday(rng, -1),
    "iso": _iso,
    "words": _from_iso,
    "between": _between,
}


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """Generate a calendar question whose answer shows the counting."""
    kind = rng.choice(tuple(TEMPLATES))
    wording = pick(rng, TEMPLATES[kind], heldout)
    slots, thoughts, lines, result = _DRAW[kind](rng)
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, say(rng, wording.text, **slots)),
        tools=(),
        thinking=thinking,
        reasoning=thoughts if thinking else "",
        answer=f"{lines}\nAnswer: {result}",
        reference=result,
    )
