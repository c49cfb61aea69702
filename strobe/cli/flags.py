"""Command-line flags generated from the API's dataclasses, so that each option is declared once.

tyro parses the commands, but not from those dataclasses directly. With tyro 1.0, errors are boxes
of 5 to 12 lines unless a private hook is used; an explicit value cannot be distinguished from an
equal default (--top-k 0 must override the checkpoint's 20); two classes with a field of the same
name (seed) cannot share a command; and a command cannot leave a field out. So `flags` makes a
dataclass of fields for tyro to show, and the real dataclass checks the values.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field, asdict, fields, make_dataclass, replace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from strobe.compat.aliases import translate
from strobe.compat.arguments import parse_value
from strobe.config import SERVED_OPTIONS, EngineConfig
from strobe.sampling_params import OPTIONS, RECOMMENDED, SamplingParams
from strobe.server.server_settings import ServerConfig

if TYPE_CHECKING:
    from strobe.llm import LLM

logger = logging.getLogger(__name__)


class Command(Protocol):
    """A command, as a dataclass of its options. examples: command lines for its help."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    examples: ClassVar[tuple[str, ...]]

    def run(self) -> int: ...


AnyCommand = TypeVar("AnyCommand", bound=Command)


def note(text: str, metavar: str | None = None) -> object:
    """Return tyro's annotation of an argument whose help does not show its default."""
    return arg(help=text, metavar=metavar, help_behavior_hint="")


_BY_PLACE = get_args(Positional[str])[1]
"""tyro's mark of an argument that has no option."""
_TARGET = "Directory or hub name of the target model, or smollm2; without one, the demo models."
Target = Annotated[Positional[str], note(_TARGET, "TARGET")]
Json = FlagCreatePairsOff[Annotated[bool, note("Print one JSON object on standard output.")]]
Thinking = FlagCreatePairsOff[Annotated[bool, note("Let the model think before it answers.")]]
Debug = FlagCreatePairsOff[Annotated[bool, note("Log every verify step on standard error.")]]
System = Annotated[str | None, note("A system message.", "TEXT")]

_FILE = "Options can also come from a YAML file with one per line: --config FILE."


def parse(
    kind: type[AnyCommand], name: str, arguments: Sequence[str], options: Mapping[str, object]
) -> AnyCommand:
    """Parse the arguments and other engines' options into a command of class `kind`, whose help has
    its `examples`. Raises ValueError for an unknown option."""
    # tyro keeps the breaks of lines that begin with blanks.
    examples = "".join(f"\n  {example}" for example in kind.examples)
    about = f"{inspect.getdoc(kind)}\n\nExamples:{examples}\n\n{_FILE}"
    command, unknown = tyro.cli(
        kind, prog=name, args=arguments, return_unknown_args=True, description=about
    )
    inner = getattr(command, "which", None)
    if inner is not None:
        name = f"{name} {type(inner).__name__.lower()}"
    if unknown:
        raise ValueError(_no_option(unknown[0], inner or command, name))
    if inner is not None:
        return replace(command, which=apply_options(inner, options, name))
    command = apply_options(command, options, name)
    if getattr(command, "debug", False):
        logging.basicConfig(format="%(name)s: %(message)s")
        logging.getLogger("strobe").setLevel(logging.DEBUG)
    return command


def completed(arguments: list[str], kinds: Collection[str], noun: str) -> list[str]:
    """Return the arguments of a command with subcommands, or --help if there are none. Raises
    ValueError for an unknown subcommand."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in kinds:
        raise ValueError(f"{arguments[0]!r} is not {noun}; there are {', '.join(kinds)}.")
    return arguments or ["--help"]


def _no_option(option: str, command: object, name: str) -> str:
    """Return the error sentence for an argument that the command does not take."""
    parts = ("sampling", "server", "bench", "settings", "engine")
    groups = [g for g in (getattr(command, n, None) for n in parts) if g]
    options = [
        f"--{name.replace('_', '-')}"
        for group in (command, *groups)
        for name, hint in get_type_hints(type(group), include_extras=True).items()
        if _BY_PLACE not in get_args(hint) and get_origin(hint) is not ClassVar
    ]
    close = difflib.get_close_matches(option.split("=")[0].replace("_", "-"), options, 1, 0.7)
    hint = f"did you mean {close[0]}?" if close else f"{name} --help lists what it takes."
    return f"{name} takes no {option!r}; {hint}"


def apply_options(command: AnyCommand, options: Mapping[str, object], name: str) -> AnyCommand:
    """Translate other engines' options and set them on the command. Raises ValueError for options
    that contradict the command's own or that it does not have."""
    attributes = vars(command)
    groups = {part: attributes[part] for part in ("engine", "server") if part in attributes}
    field_of = {"target": "model" if "model" in attributes else "target", "draft": "draft"}
    field_of = {setting: name for setting, name in field_of.items() if name in attributes}
    chosen = {setting: attributes[name] or None for setting, name in field_of.items()}
    for f in () if groups else fields(command):
        if f.name in EngineConfig.__dataclass_fields__:
            field_of[f.name] = f.name
            chosen[f.name] = value if (value := attributes[f.name]) != f.default else None
    for group in groups.values():
        for f in fields(group):
            value = getattr(group, f.name)
            if value != f.default and chosen.get(f.name) not in (None, value):
                raise ValueError(
                    f"{name} has two values of {f.name}, {chosen[f.name]} and {value}; name one."
                )
            chosen |= {f.name: value} if value != f.default else {}
    translated = translate(chosen | dict(options))
    changes: dict[str, dict[str, Any]] = {part: {} for part in groups}
    top: dict[str, Any] = {}
    for setting, new in translated.values.items():
        parts = [part for part, group in groups.items() if setting in vars(group)]
        if setting in field_of:
            top[field_of[setting]] = new
        elif parts:
            changes[parts[0]][setting] = new
        elif not groups and setting in ("method", "num_drafts"):
            logger.warning("%s changes nothing here.", translated.origins[setting][0])
        else:
            raise ValueError(f"{name} takes no {translated.origins[setting][0]}; leave it out.")
    return replace(command, **top, **{p: replace(groups[p], **new) for p, new in changes.items()})


