"""Grammars in llguidance's form, and matchers built from them. Imports neither numpy nor torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from strobe.grammars.json_depth import json_depth
from strobe.grammars.json_schema import enforceable, with_whitespace
from strobe.grammars.lark_text import rewrite_lark, schemas_in
from strobe.grammars.regex import ascii_classes

if TYPE_CHECKING:
    from strobe.sampling_params import StructuredOutputs

_MAX_CHARACTERS = 1 << 17
_MAX_DEPTH = 124
"""Maximum depth of a schema: llguidance reads up to three levels more, which wrap it."""
STACK_BYTES = 1 << 28
"""llguidance recurses through nested rules; a few thousand of them would overflow the usual stack
of 8 MiB and end the process."""

_MAX_WORK = 50_000
_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000, step_lexer_fuel=_MAX_WORK, max_items_in_row=_MAX_WORK
)
"""Limits of llguidance's work on a mask: some 0.1 s for the first token, less for later ones."""

_MESSAGES = {
    "NoExtensionBias": "the model's tokens can write nothing that it allows",
    "lexer error: too many expressions": "it takes more work at a token than the limit, "
    f"{_MAX_WORK:,} expressions; shorten what repeats, such as x{{1000}}",
}

_UNFORCED = {
    "name": "unforced",
    "lark_grammar": '%llguidance {"no_forcing": true}\nstart: "a"',
}
"""An unused grammar whose option applies to all grammars of a source. Without it llguidance appends
forced bytes one by one, past all its limits: after the first letter of /a+/ it never stops, since
every further "a" is part of the expression."""

_QUOTED = re.compile(r"\n *\d+ \| ")
"""Where llguidance's message begins to quote the grammar's lines. The client has written few of
them."""


class GrammarError(ValueError):
    """A grammar does not compile; the message says why."""

    def __init__(self, reason: str):
        super().__init__(f"structured_outputs: the grammar does not compile: {one_line(reason)}")


def check_length(text: str) -> None:
    """Raise ValueError if a grammar is too long to compile in time."""
    if len(text) > _MAX_CHARACTERS:
        raise ValueError(
            f"structured_outputs holds {len(text)} characters, but at most {_MAX_CHARACTERS} are "
            "compiled; shorten it."
        )


def grammar_source(structured: StructuredOutputs) -> str:
    """Return the grammar in llguidance's form. Raises ValueError for an invalid schema or regular
    expression."""
    answer = _part(structured)
    parts = [{**answer, "name": "answer"}]
    limits_thinking = structured.max_thinking is not None
    if structured.prefix or structured.alternative is not None or limits_thinking:
        prefix = f"({json.dumps(structured.prefix)})? " if structured.prefix else ""
        if limits_thinking:
            prefix = f"{_limited_thinking(structured)} {prefix}"
        alternative = "" if structured.alternative is None else " | @alternative"
        parts.insert(0, {"lark_grammar": f"start: {prefix}(@answer{alternative})"})
    if structured.alternative is not None:
        alternative = rewrite_lark(structured.alternative, _enforced)
        parts.append({"name": "alternative", "lark_grammar": alternative})
    if is_unforced(structured) or _has_own_options(structured.json):
        parts.append(_UNFORCED)
    return json.dumps({"grammars": parts})


def is_unforced(structured: StructuredOutputs) -> bool:
    """Whether llguidance must not search for forced tokens: see _UNFORCED; nor can it take back
    forced tokens that follow tokens named by id."""
    limits_thinking = structured.max_thinking is not None
    return structured.grammar is not None or structured.alternative is not None or limits_thinking


def free_thinking(structured: StructuredOutputs) -> tuple[tuple[int, ...], int | None]:
    """Return the token ids that end thinking, and the token that starts it, if the grammar does not
    cover the thinking itself."""
    if structured.max_thinking is not None:
        return (), None
    return tuple(structured.think_end), structured.think_start


def _limited_thinking(structured: StructuredOutputs) -> str:
    """Return a rule for thinking of limited length, with its end. Raises ValueError."""
    limit = structured.max_thinking
    if not structured.think_end:
        raise ValueError(
            f"structured_outputs.max_thinking is {limit}, but nothing in think_end ends what it "
            "limits; give both or none."
        )
    end = " ".join(f"<[{token}]>" for token in structured.think_end)
    # The first token of the end occurs nowhere else, so that it alone marks the end.
    tokens = f"<[^{structured.think_end[0]}]>{{0,{limit}}} " if limit else ""
    think_start = structured.think_start
    return f"{tokens}{end}" if think_start is None else f"(<[{think_start}]> {tokens}{end})?"


