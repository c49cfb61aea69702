"""Tool calls of Mistral and DeepSeek: a name followed by the JSON of the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.server.parsers.format_protocols import Tool
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser
from tests.server.support.parser_runs import check_cuts, dumps, parse, places, stream, texts
from tests.server.support.tool_tokenizers import Vocabulary, vocabulary

MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
DEEPSEEK = tuple(
    f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)
CALLS, CALLS_END, CALL, CALL_END, SEP = DEEPSEEK
ROME = ("get_time", {"city": 'Rome "<[{', "days": 2})
OSLO = ("get_date", {})
TOOLS = [
    Tool(
        "get_time",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 9},
                "days": {"type": "integer"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    ),
    Tool("get_date", None),
]


def listed(*calls: tuple[str, Any]) -> str:
    inner = (f'{{"name": "{name}", "arguments": {dumps(arguments)}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{', '.join(inner)}]"


def named(*calls: tuple[str, Any]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in calls)


def v3(*calls: tuple[str, Any]) -> str:
    inner = (
        f"{CALL}function{SEP}{name}\n```json\n{dumps(arguments)}\n```{CALL_END}"
        for name, arguments in calls
    )
    return CALLS + "\n".join(inner) + CALLS_END


def v31(*calls: tuple[str, Any]) -> str:
    inner = (f"{CALL}{name}{SEP}{dumps(arguments)}{CALL_END}" for name, arguments in calls)
    return CALLS + "".join(inner) + CALLS_END


Case = tuple[str, Callable[..., str], tuple[str, ...]]
CASES: list[Case] = [
    ("mistral", listed, MISTRAL[:1]),
    ("mistral", named, MISTRAL),
    ("deepseek_v3", v3, DEEPSEEK),
    ("deepseek_v31", v31, DEEPSEEK),
]
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case[1].__name__)


def of(name: str, tools: list[Tool] | None = None) -> Callable[[], Parser]:
    return lambda: make_parser(name, None, tools=tools or ())


def read(*calls: tuple[str, Any]) -> list[tuple[str, str]]:
    return [(name, dumps(arguments)) for name, arguments in calls]


@each
@pytest.mark.parametrize("lead", ["", "Wait."])
def test_template_output_is_parsed_back(case: Case, lead: str):
    name, write, _ = case
    for calls in ((ROME,), (OSLO, ROME), (ROME, ROME, OSLO)):
        result = check_cuts(of(name), lead + write(*calls), [3, 30, 31, 70])
        assert result == ("", lead, read(*calls))


@each
def test_truncated_call_is_no_call(case: Case):
    name, write, _ = case
    text = write(ROME)
    arguments = dumps(ROME[1])
    begin = text.index(arguments)
    for count in range(1, len(arguments)):
        half = text[: begin + count]
        assert parse(of(name)(), [half]) == ("", half, [])
        assert parse(of(name)(), [half], cut=True) == ("", "", [])
        streamed = parse(make_parser(name, None, forced=True), [half])
        assert streamed == ("", "", [(ROME[0], arguments[:count])])


@each
@pytest.mark.parametrize("arguments", ["{'a': 1}", '{"a": 1,}', '{"a": "\\d"}', '{"a": "b "c""}'])
def test_call_with_wrong_json_is_content(case: Case, arguments: str):
    name, write, _ = case
    text = write(("f", {})).replace("{}", arguments)
    assert check_cuts(of(name), text).calls == []
    assert arguments in check_cuts(of(name), text).content


@each
def test_raw_line_break_in_a_string_is_accepted(case: Case):
    name, write, _ = case
    text = write(("f", {"a": "b c"})).replace("b c", "b\nc\t")
    assert check_cuts(of(name), text) == ("", "", [("f", '{"a": "b\\nc\\t"}')])


@each
def test_call_of_unknown_tool_is_content(case: Case):
    name, write, _ = case
    result = check_cuts(of(name, [Tool("other")]), write(ROME))
    assert result.calls == []
    assert dumps(ROME[1]) in result.content


@each
def test_arguments_of_a_forced_call_are_streamed(case: Case):
    name, write, _ = case
    text = write(("f", {"a": 1}))
    place = text.index('{"a')
    pieces = [text[: place + 2], text[place + 2 : place + 5], text[place + 5 :]]
    parts = stream(lambda: make_parser(name, None, forced=True), pieces)
    assert [part.calls for part in parts] == [[("f", '{"')], [("", 'a":')], [("", " 1}")], []]


@each
@given(st.data())
def test_result_does_not_depend_on_chunking(case: Case, data: st.DataObject):
    name, write, marks = case
    fragments = (write(ROME), *marks, "[ARGS]", "f", '{"a": ', "1}", "}", "]", ", ", "```json", "x")
    text = data.draw(texts(fragments))
    check_cuts(of(name), text, data.draw(places))


@each
def test_non_call_is_unchanged_content(case: Case):
    name, _, marks = case
    for text in (marks[0], marks[0][:5], f"{marks[0]} f", f"{marks[0]} is a token, {{}} none"):
        assert check_cuts(of(name), text) == ("", text, [])


@pytest.fixture(scope="module")
def words() -> dict[str, Vocabulary]:
    return {write.__name__: vocabulary(*marks) for _, write, marks in CASES}


@each
def test_forced_calls_follow_format_and_schema(case: Case, words: dict[str, Vocabulary]):
    name, write, _ = case
    own = words[write.__name__]
    single, several = own.matcher(name, TOOLS), own.matcher(name, TOOLS, parallel=True)
    assert own.accepts(single, write(ROME))
    assert own.accepts(single, write(OSLO))
    assert not own.accepts(single, write(ROME, OSLO))
    assert own.accepts(several, write(ROME, OSLO))
    bad = [("get_time", {}), ("get_time", {"city": 1}), ("get_time", {"city": "x" * 10}), ("f", {})]
    for wrong in ("Hi", write(ROME)[:-3], *map(write, bad)):
        assert not own.accepts(single, wrong), wrong
    with pytest.raises(ValueError, match="parameters of the function 'f'"):
        own.matcher(name, [Tool("f", {"type": "string"})])


def test_old_and_new_mistral_call_variants():
    expected = read(("f", {"a": 1}))
    for text in (
        '[TOOL_CALLS]f{"a": 1}',
        '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}',
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]',
        '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}',
    ):
        assert check_cuts(of("mistral"), text) == ("", "", expected), text


def test_thinking_precedes_calls():
    result = check_cuts(lambda: make_parser("mistral", "mistral"), "[THINK]Hm.[/THINK]Yes.")
    assert result == ("Hm.", "Yes.", [])
    result = check_cuts(
        lambda: make_parser("deepseek_v3", "deepseek_r1", thinking_open=True),
        f"Hm.\n</think>\n\n{v3(ROME)}",
    )
    assert result == ("Hm.", "", read(ROME))
