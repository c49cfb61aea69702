"""The tokens attributed to each segment of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest

from strobe.outputs import CompletionOutput, StreamDelta
from strobe.request import TokenLogprob
from strobe.server.generation.token_attribution import TokenAttribution
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Segment


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
    origins = TokenAttribution()
    parser = make_parser("hermes", "qwen3")
    attributed: list[tuple[str, list[int]]] = []
    for first, pieces in zip(starts, steps, strict=False):
        origins.add(delta(pieces, first))
        for segment in parser.push("".join(pieces)):
            attributed.append((segment.kind, numbers(origins, segment)))
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


@pytest.mark.parametrize(
    ("formats", "pieces", "attributed"),
    [
        (
            ("gemma4", None),
            ["<|tool_call>", "call:f", "{a:", '<|"|>', "x", '<|"|>', "}", "<tool_call|>"],
            [2, 3, 4, 5, 6],
        ),
        (
            ("hermes", None),
            ["<tool_call>", '{"name": "f", "arguments": ', '"{', "}", '"', "}", "</tool_call>"],
            [2, 3, 4],
        ),
        (
            ("qwen3_coder", None),
            ["<tool_call><function=f>", "<parameter=a>", "1", "</parameter>", "</function>"],
            [1, 2, 3, 4],
        ),
    ],
)
def test_rewritten_arguments_are_attributed_to_their_tokens(
    formats: tuple[str, str | None], pieces: list[str], attributed: list[int]
):
    parser = make_parser(*formats)
    origins = TokenAttribution()
    origins.add(delta(pieces))
    segments = [*parser.push("".join(pieces)), *parser.finish()]
    assert [token for segment in segments for token in numbers(origins, segment)] == attributed
