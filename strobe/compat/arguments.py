"""Split other engines' options on a command line from our own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from strobe.compat.aliases import ALIASES, FLAGS

_SHORT = {
    "-tp": "tp",
    "-pp": "pipeline_parallel_size",
    "-dp": "data_parallel_size",
    "-sc": "speculative_config",
}
_NESTED = "speculative_config."


def split_options(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """Return our own arguments, and other engines' options by name. Raises ValueError for an option
    without a value, and for one given twice with different values."""
    own_words: list[str] = []
    options: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*own_words, word, *words], options
        flag, equals, text = word.partition("=")
        name = _SHORT.get(flag) or flag.removeprefix("--").replace("-", "_")
        negated = name.startswith("no_") and name[3:] in FLAGS
        name = name[3:] if negated else name
        if not (flag.startswith("--") or flag in _SHORT) or not _is_alias(name):
            own_words.append(word)
            continue
        if name in FLAGS and not equals:
            value: object = not negated
        else:
            if not equals and not words:
                raise ValueError(f"{flag} needs a value after it.")
            value = parse_value(text if equals else words.pop(0))
            if name in FLAGS and str(value).lower() in ("true", "false"):
                value = str(value).lower() == "true"
        if name in options and options[name] != value:
            raise ValueError(f"{flag} is given twice, with {options[name]!r} and {value!r}.")
        options[name] = value
    nested = {name: options.pop(name) for name in list(options) if name.startswith(_NESTED)}
    if nested:
        if "speculative_config" in options:
            raise ValueError(
                "--speculative-config is given together with "
                f"--{next(iter(nested)).replace('_', '-')}; give one of them."
            )
        options["speculative_config"] = {n.removeprefix(_NESTED): v for n, v in nested.items()}
    return own_words, options


def _is_alias(name: str) -> bool:
    return name in ALIASES or name.startswith(_NESTED)


def parse_value(text: str) -> int | float | str:
    """Convert a text to a number if it is one; the settings check it later."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