def number(metavar: str) -> PrimitiveConstructorSpec[object]:
    """Return tyro's specification of one value: parsed as a number if it is one and `metavar` is
    INT or FLOAT, else text."""
    numeric = metavar in ("INT", "FLOAT")
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda values: parse_value(values[0]) if numeric else values[0],
        is_instance=lambda values: True,
        str_from_instance=lambda values: [str(values)],
    )


def flags(
    source: type, name: str, *, omit: tuple[str, ...] = (), defaults: Mapping[str, object] | None
) -> type[object]:
    """Make a dataclass of command-line flags from another dataclass's fields and their help.

    defaults: descriptions of defaults by field; flags are then None unless set. None: flags keep
    the fields' own defaults.
    """
    hints = get_type_hints(source)
    parameters: list[tuple[str, object, object]] = []
    for f in fields(source):
        if f.name in omit:
            continue
        text = f.metadata["help"]
        default = f.default
        shown = default if defaults is None else defaults.get(f.name, default)
        hint = f"(default: {shown})" if shown not in (None, "", ()) else ""
        if hints[f.name] is bool:
            note = arg(help=text, help_behavior_hint=hint if default else "")
            kind = Annotated[bool, note]
            parameters.append((f.name, kind if default else FlagCreatePairsOff[kind], default))
        elif default == ():
            note = arg(help=f"{text} Repeat it for several.", help_behavior_hint="")
            annotated = Annotated[Any, number("INT" if "ids" in f.name else "TEXT")]
            parameters.append(
                (f.name, UseAppendAction[Annotated[tuple[annotated, ...], note]], default)
            )
        else:
            note = arg(help=text, help_behavior_hint=hint)
            kind = Annotated[Any, note, number(_metavar(hints[f.name]))]
            parameters.append((f.name, kind, default if defaults is None else None))
    return make_dataclass(name, parameters, frozen=True)


def _metavar(kind: object) -> str:
    for choice in (kind, *get_args(kind)):
        if get_origin(choice) is Literal:
            return f"{{{','.join(get_args(choice))}}}"
    return "TEXT" if "str" in str(kind) else "FLOAT" if "float" in str(kind) else "INT"


SHOWN: Mapping[str, Any] = {
    **{option.name: f"the checkpoint's, else {option.default:g}" for option in RECOMMENDED},
    "max_tokens": 512,
}
_API_ONLY = tuple(option.name for option in OPTIONS if not option.facts.flag)
if TYPE_CHECKING:
    EngineFlags = DemoFlags = SamplingFlags = ChatFlags = ServedFlags = Any
    ServerFlags = Any
else:
    EngineFlags = flags(EngineConfig, "EngineFlags", omit=("seed", *SERVED_OPTIONS), defaults=None)
    DemoFlags = flags(
        EngineConfig, "DemoFlags", omit=("seed", "method", *SERVED_OPTIONS), defaults=None
    )
    ServedFlags = flags(EngineConfig, "ServedFlags", defaults=None)
    ServerFlags = flags(ServerConfig, "ServerFlags", defaults=None)
    SamplingFlags = flags(SamplingParams, "SamplingFlags", omit=_API_ONLY, defaults=SHOWN)
    ChatFlags = flags(SamplingParams, "ChatFlags", omit=(*_API_ONLY, "n"), defaults=SHOWN)


def load(flags: EngineFlags) -> LLM:
    """Load the models that the flags name. On a terminal, say so first; nothing is drawn meanwhile
    but the bar of weights being read."""
    if sys.stderr.isatty():
        name = flags.target or "the demo models"
        print(f"Loading {name}, and warming up ...", file=sys.stderr, flush=True)
    from strobe.llm import LLM

    return LLM(**asdict(flags))


def sampling(llm: LLM, flags: SamplingFlags) -> SamplingParams:
    """Return the checkpoint's recommended sampling parameters, overridden by the flags."""
    set_values = {name: value for name, value in asdict(flags).items() if value not in (None, ())}
    set_values.setdefault("max_tokens", SHOWN["max_tokens"])
    return llm.get_default_sampling_params().clone(**set_values)


def conversation(prompt: str | None, system: str | None) -> list[dict[str, str]]:
    """Return the first messages: the system message and the prompt, as far as they are set."""
    messages = [{"role": "system", "content": system}] if system else []
    return messages + ([{"role": "user", "content": prompt}] if prompt is not None else [])
