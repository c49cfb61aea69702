"""Command-line flags out of the dataclasses that the API uses: each option stands once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, make_dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from strobe.compat.aliases import understood
from strobe.compat.arguments import read
from strobe.config import EngineConfig
from strobe.sampling_params import SamplingParams
from strobe.server.settings import ServerConfig

logger = logging.getLogger(__name__)


def adopted(command: Any, options: Mapping[str, Any], name: str) -> Any:
    """The subcommand with other engines' options in the place of its own. Raises ValueError for
    those that contradict its own, and for those that it has no use for."""
    has = vars(command)
    groups = {part: has[part] for part in ("engine", "server") if part in has}
    own = {"target": "model" if "model" in has else "target", "draft": "draft"}
    own = {setting: place for setting, place in own.items() if place in has}
    given = {setting: has[place] or None for setting, place in own.items()}
    for group in groups.values():
        given |= {f.name: v for f in fields(group) if (v := getattr(group, f.name)) != f.default}
    found = understood(given | dict(options))
    changes: dict[str, dict[str, Any]] = {part: {} for part in groups}
    top: dict[str, Any] = {}
    for setting, new in found.values.items():
        parts = [part for part, group in groups.items() if setting in vars(group)]
        if setting in own:
            top[own[setting]] = new
        elif parts:
            changes[parts[0]][setting] = new
        elif not groups and setting in ("method", "num_drafts"):
            logger.warning("%s changes nothing here.", found.origins[setting][0])
        else:
            raise ValueError(f"strobe {name} takes no {found.origins[setting][0]}; leave it out.")
    return replace(command, **top, **{p: replace(groups[p], **new) for p, new in changes.items()})


def value(metavar: str) -> Any:
    """How tyro reads one value of a flag."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda given: given[0] if metavar == "TEXT" else read(given[0]),
        is_instance=lambda given: True,
        str_from_instance=lambda given: [str(given)],
    )


def flags(
    source: type, name: str, *, omit: tuple[str, ...] = (), defaults: Mapping[str, Any] | None
) -> Any:
    """A dataclass of command-line flags from another dataclass's fields and their help.

    defaults: what to say of the default of flags that are None unless given; None: flags have the
    fields' own defaults.
    """
    hints = get_type_hints(source)
    made: list[Any] = []
    for f in fields(source):
        if f.name in omit:
            continue
        text, default = f.metadata["help"], f.default
        shown = default if defaults is None else defaults.get(f.name, default)
        hint = f"(default: {shown})" if shown not in (None, "", ()) else ""
        if hints[f.name] is bool:
            note = arg(help=text, help_behavior_hint=hint if default else "")
            kind = Annotated[bool, note]
            made.append((f.name, kind if default else FlagCreatePairsOff[kind], default))
        elif default == ():
            note = arg(help=f"{text} Repeat it for several.", help_behavior_hint="")
            one = Annotated[Any, value("INT" if "ids" in f.name else "TEXT")]
            made.append((f.name, UseAppendAction[Annotated[tuple[one, ...], note]], default))
        else:
            note = arg(help=text, help_behavior_hint=hint)
            kind = Annotated[Any, note, value(_metavar(hints[f.name]))]
            made.append((f.name, kind, default if defaults is None else None))
    return make_dataclass(name, made, frozen=True)


def _metavar(kind: Any) -> str:
    return "TEXT" if "str" in str(kind) else "FLOAT" if "float" in str(kind) else "INT"


SHOWN = {
    "temperature": "the checkpoint's, else 1",
    "top_p": "the checkpoint's, else 1",
    "top_k": "the checkpoint's, else 0",
    "min_p": "the checkpoint's, else 0",
    "repetition_penalty": "the checkpoint's, else 1",
    "max_tokens": 512,
}
_API_ONLY = (
    "speculation",
    "skip_special_tokens",
    "logit_bias",
    "allowed_token_ids",
    "logprobs",
    "prompt_logprobs",
    "structured_outputs",
)
if TYPE_CHECKING:
    EngineFlags = DemoFlags = SamplingFlags = ChatFlags = ServerFlags = ServedFlags = Any
else:
    EngineFlags = flags(EngineConfig, "EngineFlags", omit=("seed",), defaults=None)
    DemoFlags = flags(EngineConfig, "DemoFlags", omit=("seed", "method"), defaults=None)
    ServedFlags = flags(EngineConfig, "ServedFlags", omit=("target",), defaults=None)
    ServerFlags = flags(ServerConfig, "ServerFlags", defaults=None)
    SamplingFlags = flags(SamplingParams, "SamplingFlags", omit=_API_ONLY, defaults=SHOWN)
    ChatFlags = flags(SamplingParams, "ChatFlags", omit=(*_API_ONLY, "n"), defaults=SHOWN)
