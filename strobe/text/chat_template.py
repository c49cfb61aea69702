"""The inputs of a chat template, and conversations in the form that it reads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Messages = list[dict[str, Any]]

Render = Callable[[Messages, list[dict[str, Any]] | None], str]
"""Renders messages and tools without a generation prompt; raises an exception if the template
rejects them."""

SystemTurns = Literal["anywhere", "leading", "first", "none"]
"""System messages that a template shows: anywhere, several at the start, one at the start, none."""

EmptyContent = Literal["absent", "text", "null"]
"""How a template takes an answer that is only tool calls: without content, with "", or null."""


@dataclass(frozen=True)
class TemplateCapabilities:
    """The forms that a chat template reads; the defaults suit most templates.

    part_roles: roles whose content must be a list of parts instead of a text. system: system
    messages that it shows. shows_tools, shows_calls, shows_results: whether the prompt contains the
    tools, an earlier answer's calls and the results of tools. arguments_as_text: whether a call's
    arguments must be JSON text instead of an object. call_example: a call as the template writes
    it, if it shows calls but no tools."""

    part_roles: frozenset[str] = frozenset()
    system: SystemTurns = "anywhere"
    shows_tools: bool = True
    shows_calls: bool = True
    shows_results: bool = True
    arguments_as_text: bool = False
    empty_content: EmptyContent = "absent"
    call_example: str | None = None


@dataclass(frozen=True)
class TemplateInput:
    """A conversation as a chat template reads it. warnings: a sentence for each change that moves a
    message."""

    messages: Messages
    tools: list[dict[str, Any]] | None
    warnings: tuple[str, ...] = ()


CALL_OPENER = "<tool_call>"
CALL_CLOSER = "</tool_call>"
RESULT_OPENER = "<tool_response>"
RESULT_CLOSER = "</tool_response>"

ONE_SYSTEM_MESSAGE = (
    "The chat template takes one system message, at the start, so the texts of all of them are "
    "joined there."
)
NO_SYSTEM_MESSAGE = (
    "The chat template takes no system message, so its text is put before the first user message."
)


def adapt(
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    capabilities: TemplateCapabilities,
) -> TemplateInput:
    """Return a conversation in the form that a chat template reads.

    Tools, calls and results that the template does not show become text in the Hermes form.
    """
    read = [dict(message) for message in messages]
    if not capabilities.shows_calls:
        read = [_with_calls_as_text(message) for message in read]
    if not capabilities.shows_results:
        read = _with_results_as_user(read)
    if tools and not capabilities.shows_tools:
        read = _with_system_text(read, describe_tools(tools, capabilities.call_example))
        tools = None
    warnings: tuple[str, ...] = ()
    if not _has_system_turns(read, capabilities.system):
        read = _with_one_system(read, capabilities.system)
        none = capabilities.system == "none"
        warnings = (NO_SYSTEM_MESSAGE if none else ONE_SYSTEM_MESSAGE,)
    return TemplateInput([_in_form(message, capabilities) for message in read], tools, warnings)


def describe_tools(tools: Sequence[Mapping[str, Any]], call_example: str | None) -> str:
    """Return a text that describes tools to a model. call_example: the form of a call, None for the
    Hermes form."""
    example = call_example or _call_text(EXAMPLE_NAME, EXAMPLE_ARGUMENTS)
    listed = "\n".join(_json(tool) for tool in tools)
    return (
        "You can call functions. These are available, one JSON object per line:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "To call a function, write its name and its arguments in exactly this form, once for each "
        f"call:\n{example}\n\n"
        "The results are given to you afterwards. If no function is of use, answer in text."
    )


EXAMPLE_NAME = "NAME_OF_FUNCTION"
EXAMPLE_ARGUMENTS = {"NAME_OF_ARGUMENT": "VALUE"}


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call_text(name: str, arguments: object) -> str:
    """Return a call in the Hermes form."""
    call = _json({"name": name, "arguments": arguments})
    return f"{CALL_OPENER}\n{call}\n{CALL_CLOSER}"


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.pop("tool_calls", None)
    if not calls:
        return message
    functions = [call.get("function") or call for call in calls]
    texts = [_call_text(f.get("name", ""), _as_object(f.get("arguments"))) for f in functions]
    content = message.get("content")
    return {**message, "content": "\n".join([content, *texts] if content else texts)}


def _with_results_as_user(messages: Messages) -> Messages:
    """Return the messages with results of tools as messages of the user; consecutive ones, and the
    user's message that follows, become one, because many templates want turns to alternate."""
    read: Messages = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        text = message.get("content") or ""
        if is_result:
            text = f"{RESULT_OPENER}\n{text}\n{RESULT_CLOSER}"
        if after_result and message["role"] in ("tool", "user"):
            read[-1]["content"] += ("\n" if is_result else "\n\n") + text
        elif is_result:
            read.append({"role": "user", "content": text})
        else:
            read.append(message)
        after_result = is_result
    return read


