"""An answer's segments in order, and the tokens attributed to each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strobe.outputs import CompletionOutput, StreamDelta
from strobe.request import TokenLogprob
from strobe.server.openai.segments import OrderedParser, Segment, TokenAttribution
from strobe.server.parsers import make_parser
from tests.server.support.parser_runs import cut, parse, places, texts

HERMES = '<tool_call>\n{"name": "f", "arguments": {"a": {}}}\n</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": {}}}'
HARMONY = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": {}}<|call|>'
TURN = "<|start|>assistant"
FORMATS = {
    ("hermes", "qwen3"): (HERMES, "<think>", "</think>", "<tool_call>", "one {two}", "\n\n"),
    ("llama3", None): (LLAMA, "<|python_tag|>", "; ", "one {two}", "\n"),
    ("gpt_oss", "gpt_oss"): (
        HARMONY, f"{TURN}<|channel|>analysis<|message|>Hm.<|end|>", TURN, "one {two}",
        "<|channel|>final<|message|>Yes.<|return|>", "<|message|>", "<|channel|>final", "\n",
    ),
}  # fmt: skip


def ordered(formats: tuple[str, str | None], pieces: Iterable[str]) -> list[Segment]:
    """Return the segments of a text in pieces, with consecutive segments of one kind joined."""
    parser = OrderedParser(make_parser(*formats))
    segments: list[Segment] = []
    for piece in pieces:
        parser.push(piece)
        segments += parser.take()
    parser.finish()
    joined: list[Segment] = []
    for segment in segments + parser.take():
        last = joined[-1] if joined else None
        if last is not None and (last.kind, last.call) == (segment.kind, segment.call):
            assert segment.name is None
            joined[-1] = last._replace(text=last.text + segment.text, end=segment.end)
        else:
            joined.append(segment)
    return joined


def reported(segments: Iterable[Segment]) -> list[tuple[str, str]]:
    return [(segment.kind, segment.text) for segment in segments]


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats[0])
@given(data=st.data(), cuts=places)
def test_order_does_not_depend_on_chunking(
    formats: tuple[str, str | None], data: st.DataObject, cuts: list[int]
):
    text = data.draw(texts(FORMATS[formats]))
    whole = ordered(formats, [text])
    assert reported(ordered(formats, text)) == reported(whole)
    assert reported(ordered(formats, cut(text, cuts))) == reported(whole)
    pieces = cut(text, cuts)
    assert parse(OrderedParser(make_parser(*formats)), pieces) == parse(
        make_parser(*formats), pieces
    )


@pytest.mark.parametrize("formats", FORMATS, ids=lambda formats: formats[0])
@given(data=st.data(), cuts=places)
def test_segments_are_in_text_order(
    formats: tuple[str, str | None], data: st.DataObject, cuts: list[int]
):
    text = data.draw(texts(FORMATS[formats]))
    end = 0
    for segment in ordered(formats, cut(text, cuts)):
        assert end <= segment.start <= segment.end <= len(text)
        end = segment.end


pieces_of_text = st.text(st.sampled_from("ab{}>\n é"), min_size=1, max_size=12)


@given(pieces_of_text, st.lists(pieces_of_text, max_size=3), places)
def test_segment_position_matches_raw_text(thought: str, parts: list[str], cuts: list[int]):
    text = f"<think>\n{thought}\n</think>\n\n" + f"\n{HERMES}\n".join(parts)
    parser = OrderedParser(make_parser("hermes", "qwen3"))
    segments: list[Segment] = []
    for piece in cut(text, cuts):
        parser.push(piece)
        segments += parser.take()
    parser.finish()
    for segment in segments + parser.take():
        assert text[segment.start : segment.end] == segment.text
        inside = segment.start < text.index("</think>")
        assert inside == (segment.kind == "reasoning")


def test_text_around_calls_keeps_its_position():
    text = f"<think>\nHm.\n</think>\n\nFirst.\n{HERMES}\nThen {{}}.\n{HERMES}"
    segments = ordered(("hermes", "qwen3"), [text])
    call = ("call", '{"a": {}}')
    assert reported(segments) == [
        ("reasoning", "Hm."), ("content", "First."), call, ("content", "\nThen {}."), call
    ]  # fmt: skip
    assert [(segment.call, segment.name) for segment in segments if segment.kind == "call"] == [
        (0, "f"),
        (1, "f"),
    ]


def delta(pieces: Sequence[str], first: int = 0) -> StreamDelta:
    """A step whose tokens' logprobs number them."""
    logprobs = [TokenLogprob(first + i, -1.0, 1, ()) for i in range(len(pieces))]
    ids = [entry.token for entry in logprobs]
    output = CompletionOutput(0)
    return StreamDelta("r", 0, "".join(pieces), ids, output, pieces=list(pieces), logprobs=logprobs)


def numbers(origins: TokenAttribution, segment: Segment) -> list[int]:
    return [entry.token for entry in origins.tokens_of(segment) if entry is not None]


def test_each_token_is_attributed_to_its_text():
    steps = [
        ["<think>", "\n", "H", "m"], [".", "\n", "</think>", "\n\n", "Fir"],
        ["", "", "é", " ", "<tool", "_call>\n"],
        ['{"name": "f", "arguments": {', '"a": {', "}", "}}\n</tool_call>", "", "x<", "b", ""],
    ]  # fmt: skip
    starts = [0, *accumulate(map(len, steps))]
    origins, parser = TokenAttribution(), OrderedParser(make_parser("hermes", "qwen3"))
    attributed: list[tuple[str, list[int]]] = []
    for first, pieces in zip(starts, steps, strict=False):
        origins.add(delta(pieces, first))
        parser.push("".join(pieces))
        attributed += [(segment.kind, numbers(origins, segment)) for segment in parser.take()]
    assert attributed == [
        ("reasoning", [2, 3]), ("reasoning", [4]), ("content", [8]), ("content", [9, 10, 11]),
        ("call", [15, 16, 17, 18]), ("content", [19, 20, 21]),
    ]  # fmt: skip


def test_token_across_two_segments_counts_once_per_kind():
    origins = TokenAttribution()
    origins.add(delta(["ab</think>cd", "e"]))
    assert numbers(origins, Segment("reasoning", "a", 0, 1)) == [0]
    assert numbers(origins, Segment("reasoning", "b", 1, 2)) == []
    assert numbers(origins, Segment("content", "c", 10, 11)) == [0]
    assert numbers(origins, Segment("content", "de", 11, 13)) == [1]
