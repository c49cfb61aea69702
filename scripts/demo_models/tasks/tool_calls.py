"""Tool calls: a request and one to three tools; the answer is one call in `<tool_call>` tags."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from scripts.demo_models.tasks.example import chat
from scripts.demo_models.tasks.wording import (
    THINGS,
    city,
    joined,
    person,
    pick,
    say,
    wordings,
    words,
)
from strobe.demo_models import Example

FAMILY = "tool"


@dataclass(frozen=True)
class Tool:
    """A tool: names it may have, what it is for, its parameters, and the ways to ask for it.

    A parameter is `slot:kind:name|other name`; `purpose` ends the sentence "The user wants to".
    """

    name: str
    names: str
    purpose: str
    parameters: str
    requests: tuple[str, ...]


TOOLS = (
    Tool(
        "weather",
        "get_weather|weather_lookup|check_weather",
        "know the weather in a city",
        "city:city:city|location unit:unit:unit|scale",
        (
            "What is the weather in {city} in {unit}?",
            "[Tell me|Show me] the weather in {city}. Use {unit}.",
            "Is it warm in {city} today? Give it in {unit}.",
            "I want to know the weather in {city}, in {unit}.",
        ),
    ),
    Tool(
        "timer",
        "set_timer|start_timer|create_timer",
        "start a timer",
        "minutes:small:minutes|duration label:label:label|name",
        (
            "Set a timer of {minutes} minutes for the {label}.",
            "Start a timer called {label} that runs {minutes} minutes.",
            "Let a timer run for {minutes} minutes. The name is {label}.",
            "I want a timer of {minutes} minutes. Its name is {label}.",
        ),
    ),
    Tool(
        "message",
        "send_message|write_message|send_text",
        "send a message to somebody",
        "to:person:to|recipient text:text:text|message",
        (
            'Send a message to {to}: "{text}"',
            'Write to {to} that "{text}".',
            'Tell {to} this: "{text}"',
            'I want to send this to {to}: "{text}"',
        ),
    ),
    Tool(
        "event",
        "create_event|add_event|new_event",
        "put an event in the calendar",
        "title:title:title|name day:day:day|date time:time:time|start",
        (
            "Put a {title} in my calendar on {day} at {time}.",
            "I have a {title} at {time} on {day}. [Please add it to|Put it in] the calendar.",
            "Add an event on {day} at {time}: {title}.",
            "On {day} at {time} I have a {title}. Add it to my calendar.",
        ),
    ),
    Tool(
        "currency",
        "convert_currency|exchange_money|currency_convert",
        "convert money",
        "amount:amount:amount|value source:money:from|source target:money:to|target",
        (
            "How much are {amount} {source} in {target}?",
            "Convert {amount} {source} to {target}.",
            "I have {amount} {source}. How much is that in {target}?",
            "Change {amount} {source} into {target}.",
        ),
    ),
    Tool(
        "music",
        "play_music|start_music|play_song",
        "hear music",
        "style:style:style|genre volume:volume:volume|level",
        (
            "Play some {style} music at volume {volume}.",
            "I want to hear {style}. Set the volume to {volume}.",
            "Start {style} music with the volume at {volume}.",
            "Play {style} and set the volume to {volume}.",
        ),
    ),
    Tool(
        "table",
        "book_table|reserve_table|table_booking",
        "book a table",
        "city:city:city|place people:few:people|guests time:time:time|hour",
        (
            "Book a table for {people} people in {city} at {time}.",
            "We are {people} people and want to eat in {city} at {time}. Book a table.",
            "I need a table in {city} at {time} for {people}.",
            "At {time} I need a table for {people} people in {city}.",
        ),
    ),
    Tool(
        "translate",
        "translate|translate_text|translation",
        "translate a text",
        "text:text:text|input language:language:language|target_language",
        (
            'Translate "{text}" to {language}.',
            'How do you say "{text}" in {language}?',
            'I need this text in {language}: "{text}"',
            'Give me "{text}" in {language}.',
            'Please say this in {language}: "{text}"',
            'Say "{text}" in {language}.',
        ),
    ),
    Tool(
        "train",
        "find_train|search_trains|train_search",
        "find a train",
        "start:city:from|origin end:city:to|destination day:day:day|date",
        (
            "Find a train from {start} to {end} on {day}.",
            "I want to go to {end} from {start} by train on {day}.",
            "Which trains go from {start} to {end} on {day}?",
            "On {day} I want to take a train from {start} to {end}.",
        ),
    ),
    Tool(
        "light",
        "set_light|control_light|change_light",
        "change the light in a room",
        "room:room:room|place percent:percent:brightness|level",
        (
            "Set the light in the {room} to {percent} percent.",
            "Make the light in the {room} {percent} percent bright.",
            "Change the {room} light to {percent} percent.",
            "I want the light in the {room} at {percent} percent.",
        ),
    ),
    Tool(
        "shopping",
        "add_to_list|shopping_add|add_item",
        "put something on the shopping list",
        "item:things:item|product count:small:quantity|count",
        (
            "Put {count} {item} on my shopping list.",
            "Add {count} {item} to the shopping list.",
            "I need to buy {count} {item}. Please note it.",
            "My shopping list needs {count} {item}.",
        ),
    ),
    Tool(
        "alarm",
        "set_alarm|create_alarm|wake_up",
        "set an alarm",
        "time:time:time|hour day:day:day|weekday",
        (
            "Set an alarm for {time} on {day}.",
            "Wake me up at {time} on {day}.",
            "On {day} I have to get up at {time}. Set an alarm.",
            "I want an alarm on {day} at {time}.",
        ),
    ),
    Tool(
        "stock",
        "get_stock|stock_price|check_stock",
        "know how many items are in stock",
        "item:things:item|product city:city:store|city",
        (
            "How many {item} are there in the store in {city}?",
            "Are there {item} in stock in {city}?",
            "Check the stock of {item} in the store in {city}.",
            "I want to know the stock of {item} in {city}.",
        ),
    ),
    Tool(
        "clock",
        "get_time|time_in_city|local_time",
        "know the time in a city",
        "city:city:city|location hours:clock:format|clock",
        (
            "What time is it in {city}? Use the {hours} clock.",
            "Tell me the time in {city} with the {hours} clock.",
            "How late is it in {city} now? I want the {hours} clock.",
            "I want to know the time in {city} on the {hours} clock.",
        ),
    ),
)
TEMPLATES = {tool.name: wordings(f"{FAMILY}/{tool.name}", *tool.requests) for tool in TOOLS}
HELDOUT = frozenset(w.name for group in TEMPLATES.values() for w in group if w.heldout)

_TYPES = {
    "small": "integer",
    "amount": "integer",
    "volume": "integer",
    "few": "integer",
    "percent": "integer",
}
_LABELS = words("tea eggs bread pasta break cake rice laundry workout soup nap coffee")
_TEXTS = (
    "I am late",
    "see you soon",
    "the train is late",
    "dinner is ready",
    "good morning",
    "thank you very much",
    "where are you",
    "I am at home",
    "the meeting starts now",
    "please call me",
    "happy birthday",
    "the book is on the table",
    "I like your garden",
    "we leave at noon",
    "good night",
    "the house is green",
    "my dog is small",
    "it rains today",
)
_MONEY = words("euros dollars pounds francs yen crowns pesos rupees")
_STYLES = words("jazz rock folk piano classical blues pop country guitar dance")
_LANGUAGES = words("French German Spanish Italian Polish Turkish Japanese Dutch Greek Swedish")
_ROOMS = words("kitchen bedroom office garden hall bathroom garage library")
_DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_TITLES = words("meeting workshop concert lecture party lesson dinner review")


def _value(rng: random.Random, kind: str) -> Any:
    return {
        "city": lambda: city(rng),
        "person": lambda: person(rng),
        "unit": lambda: rng.choice(("celsius", "fahrenheit")),
        "small": lambda: rng.randint(2, 60),
        "few": lambda: rng.randint(2, 12),
        "amount": lambda: rng.randint(5, 500),
        "volume": lambda: rng.randint(1, 10),
        "percent": lambda: rng.randrange(5, 100, 5),
        "label": lambda: rng.choice(_LABELS),
        "text": lambda: rng.choice(_TEXTS),
        "title": lambda: rng.choice(_TITLES),
        "day": lambda: rng.choice(_DAYS),
        "time": lambda: f"{rng.randint(6, 21):02d}:{rng.randrange(0, 60, 5):02d}",
        "money": lambda: rng.choice(_MONEY),
        "style": lambda: rng.choice(_STYLES),
        "language": lambda: rng.choice(_LANGUAGES),
        "room": lambda: rng.choice(_ROOMS),
        "things": lambda: rng.choice(THINGS)[1],
        "clock": lambda: rng.choice(("12-hour", "24-hour")),
    }[kind]()


@dataclass(frozen=True)
class Offer:
    """A tool with this chat's names."""

    tool: Tool
    name: str
    parameters: tuple[tuple[str, str, str], ...]  # slot, kind, name

    def schema(self) -> dict[str, Any]:
        """Return the OpenAI function schema."""
        properties = {
            name: {"type": _TYPES.get(kind, "string")} for _, kind, name in self.parameters
        }
        function = {
            "name": self.name,
            "description": f"Use this to {self.tool.purpose}.",
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        }
        return {"type": "function", "function": function}