def _with_system_text(messages: Messages, text: str) -> Messages:
    """Return the messages with a text at the end of the first system message, which begins the
    conversation."""
    if messages and messages[0]["role"] == "system":
        content = messages[0].get("content")
        first = {**messages[0], "content": f"{content}\n\n{text}" if content else text}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _has_system_turns(messages: Messages, system: SystemTurns) -> bool:
    """Whether a template with these system turns shows all system messages of a conversation."""
    places = [i for i, message in enumerate(messages) if message["role"] == "system"]
    if not places or system == "anywhere":
        return True
    if system == "leading":
        return places == list(range(len(places)))
    return system == "first" and places == [0]


def _with_one_system(messages: Messages, system: SystemTurns) -> Messages:
    """Return the messages with the texts of all system messages joined in the first one, or in the
    first user message if the template takes no system message."""
    texts = [m.get("content") or "" for m in messages if m["role"] == "system"]
    text = "\n\n".join(text for text in texts if text)
    rest = [message for message in messages if message["role"] != "system"]
    if system != "none":
        return [{"role": "system", "content": text}, *rest]
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": text}, *rest]
    content = rest[0].get("content")
    first = {**rest[0], "content": f"{text}\n\n{content}" if content else text}
    return [first, *rest[1:]]


def _in_form(message: dict[str, Any], capabilities: TemplateCapabilities) -> dict[str, Any]:
    """Return a message with its content and its calls' arguments in the template's form."""
    read = {name: value for name, value in message.items() if value is not None}
    calls = read.get("tool_calls")
    if calls:
        read["tool_calls"] = [_call_in_form(call, capabilities) for call in calls]
    content = read.get("content")
    if content is None:
        # A text is safe where there are no calls: templates then read it without a check.
        form = capabilities.empty_content if calls else "text"
        read |= {"absent": {}, "text": {"content": ""}, "null": {"content": None}}[form]
    if isinstance(read.get("content"), str) and read["role"] in capabilities.part_roles:
        read["content"] = [{"type": "text", "text": read["content"]}]
    return read


