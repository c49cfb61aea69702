"""Extraction: a sentence holds the fields of a record; the answer is a JSON object of some."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from scripts.demo_models.tasks.example import chat
from scripts.demo_models.tasks.wording import (
    THINGS,
    city,
    invented,
    joined,
    person,
    pick,
    say,
    wordings,
    words,
)
from strobe.demo_models import Example

FAMILY = "json"


@dataclass(frozen=True)
class Record:
    """A kind of record: its fields in `name:kind` form, and the sentences that hold them all."""

    name: str
    fields: str
    sentences: tuple[str, ...]


RECORDS = (
    Record(
        "person",
        "name:person age:age city:city job:job",
        (
            "{name} is {age} years old, lives in {city} and works as a {job}.",
            "The {job} {name} from {city} is {age} years old.",
            "{name}, {age}, is a {job} in {city}.",
            "My friend {name} works as a {job} in {city} and is {age} years old.",
            "In {city} lives {name}, a {job}, who is {age} years old.",
        ),
    ),
    Record(
        "order",
        "customer:person item:things quantity:small price:price city:city",
        (
            "{customer} orders {quantity} {item} for {price} euros, to be sent to {city}.",
            "An order of {quantity} {item} came from {customer} in {city}. The price is {price} "
            "euros.",
            "Please send {quantity} {item} to {customer} in {city}. The price is {price} euros.",
            "{customer} from {city} buys {quantity} {item} and pays {price} euros.",
            "{customer} in {city} orders {quantity} {item}. The price is {price} euros.",
        ),
    ),
    Record(
        "booking",
        "guest:person nights:small room:number city:city breakfast:bool",
        (
            "{guest} stays {nights} nights in room {room} of a hotel in {city}, {breakfast} "
            "breakfast.",
            "The hotel in {city} has a booking for {guest}: room {room}, {nights} nights, "
            "{breakfast} breakfast.",
            "Room {room} in {city} is booked {breakfast} breakfast for {nights} nights by {guest}.",
            "In {city}, {guest} books room {room} for {nights} nights {breakfast} breakfast.",
            "{guest} books {nights} nights {breakfast} breakfast in a hotel in {city}, room "
            "{room}.",
        ),
    ),
    Record(
        "event",
        "title:title day:weekday time:time room:number people:number",
        (
            "The {title} is on {day} at {time} in room {room} with {people} people.",
            "On {day} at {time} there is a {title} for {people} people in room {room}.",
            "We have a {title} in room {room} on {day}. It starts at {time} and {people} people "
            "come.",
            "{people} people come to the {title} in room {room} at {time} on {day}.",
            "There is a {title} for {people} people at {time} on {day}, in room {room}.",
        ),
    ),
    Record(
        "pet",
        "owner:person animal:animal name:invented age:small color:color",
        (
            "{owner} has a {color} {animal} called {name}, which is {age} years old.",
            "The {animal} {name} is {color} and {age} years old. It belongs to {owner}.",
            "{name} is the {color} {animal} of {owner} and is {age} years old.",
            "A {color} {animal} with the name {name} lives with {owner}. It is {age} years old.",
            "The {color} {animal} of {owner} is called {name} and is {age} years old.",
        ),
    ),
    Record(
        "book",
        "title:booktitle author:person year:year pages:pages price:price",
        (
            "The book {title} by {author} from {year} has {pages} pages and costs {price} euros.",
            "{author} wrote {title} in {year}. It has {pages} pages and costs {price} euros.",
            "For {price} euros you get {title}, a book of {pages} pages that {author} wrote in "
            "{year}.",
            "In {year} {author} wrote the book {title} with {pages} pages. The price is {price} "
            "euros.",
            "{title} is a book of {pages} pages by {author} from {year}. The price is {price} "
            "euros.",
        ),
    ),
    Record(
        "flight",
        "passenger:person origin:city destination:city time:time seat:seat",
        (
            "{passenger} flies from {origin} to {destination} at {time} in seat {seat}.",
            "The flight of {passenger} leaves {origin} at {time} and goes to {destination}. The "
            "seat is {seat}.",
            "At {time} {passenger} takes the flight to {destination} from {origin}, seat {seat}.",
            "Seat {seat} on the flight at {time} from {origin} to {destination} is for "
            "{passenger}.",
            "{passenger} takes the flight from {origin} to {destination}, which leaves at {time}. "
            "The seat is {seat}.",
        ),
    ),
    Record(
        "weather",
        "city:city temperature:age weather:sky wind:small day:weekday",
        (
            "On {day} it is {weather} in {city} with {temperature} degrees and wind of {wind} "
            "knots.",
            "The weather in {city} on {day}: {weather}, {temperature} degrees, wind {wind} knots.",
            "{city} has {temperature} degrees and wind of {wind} knots on {day}. It is {weather}.",
            "It is {weather} in {city} on {day}. The wind has {wind} knots and there are "
            "{temperature} degrees.",
            "On {day} {city} has {temperature} degrees, it is {weather} and the wind has {wind} "
            "knots.",
        ),
    ),
    Record(
        "employee",
        "name:person team:team desk:number city:city remote:remote",
        (
            "{name} works in the {team} team in {city}, has desk {desk} and {remote} from home.",
            "In the {team} team, {name} has desk {desk} in {city} and {remote} from home.",
            "Desk {desk} in {city} belongs to {name} of the {team} team, who {remote} from home.",
            "{name} {remote} from home, is in the {team} team and has desk {desk} in {city}.",
            "{name} is in the {team} team in {city} and {remote} from home. The desk is {desk}.",
        ),
    ),
)
TEMPLATES = {
    record.name: wordings(f"{FAMILY}/{record.name}", *record.sentences) for record in RECORDS
}
HELDOUT = frozenset(w.name for group in TEMPLATES.values() for w in group if w.heldout)

_REQUESTS = (
    "Extract {keys} as JSON: {text}",
    "Extract {keys} from [this|the following] [text|sentence] as a JSON object.\n{text}",
    "[Write|Give] a JSON object with the [keys|fields] {keys} for [this|the following] text: "
    "{text}",
    "{text}\n[Write|Give] {keys} of this [text|sentence] as JSON.",
    "Text: {text}\n[Keys|Fields]: {keys}\n[Answer with|Write] a JSON object.",
    "[Read|Take] the [text|sentence] and answer with JSON that has {keys}. {text}",
    "Turn [this|the following] [text|sentence] into JSON with the [keys|fields] {keys}: {text}",
    "Which values do {keys} have in this text? Answer with JSON. {text}",
)
_HELDOUT_REQUESTS = (
    "{text}\nTake this text and write a JSON object with the keys {keys}.",
    "Give {keys} as JSON for this sentence: {text}",
)
_JOBS = words(
    "baker doctor driver farmer gardener lawyer nurse painter pilot teacher tailor writer"
)
_ANIMALS = words("cat dog horse rabbit goose parrot turtle hamster otter")
_COLORS = words("black white brown grey red green blue yellow")
_SKIES = words("sunny cloudy rainy snowy windy foggy stormy")
_TEAMS = words("sales design support data product finance travel security")
_TITLES = words("meeting workshop concert lecture party lesson dinner review")
_DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_NOUNS = words("River Stone Winter Garden Castle Ocean Forest Island Mirror Bridge Night Road")


def _value(rng: random.Random, kind: str) -> tuple[Any, str]:
    """Return a value and its text in the sentence."""
    if kind == "bool":
        value = rng.random() < 0.5
        return value, "with" if value else "without"
    if kind == "remote":
        value = rng.random() < 0.5
        return value, "works" if value else "never works"
    drawn: Any = {
        "person": lambda: person(rng),
        "invented": lambda: invented(rng),
        "city": lambda: city(rng),
        "things": lambda: rng.choice(THINGS)[1],
        "age": lambda: rng.randint(10, 80),
        "small": lambda: rng.randint(2, 19),
        "number": lambda: rng.randint(10, 399),
        "pages": lambda: rng.randint(100, 699),
        "year": lambda: rng.randint(1950, 2029),
        "price": lambda: rng.randint(2, 60) + rng.choice((0.5, 0.25, 0.75, 0.95)),
        "time": lambda: f"{rng.randint(8, 21):02d}:{rng.randrange(0, 60, 5):02d}",
        "seat": lambda: f"{rng.randint(1, 39)}{rng.choice('ABCDEF')}",
        "job": lambda: rng.choice(_JOBS),
        "animal": lambda: rng.choice(_ANIMALS),
        "color": lambda: rng.choice(_COLORS),
        "sky": lambda: rng.choice(_SKIES),
        "team": lambda: rng.choice(_TEAMS),
        "title": lambda: rng.choice(_TITLES),
        "weekday": lambda: rng.choice(_DAYS),
        "booktitle": lambda: "The " + " and the ".join(rng.sample(_NOUNS, rng.randint(1, 2))),
    }[kind]()
    return drawn, str(drawn)


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """Generate a sentence and keys; the answer is an indented JSON object in the keys' order."""
    record = rng.choice(RECORDS)
    wording = pick(rng, TEMPLATES[record.name], heldout)
    values: dict[str, Any] = {}
    said: dict[str, str] = {}
    for field in record.fields.split():
        name, kind = field.split(":")
        values[name], said[name] = _value(rng, kind)
    keys = rng.sample(list(values), rng.randint(3, min(5, len(values))))
    sentence = say(rng, wording.text, **said)
    asked = _HELDOUT_REQUESTS if heldout else _REQUESTS
    request = say(rng, rng.choice(asked), keys=joined(keys), text=sentence)
    result = {key: values[key] for key in keys}
    notes = [f"{key}: the text says {said[key]}" for key in keys if isinstance(values[key], bool)]
    found = [f"{key} = {json.dumps(values[key], ensure_ascii=False)}" for key in keys]
    reasoning = f"The text is about a {record.name}. I need {len(keys)} keys: {joined(keys)}.\n"
    reasoning += "".join(f"{note}.\n" for note in notes)
    reasoning += f"In the text I find {joined(found)}."
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, request),
        tools=(),
        thinking=thinking,
        reasoning=reasoning if thinking else "",
        answer=json.dumps(result, indent=2, ensure_ascii=False),
        reference=result,
    )
