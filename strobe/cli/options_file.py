"""`--config FILE`: a command's options from a YAML file, one per line, such as `port: 8000`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields

import yaml

from strobe.compat.aliases import FLAGS
from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from strobe.server.server_settings import ServerConfig


def expand_options_file(arguments: Sequence[str]) -> list[str]:
    """Replace each `--config FILE` with the file's options, except those that are also on the
    command line. Raises ValueError for a file without options."""
    words = list(arguments)
    file_words = list[str]()
    while words and words[0] != "--":
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if flag != "--config":
            file_words.append(word)
            continue
        if not equals and not words:
            raise ValueError("--config needs a file after it.")
        rest = [token for token in (*file_words, *words) if token.startswith("--")]
        set_names = {
            token.partition("=")[0][2:].replace("-", "_").removeprefix("no_") for token in rest
        }
        file_words += _words(text if equals else words.pop(0), set_names)
    return file_words + words


def _words(path: str, set_names: set[str]) -> list[str]:
    """Return a file's options as command-line words, without those in `set_names`."""
    try:
        with open(path, encoding="utf-8") as file:
            options = yaml.safe_load(file) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(f"--config names {path}, which cannot be read ({reason}).") from None
    if not isinstance(options, dict) or not all(isinstance(name, str) for name in options):
        raise ValueError(
            f"--config names {path}, which holds no options; write one per line, such as "
            "port: 8000."
        )
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.lstrip('-').replace('_', '-')}"
        if flag[2:].replace("-", "_").removeprefix("no_") in set_names or value is None:
            continue
        if value is True:
            words.append(flag)
        elif value is False:
            words += _switched_off(flag)
        elif isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            words += [f"{flag}={item}" for item in value]
        else:
            words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


def _switched_off(flag: str) -> list[str]:
    name = flag[2:].replace("-", "_")
    if name in FLAGS:
        return [f"{flag}=false"]
    owners = EngineConfig, ServerConfig, SamplingParams
    defaults = {f.name: f.default for owner in owners for f in fields(owner)}
    return [f"--no-{flag[2:]}"] if defaults.get(name, True) else []
