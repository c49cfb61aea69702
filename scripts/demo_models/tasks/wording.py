"""Wordings of the prompts: a small grammar of alternatives, and words for the slots."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

_CHOICE = re.compile(r"\[([^\[\]]*)\]")


@dataclass(frozen=True)
class Wording:
    """One template of a family; `heldout` wordings are kept out of the training data."""

    name: str
    text: str
    heldout: bool = False


def say(rng: random.Random, text: str, /, **slots: object) -> str:
    """Expand `[a|b|c]` to one of the alternatives, then fill the `{slots}`."""
    text = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), text)
    return text.format(**slots) if slots else text


def wordings(name: str, *texts: str, heldout: int = 1) -> tuple[Wording, ...]:
    """Number the texts `name-1`, `name-2`, ...; the last `heldout` of them are held out."""
    first_heldout = len(texts) - heldout
    return tuple(
        Wording(f"{name}-{i + 1}", text, i >= first_heldout) for i, text in enumerate(texts)
    )


def pick(rng: random.Random, choices: tuple[Wording, ...], heldout: bool) -> Wording:
    """Choose one of the wordings on the requested side of the split."""
    return rng.choice([wording for wording in choices if wording.heldout == heldout])


def joined(items: list[str], last: str = "and") -> str:
    """Join words as `a`, `a and b`, `a, b and c`."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {last} {items[-1]}"


def words(text: str) -> tuple[str, ...]:
    """Return the words of a text."""
    return tuple(text.split())


NAMES = words(
    "Anna Ben Carla David Emma Felix Greta Henry Ida Jonas Kira Leo Mia Noah Olga Paul Rosa Sam "
    "Tara Victor Wanda Yusuf Zoe Amir Bella Chen Dora Elif Finn Gina Hugo Ines Jack Lena Maya "
    "Nina Omar Peter Sara Tom"
)
CITIES = words(
    "Oslo Paris Berlin London Madrid Rome Vienna Tokyo Cairo Lima Boston Dublin Geneva Lisbon "
    "Prague Warsaw Athens Delhi Seoul Sydney Toronto Chicago Munich Nairobi Helsinki"
)
THINGS = tuple(
    tuple(pair.split("/"))
    for pair in words(
        "apple/apples pear/pears pen/pens book/books cup/cups card/cards stamp/stamps "
        "marble/marbles ticket/tickets lemon/lemons shell/shells balloon/balloons cookie/cookies "
        "muffin/muffins plant/plants stone/stones button/buttons pencil/pencils flower/flowers "
        "candle/candles bottle/bottles ribbon/ribbons sticker/stickers egg/eggs"
    )
)
WORDS = words(
    "apple banana cherry date fig grape lemon mango olive peach pear plum river stone tree cloud "
    "rain snow wind storm tiger zebra horse rabbit otter eagle falcon goose house garden window "
    "door table chair lamp candle bottle basket violin piano drum flute guitar train boat bicycle "
    "rocket anchor bridge castle island jungle kettle ladder mirror needle orange pencil quilt "
    "ribbon silver tunnel umbrella valley winter yellow acorn beach copper desert ember forest "
    "hammer iron jacket king leaf moon night ocean paper queen road salt tower uncle velvet water"
)
_STARTS = words(
    "Ba Bre Ca Da Del El Fa Fre Gar Ha Il Jo Ka Lin Lo Mar Mo Ne Or Pel Qui Ra Sel Ta Ul Ve Wi Zan"
)
_MIDDLES = words("ba da la li lo ma mi na ni no ra re ri sa ta te vi vo")
_ENDS = words("ck d l la lo m n na nd ne nor r ra rd rin s ssa t tha via x")


def invented(rng: random.Random) -> str:
    """Invent a name such as `Lindaver`, which the model must copy since it cannot know it."""
    middle = rng.choice(_MIDDLES) if rng.random() < 0.7 else ""
    return rng.choice(_STARTS) + middle + rng.choice(_ENDS)


def person(rng: random.Random) -> str:
    """Return a first name; one in four is invented."""
    return invented(rng) if rng.random() < 0.25 else rng.choice(NAMES)


def city(rng: random.Random) -> str:
    """Return a city; one in four is invented."""
    return invented(rng) if rng.random() < 0.25 else rng.choice(CITIES)