def offer(rng: random.Random, tool: Tool) -> Offer:
    """Choose a name for the tool and for its parameters."""
    parameters: list[tuple[str, str, str]] = []
    for text in tool.parameters.split():
        slot, kind, names = text.split(":")
        parameters.append((slot, kind, rng.choice(names.split("|"))))
    return Offer(tool, rng.choice(tool.names.split("|")), tuple(parameters))


def values(rng: random.Random, chosen: Offer) -> dict[str, Any]:
    """Draw a value for every slot of the tool; all texts differ."""
    slots: dict[str, Any] = {}
    for slot, kind, _ in chosen.parameters:
        value = _value(rng, kind)
        while value in slots.values() and not isinstance(value, int):
            value = _value(rng, kind)
        slots[slot] = value
    return slots


def make(rng: random.Random, thinking: bool, heldout: bool) -> Example:
    """Generate a request that one of the offered tools answers."""
    offers = [offer(rng, tool) for tool in rng.sample(TOOLS, rng.randint(1, 3))]
    chosen = rng.choice(offers)
    wording = pick(rng, TEMPLATES[chosen.tool.name], heldout)
    slots = values(rng, chosen)
    arguments = {name: slots[slot] for slot, _, name in chosen.parameters}
    call = {"name": chosen.name, "arguments": arguments}
    given = [f"{name} = {json.dumps(value)}" for name, value in arguments.items()]
    others = [other.name for other in offers if other is not chosen]
    reasoning = f"The user wants to {chosen.tool.purpose}. The tool for that is {chosen.name}"
    reasoning += f", not {joined(others, 'or')}.\n" if others else ".\n"
    reasoning += f"It needs {joined(list(arguments))}. The request gives {joined(given)}."
    return Example(
        family=FAMILY,
        template=wording.name,
        messages=chat(rng, say(rng, wording.text, **slots)),
        tools=tuple(entry.schema() for entry in offers),
        thinking=thinking,
        reasoning=reasoning if thinking else "",
        answer=f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>",
        reference=call,
    )
