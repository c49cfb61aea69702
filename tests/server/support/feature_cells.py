"""The cells of the matrix: features of requests, each with a check of its answers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from scripts.demo_models.tasks import Example, heldout
from strobe.config import DEMO_MODELS
from tests.server.support.answer_checks import (
    Check,
    answers,
    anything,
    begins,
    calls,
    each,
    ends,
    hides,
    is_json,
    lacks,
    matches,
    named,
    prompt_scored,
    scored,
    stops_at,
    thinks,
    thinks_up_to,
    without_calls,
)
from tests.server.support.outcomes import AnswerResult

TOKENIZER = Tokenizer.from_file(str(DEMO_MODELS / "target" / "tokenizer.json"))
_TASKS = {(e.family, i % 24): e for i, e in enumerate(heldout(24, seed=5, thinking=False))}

LIST = _TASKS["lists", 12]  # "The list is ..., I put the words ..., Answer: ...", 30 tokens
SUM = _TASKS["arithmetic", 10]  # two lines "Step 1: ... coins.", and "Answer: 2", 44 tokens
DATE = _TASKS["dates", 10]
RECORD = _TASKS["json", 16]  # breakfast, city and guest
CALL = _TASKS["tool", 1]  # a timer; there are check_stock and book_table as well
ODDITY = replace(LIST, messages=({"role": "user", "content": "zzz 17 , 4 horse"},))
WORDS = "rocket paper horse"
"""Words unlike the training data: the models are uncertain, so samples differ and drafts fail."""


@dataclass(frozen=True)
class Cell:
    """One feature on one endpoint.

    fields: of the request; check: applied to its answers; unlike: a cell whose answers must differ,
    which shows that the field has an effect; siblings: several answers to one prompt; streams:
    whether it may be streamed; drafts: whether it has steps that can verify drafts; accepts: the
    minimum acceptance length of DFlash at temperature 0, slightly below the measured one.
    """

    name: str
    task: Example
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    check: Check = anything
    unlike: str | None = None
    siblings: bool = False
    chat: bool = True
    streams: bool = True
    drafts: bool = True
    accepts: float = 8.0
    thinking: bool = False
    tokens: int = 48

    @property
    def id(self) -> str:
        return f"{'chat' if self.chat else 'text'}-{self.name}"

    def body(self) -> dict[str, Any]:
        """The request without temperature, speculation and stream."""
        common: dict[str, Any] = {"return_token_ids": True, "include_speculation": True, "seed": 7}
        common |= {"max_tokens": self.tokens, "top_p": 1.0, "top_k": -1}
        if self.chat:
            tools = {"tools": list(self.task.tools)} if self.task.tools else {}
            common |= {"messages": list(self.task.messages), **tools}
            common["chat_template_kwargs"] = {"enable_thinking": self.thinking}
        else:
            common["prompt"] = prompt_of(self.task)
        return common | self.fields


def prompt_of(task: Example) -> str:
    """Render a task of one message as a prompt without thinking."""
    (message,) = task.messages
    user = f"<|im_start|>user\n{message['content']}<|im_end|>\n"
    return user + "<|im_start|>assistant\n<think>\n\n</think>\n\n"


def strict_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 12}
USUAL = strict_object(breakfast={"type": "boolean"}, city=WORD, guest=WORD)
"""The schema of the model's own output."""
OTHER = strict_object(guest=WORD, city=WORD)
"""A different order and fewer fields."""
ODD = strict_object(tags={"type": "array", "items": {"enum": ["hotel", 7]}, "maxItems": 2})
"""A schema that the model's own output never follows."""
STEPS = r"(Step [1-9]: [A-Za-z0-9 *+=,.-]{1,50}\n){2}Answer: \d{1,4}"
GRAMMAR = r"""
start: step step "Answer: " /[0-9]{1,4}/
step: "Step " /[1-9]/ ": " /[A-Za-z0-9 *+=,.-]{1,50}/ "\n"
"""
CHOICE = [
    "The list is paper, pear, rocket, horse.",
    "The list is paper, pear, tiger.",
    "There is no list.",
]


