"""`--config FILE`: a command's options out of a YAML file, one a line, such as `port: 8000`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

import yaml

from strobe.compat.aliases import FLAGS
from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from strobe.server.settings import ServerConfig


def expanded(arguments: Sequence[str]) -> list[str]:
    """The arguments with the options of each `--config FILE` in its place, but for those that the
    command line itself gives. Raises ValueError for a file that holds no options."""
    words, found = list(arguments), list[str]()
    while words and words[0] != "--":
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if flag != "--config":
            found.append(word)
            continue
        if not equals and not words:
            raise ValueError("--config needs a file after it.")
        rest = [one for one in (*found, *words) if one.startswith("--")]
        given = {one.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for one in rest}
        found += _words(text if equals else words.pop(0), given)
    return found + words


def _words(path: str, given: set[str]) -> list[str]:
    """A file's options as on a command line, without those of the names given."""
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(f"--config names {path}, which cannot be read ({why}).") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(
            f"--config names {path}, which holds no options; write one a line, such as port: 8000."
        )
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        if flag[2:].replace("-", "_").removeprefix("no_") in given or value is None:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words += _switched_off(flag)
        elif isinstance(value, list) and not any(isinstance(one, list | dict) for one in value):
            words += [f"{flag}={one}" for one in value]
        else:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def _switched_off(flag: str) -> list[str]:
    name = flag[2:].replace("-", "_")
    if name in FLAGS:
        return [f"{flag}=false"]
    owners = EngineConfig, ServerConfig, SamplingParams
    known = {f.name: f.default for owner in owners for f in fields(owner)}
    return [f"--no-{flag[2:]}"] if known.get(name, True) else []