def _call_in_form(call: object, capabilities: TemplateCapabilities) -> object:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = _as_object(function["arguments"])
    if capabilities.arguments_as_text and not isinstance(arguments, str):
        arguments = _json(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _as_object(arguments: object) -> object:
    """Return a call's arguments as an object; a text that is not a JSON object stays text."""
    if not arguments:
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def probe_template(render: Render) -> TemplateCapabilities:
    """Return what a chat template reads, by rendering short conversations."""
    return _Probe(render).capabilities


_SYSTEM = "probe-system"
_SECOND_SYSTEM = "probe-second-system"
_USER = "probe-user"
_ANSWER = "probe-answer"
_RESULT = "probe-result"
_TOOL = "probe_tool"
_KEY = "probe_key"
_VALUE = "probe-value"
_CALL_ID = "probe0001"
"""Nine letters and digits, the only form of an id that Mistral's templates take."""

_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _TOOL,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_argument": {"type": "string", "description": "A probe."}},
            "required": ["probe_argument"],
        },
    },
}


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _call_turn(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": dict(arguments)}
    call = {"id": _CALL_ID, "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


class _Probe:
    """Finds a template's capabilities one after another; each probe uses the earlier ones."""

    def __init__(self, render: Render):
        self._render = render
        self.capabilities = TemplateCapabilities()
        user = _turn("user", _USER)
        self._find_part_role("user", [user], _USER)
        if not self._shows([user], _USER):
            return  # a template that rejects everything says nothing
        self._find_part_role("system", [_turn("system", _SYSTEM), user], _SYSTEM)
        self._find_system_turns()
        history = [user, _turn("assistant", _ANSWER), user]
        self._find_part_role("assistant", history, _ANSWER)
        self._find_tools()
        self._find_calls()
        self._find_results()
        self._find_call_example()

    def _text(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str | None:
        """Return a conversation's text in the template's form, None if it is rejected."""
        read = [_in_form(message, self.capabilities) for message in messages]
        try:
            return self._render(read, tools)
        except Exception:  # whatever a template raises, it rejects the conversation
            return None

    def _shows(self, messages: Messages, *texts: str) -> bool:
        rendered = self._text(messages)
        return rendered is not None and all(text in rendered for text in texts)

    def _find_part_role(self, role: str, messages: Messages, text: str) -> None:
        """Find whether a role's content must be a list of parts."""
        if self._shows(messages, text):
            return
        before = self.capabilities
        self.capabilities = replace(before, part_roles=before.part_roles | {role})
        if not self._shows(messages, text):
            self.capabilities = before

    def _find_system_turns(self) -> None:
        system = _turn("system", _SYSTEM)
        second = _turn("system", _SECOND_SYSTEM)
        user = _turn("user", _USER)
        answer = _turn("assistant", _ANSWER)
        turns: SystemTurns = "none"
        if self._shows([system, user], _SYSTEM, _USER):
            turns = "first"
        if turns == "first" and self._shows([system, second, user], _SYSTEM, _SECOND_SYSTEM):
            turns = "leading"
        if (
            turns == "leading"
            and self._shows([system, user, answer, second, user], _SYSTEM, _SECOND_SYSTEM)
            and self._shows([user, answer, second, user], _SECOND_SYSTEM)
        ):
            turns = "anywhere"
        self.capabilities = replace(self.capabilities, system=turns)

    def _find_tools(self) -> None:
        user = _turn("user", _USER)
        texts = [
            self._text([user], [_PROBE_TOOL]),
            self._text([_turn("system", _SYSTEM), user], [_PROBE_TOOL]),
        ]
        shown = any(text is not None and _TOOL in text for text in texts)
        self.capabilities = replace(self.capabilities, shows_tools=shown)

    def _find_calls(self) -> None:
        """Find the form of calls that the largest number of conversations show; the first one if
        several are equal."""
        before = self.capabilities
        best = self.capabilities
        max_shown = 0
        forms: tuple[tuple[EmptyContent, bool], ...] = (
            ("absent", False), ("text", False), ("absent", True), ("text", True), ("null", False),
            ("null", True),
        )  # fmt: skip
        for empty_content, as_text in forms:
            self.capabilities = replace(
                before, empty_content=empty_content, arguments_as_text=as_text
            )
            count = sum(_has_call(text) for text in self._texts_with_call())
            if count > max_shown:
                best = self.capabilities
                max_shown = count
        self.capabilities = replace(best, shows_calls=max_shown > 0)

    def _texts_with_call(self) -> list[str | None]:
        """Return the texts of conversations with a call."""
        user = _turn("user", _USER)
        answer = _turn("assistant", _ANSWER)
        result = {**_turn("tool", _RESULT), "tool_call_id": _CALL_ID, "name": _TOOL}
        exchange = [user, _call_turn(_TOOL, {_KEY: _VALUE})]
        tools = [_PROBE_TOOL] if self.capabilities.shows_tools else None
        conversations = (exchange, [*exchange, result], [*exchange, result, answer, user])
        return [self._text(conversation, tools) for conversation in conversations]

    def _find_results(self) -> None:
        before = self.capabilities
        if not (before.shows_tools or before.shows_calls):
            self.capabilities = replace(before, shows_results=False)
            return
        call = _call_turn(_TOOL, {_KEY: _VALUE})
        answer = call if before.shows_calls else _turn("assistant", _ANSWER)
        result = {**_turn("tool", _RESULT), "tool_call_id": _CALL_ID, "name": _TOOL}
        messages = [_turn("user", _USER), answer, result]
        self._find_part_role("tool", messages, _RESULT)
        shown = self._shows(messages, _RESULT)
        self.capabilities = replace(self.capabilities, shows_results=shown)

    def _find_call_example(self) -> None:
        """Find the template's text of a call, if it shows calls but no tools: the text in the place
        of an answer's text, or of the whole answer if calls begin otherwise."""
        if self.capabilities.shows_tools or not self.capabilities.shows_calls:
            return
        user = _turn("user", _USER)
        question = self._text([user]) or ""
        answered = self._text([user, _turn("assistant", _ANSWER)]) or ""
        head, _, tail = answered.partition(_ANSWER)
        called = self._text([user, _call_turn(EXAMPLE_NAME, EXAMPLE_ARGUMENTS)]) or ""
        start = head if head and called.startswith(head) else question
        example = called.removeprefix(start).removesuffix(tail).strip()
        self.capabilities = replace(self.capabilities, call_example=example)


def _has_call(text: str | None) -> bool:
    """Whether a text has the probe's call, with its arguments in no quotes but JSON's own; a
    message printed as Python's does not count."""
    if text is None or _VALUE not in text or _TOOL not in text:
        return False
    wrong = (f"'{_KEY}'", f'\\"{_KEY}', "'tool_calls':")
    return not any(mark in text for mark in wrong)