def make_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Build a matcher; call it on a thread with STACK_BYTES of stack."""
    return LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)


def after_trial(matcher: LLMatcher) -> LLMatcher:
    """Return the matcher, or a copy that failed within two tokens: grammars that exceed the limits
    fail there."""
    trial = matcher.deep_copy()
    for _ in range(2):
        mask = trial.compute_bitmask()
        word = next((i for i, bits in enumerate(mask) if bits), None)
        if word is not None and not trial.is_error() and not trial.is_stopped():
            trial.try_consume_tokens([8 * word + (mask[word] & -mask[word]).bit_length() - 1])
    return trial if trial.is_error() else matcher


def unfollowed(matcher: LLMatcher) -> str:
    """Return the sentence for a matcher that failed within an answer."""
    reason = one_line(matcher.get_error())
    return f"structured_outputs: the grammar cannot be followed further: {reason}"


def one_line(text: str) -> str:
    """Shorten llguidance's message to one line, without the whole grammar and the state that it may
    quote."""
    reason = _QUOTED.split(text.partition("<state>")[0])[0]
    line = " ".join(reason.split()).rstrip(".")
    for marker, message in _MESSAGES.items():
        line = message if line.startswith(marker) else line
    return f"{line}." if len(line) <= 300 else f"{line[:300]}..."


def unenforced(structured: StructuredOutputs) -> list[str]:
    """Return the names of the schemas' keywords that are not enforced. Raises ValueError as
    `grammar_source` does."""
    schemas = [] if structured.json is None else [_parsed(structured.json)]
    for text in (structured.grammar, structured.alternative):
        schemas += [] if text is None else schemas_in(text)
    return list(dict.fromkeys(name for schema in schemas for name in enforceable(schema).dropped))


def _part(structured: StructuredOutputs) -> dict[str, Any]:
    if structured.json is not None:
        return {"json_schema": _enforced(_parsed(structured.json))}
    if structured.json_object:
        return {"json_schema": _enforced({"type": "object"})}
    if structured.regex is not None:
        return {"lark_grammar": lark("regex", structured.regex)}
    if structured.choice is not None:
        # One terminal: as alternatives of a rule, thousands of texts take long at each token.
        texts = " | ".join(map(json.dumps, structured.choice))
        return {"lark_grammar": f"start: CHOICE\nCHOICE: {texts}"}
    return {"lark_grammar": lark("grammar", structured.grammar or "")}


def lark(kind: str, text: str) -> str:
    """Return a "regex", or a "grammar" in Lark or EBNF, as a Lark grammar."""
    if kind == "grammar":
        return rewrite_lark(grammar_from("grammar", text), _enforced)
    source = LLMatcher.grammar_from_regex(ascii_classes(text))
    return json.loads(source)["grammars"][0]["lark_grammar"]


def _enforced(schema: object) -> Any:
    """Return a schema as llguidance enforces it, with the whitespace that it may have. Raises
    ValueError for one that is nested too deeply."""
    if not isinstance(schema, Mapping):
        return schema
    enforced = enforceable(schema).schema
    _check_depth(json.dumps(enforced))
    return with_whitespace(enforced) if isinstance(enforced, Mapping) else enforced


def _parsed(schema: object) -> Any:
    """Return a schema that may be a JSON text. Raises ValueError."""
    _check_depth(schema if isinstance(schema, str) else json.dumps(schema))
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except ValueError as error:
        raise ValueError(f"the JSON schema is no JSON ({error})") from None


def _check_depth(text: str) -> None:
    levels = json_depth(text)
    if levels > _MAX_DEPTH:
        raise ValueError(
            f"the JSON schema is nested too deeply: {levels} levels, at most {_MAX_DEPTH} are "
            "read; define parts of it under $defs"
        )


def _has_own_options(schema: object) -> bool:
    """Whether a schema has options for llguidance, such as whitespace without end."""
    if isinstance(schema, str):
        return '"x-guidance"' in schema
    return isinstance(schema, Mapping) and "x-guidance" in schema