TAGS = {
    "type": "structural_tag",
    "triggers": ["The list is"],
    "structures": [{
        "begin": "The list is",
        "schema": strict_object(a={"type": "integer", "maximum": 99, "minimum": 0}),
        "end": "; ",
    }],
}  # fmt: skip
OPEN = "<|im_start|>user\nWhat day is it?<|im_end|>\n<|im_start|>assistant\n<think>\n"
"""A prompt within the reasoning."""
THINK_END = TOKENIZER.token_to_id("</think>")


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    inner = {"name": "record", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": inner}


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def cells() -> list[Cell]:
    """All cells."""
    shared = [cell for chat in (True, False) for make in (_plain, _logits) for cell in make(chat)]
    return [*shared, *_structures(), *_chats(), *_texts()]


def _plain(chat: bool) -> list[Cell]:
    """Features whose format differs between chats and completions."""
    top = {"logprobs": True, "top_logprobs": 3} if chat else {"logprobs": 3}
    (newline,) = ids_of("\n")
    last = f"{'chat' if chat else 'text'}-plain"

    def cell(name: str, fields: dict[str, Any], check: Check = anything, **own: Any) -> Cell:
        return Cell(name, own.pop("task", LIST), fields, check, chat=chat, **own)

    stop = {"stop": ["no such text", "rse.\nI", "Answer"]}
    return [
        cell("plain", {}),
        cell("logprobs", top, scored(3)),
        cell("logprob_token_ids",
             {"logprobs": True if chat else 0, "logprob_token_ids": ids_of(" horse, I")},
             named([" horse", ",", " I"])),
        cell("prompt_logprobs", {"prompt_logprobs": 2}, each(prompt_scored), streams=False),
        cell("stop", {"stop": " words"}, stops_at(" words"), unlike=last),
        cell("stops", {**stop, **top}, stops_at(*stop["stop"]), unlike=last),
        cell("stop_kept", {"stop": [","], "include_stop_str_in_output": True}, ends("stop", ","),
             unlike=last, accepts=5),
        cell("stop_token_ids", {"stop_token_ids": [newline]}, ends("stop", newline), unlike=last),
        cell("max_tokens_1", {}, ends("length", tokens=1), tokens=1, drafts=False),
        cell("max_tokens_2", {}, ends("length", tokens=2), tokens=2, accepts=2),
        cell("max_tokens_3", {}, ends("length", tokens=3), tokens=3, accepts=3),
        cell("n", {"n": 3, **({} if chat else {"prompt": WORDS})}, answers(3), task=ODDITY,
             siblings=True, tokens=12, accepts=1),
        cell("json_object", {"response_format": {"type": "json_object"}},
             is_json({"type": "object"}), task=RECORD),
        cell("json_schema", {"response_format": response_format(OTHER), **top}, is_json(OTHER),
             task=RECORD, accepts=1.5),
        cell("min_tokens", {"min_tokens": 36}, unlike=last, tokens=40, accepts=2.5),
        cell("ignore_eos", {"skip_special_tokens": False, "ignore_eos": True},
             ends("length", tokens=40), unlike=last, tokens=40),
    ]  # fmt: skip


def _logits(chat: bool) -> list[Cell]:
    """Features that change logits or sampling. Chats use a task that the models know; completions
    use WORDS, where the models are so uncertain that each feature changes the answer."""
    (newline,) = ids_of("\n")
    first = ids_of(" boxes" if not chat else LIST.answer)[0]
    allowed = [
        t
        for t in range(5, 2048)
        if TOKENIZER.decode([t], skip_special_tokens=False).isascii() and t != first
    ] + [2]
    bias = {str(first): -100, str(newline): 5.0, **{str(t): -1.5 for t in range(300, 400)}}

    def cell(
        name: str, fields: dict[str, Any], check: Check = anything, accepts: float | None = None
    ) -> Cell:
        """accepts: set if the feature changes the answer of the chat."""
        if not chat:
            own = {"prompt": WORDS, **fields}
            return Cell(name, LIST, own, check, "text-unsure", chat=False, tokens=12, accepts=1)
        if accepts is None:
            return Cell(name, LIST, fields, check, tokens=24)
        return Cell(name, LIST, fields, check, "chat-plain", accepts=accepts)

    def keeps_to(answer: AnswerResult) -> None:
        assert set(answer.token_ids) <= set(allowed)

    return [
        *([] if chat else [replace(cell("unsure", {}), unlike=None)]),
        cell("presence_penalty", {"presence_penalty": 2.0}),
        cell("frequency_penalty", {"frequency_penalty": 2.0}),
        cell("repetition_penalty", {"repetition_penalty": 1.8}, accepts=4),
        cell("penalties", {"presence_penalty": 0.7, "frequency_penalty": 0.6,
                           "repetition_penalty": 1.2}),
        cell("negative_penalties", {"frequency_penalty": -1.5, "presence_penalty": -1.0}),
        cell("logit_bias", {"logit_bias": bias}, accepts=1.8),
        cell("allowed_token_ids", {"allowed_token_ids": allowed}, each(keeps_to), 1.8),
        cell("bad_words", {"bad_words": ["list", " boxes", " horse"]},
             lacks("list", " boxes", " horse"), accepts=1),
        cell("top_k", {"top_k": 2}),
        cell("top_p", {"top_p": 0.8}),
        cell("min_p", {"min_p": 0.2}),
        cell("filters_penalties", {"top_k": 40, "top_p": 0.97, "min_p": 0.01,
                                   "repetition_penalty": 1.1, "logit_bias": {str(newline): -3}}),
    ]  # fmt: skip


def _structures() -> list[Cell]:
    """Structured output, alone and combined with other features."""
    usual, other_schema = {"structured_outputs": {"json": USUAL}}, {"guided_json": OTHER}
    penalties = {"frequency_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {"300": 3}}
    return [
        Cell("json", RECORD, usual, is_json(USUAL)),
        Cell("json_odd", RECORD, {"guided_json": ODD}, is_json(ODD), tokens=80, accepts=1),
        Cell("json_penalties", RECORD, {**other_schema, **penalties}, is_json(OTHER), accepts=1.5),
        Cell(
            "json_n",
            RECORD,
            {**other_schema, "n": 3, "stop": ["never"]},
            is_json(OTHER),
            accepts=1.5,
        ),
        Cell("regex", SUM, {"structured_outputs": {"regex": STEPS}}, matches(STEPS), tokens=99),
        Cell("choice", LIST, {"guided_choice": CHOICE}, matches("|".join(CHOICE))),
        Cell(
            "structural_tag",
            LIST,
            {"structured_outputs": {"structural_tag": TAGS}},
            matches(r'(?s:.*The list is\{.{0,9}"a":.{0,9}\d+.{0,9}\}; .*)'),
            "chat-plain",
            accepts=1,
        ),
        Cell("grammar", SUM, {"guided_grammar": GRAMMAR}, matches(STEPS), tokens=99),
    ]


def _chats() -> list[Cell]:
    """Features that only chats have."""
    named = {"tool_choice": {"type": "function", "function": {"name": "check_stock"}}}
    required, tools = {"tool_choice": "required"}, CALL.tools
    every = ("create_timer", "check_stock", "book_table")
    begun = (*SUM.messages, {"role": "assistant", "content": "Step 1: The plants cost"})
    goes_on = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    return [
        Cell("tool_auto", CALL, {"tool_choice": "auto"}, calls(tools, "create_timer")),
        Cell("tool_required", CALL, required, calls(tools, *every, max_calls=9), tokens=99),
        Cell("tool_named", CALL, named, calls(tools, "check_stock"), "chat-tool_auto", accepts=3),
        Cell("tool_none", CALL, {"tool_choice": "none"}, each(without_calls), accepts=3),
        Cell("tool_single", CALL, {**required, "parallel_tool_calls": False}, calls(tools, *every)),
        Cell("tool_logprobs", CALL, {**required, "n": 2, "logprobs": True},
             calls(tools, *every, max_calls=9), tokens=99),
        Cell("echo", replace(SUM, messages=begun), goes_on, begins("Step 1: The plants cost 7")),
        Cell("reasoning", DATE, {}, thinks(), thinking=True, tokens=99),
        Cell("reasoning_hidden", DATE, {"include_reasoning": False}, each(hides), thinking=True,
             unlike="chat-reasoning", tokens=99),
        Cell("reasoning_cut", DATE, {}, ends("length", tokens=20), thinking=True, tokens=20),
        Cell("reasoning_json", RECORD, {"response_format": response_format(OTHER)},
             thinks(is_json(OTHER)), thinking=True, tokens=160, accepts=4),
        Cell("reasoning_budget", DATE, {"thinking_token_budget": 6},
             thinks(thinks_up_to(6, THINK_END)), "chat-reasoning", thinking=True, tokens=99,
             accepts=3),
        Cell("reasoning_budget_json", RECORD,
             {"thinking_token_budget": 0, "response_format": response_format(OTHER)},
             thinks_up_to(0, THINK_END, is_json(OTHER)), "chat-reasoning_json", thinking=True,
             tokens=160, accepts=1.5),
        Cell("reasoning_call", CALL, named, thinks(calls(tools, "check_stock")), thinking=True,
             tokens=160, accepts=5),
    ]  # fmt: skip


def _texts() -> list[Cell]:
    """Features that only completions have."""
    both = [prompt_of(LIST), prompt_of(DATE)]
    ids = [ids_of(text) for text in both]
    echo = {"echo": True, "logprobs": 2}

    def cell(name: str, fields: dict[str, Any], check: Check = anything, **own: Any) -> Cell:
        return Cell(name, LIST, fields, check, chat=False, **own)

    return [
        cell("echo", {"echo": True}, begins("<|im_start|>user"), unlike="text-plain"),
        cell("echo_logprobs", {**echo, "n": 2}, scored(2, echoed=True)),
        cell("echo_alone", {**echo, "max_tokens": 0}, scored(2, echoed=True), drafts=False),
        cell("best_of", {"prompt": WORDS, "best_of": 3, "n": 2}, answers(2), streams=False,
             siblings=True, tokens=12, accepts=1),
        cell("regex", {"regex": r"The list is [a-z, ]{5,40}\."},
             matches(r"The list is [a-z, ]{5,40}\."), unlike="text-plain"),
        cell("reasoning_budget", {"prompt": OPEN, "thinking_token_budget": 4},
             thinks_up_to(4, THINK_END), unlike="text-plain", accepts=1),
        cell("prompts", {"prompt": both, "n": 2}, answers(4)),
        cell("token_ids", {"prompt": ids, "return_tokens_as_token_ids": True, "logprobs": 0}),
    ]  # fmt: skip
