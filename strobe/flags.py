"""Command-line flags out of the dataclasses that the API uses: each option stands once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from strobe.config import EngineConfig
from strobe.request import SamplingParams
from strobe.server.settings import ServerConfig


def read(text: str) -> Any:
    """A number where the text is one; the dataclass that takes it says what is wrong with it."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


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
    return "TEXT" if "str" in str(kind) else "FLOAT" if kind is float else "INT"


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
