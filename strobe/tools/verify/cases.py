"""The requests of a verification: their prompts, waves and sampling."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from strobe.demo_models import read_heldout
from strobe.sampling_params import SamplingParams
from strobe.text.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0)

CHATS = (
    ("English", "Explain in three sentences why the sky is blue."),
    ("German", "Schreibe eine kurze E-Mail, in der du einen Termin am Freitag absagst."),
    ("Spanish", "Describe en pocas frases una mañana de mercado en un pueblo."),
    ("Chinese", "请用三句话介绍一下你喜欢的季节。"),
    ("Arabic", "اكتب فقرة قصيرة عن فائدة القراءة اليومية."),
    ("Russian", "Расскажи коротко, как приготовить омлет из трёх яиц."),
    ("code", "Write a Python function that returns the n-th Fibonacci number, with a docstring."),
    ("list", "Repeat this list in reverse order: red, green, blue, white, black, grey."),
)
"""Prompts of several languages and tasks, with their kinds."""

THINKING = "A train leaves at 9:40 and needs 2 hours and 35 minutes. When does it arrive?"
TOOL_QUESTION = "What is the weather in Oslo tomorrow?"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Return the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "day": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
SHARED = (
    "You are the assistant of a small library. It is open from nine to five, on Saturdays until "
    "noon, and closed on Sundays. Books are lent for three weeks and films for one. A reader may "
    "have ten items at a time. A lost card costs five euros. Answer in one sentence.\n\n"
)
"""The shared prefix of several prompts."""
QUESTIONS = (
    "How long may I keep a film?",
    "When do you open on Saturday?",
    "I lost my card. What now?",
    "How many books may I borrow?",
)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
STRUCTURES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("JSON schema", {"json": PERSON}),
    ("regular expression", {"regex": "(yes|no|maybe): [a-z ]{10,40}"}),
    ("choice", {"choice": ["red", "green", "blue"]}),
)
SAMPLED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("temperature 1", {"temperature": 1.0}),
    ("top-p 0.8", {"temperature": 1.5, "top_p": 0.8}),
    ("top-p 0.6", {"temperature": 3.0, "top_p": 0.6}),
    ("top-k 20", {"temperature": 2.0, "top_k": 20}),
    ("min-p 0.05", {"temperature": 2.0, "min_p": 0.05}),
    ("all filters", {"temperature": 2.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    ("penalties", {"temperature": 1.0, "presence_penalty": 0.5, "frequency_penalty": 0.3}),
    ("repetition", {"temperature": 1.5, "repetition_penalty": 1.2, "top_p": 0.95}),
)
"""Settings of sampled requests. Where a model is certain, only high temperatures reach the edges of
the filters."""
SAMPLED_WAVE = "sampled"
"""Names of waves of sampled requests begin with it."""
LONG_TOKENS = 700
"""Tokens of the long prompt, if the context has room for it."""


@dataclass(frozen=True)
class Case:
    """One request. kind: what it is an example of."""

    kind: str
    prompt: tuple[int, ...]
    sampling: SamplingParams

    @property
    def is_greedy(self) -> bool:
        return self.sampling.temperature == 0.0

    @property
    def is_constrained(self) -> bool:
        return self.sampling.structured_outputs is not None


@dataclass(frozen=True)
class Wave:
    """Requests that run at once. Waves run one after the other on one engine, so a later one may
    find its prefixes cached. cold: name of the wave that ran this wave's requests first."""

    name: str
    cases: tuple[Case, ...]
    cold: str | None = None


@dataclass(frozen=True)
class Suite:
    """All waves, and why some built-in requests were left out. chats: the plain chats, for the
    comparison with other engines and the measurements."""

    waves: tuple[Wave, ...]
    chats: tuple[Case, ...]
    left_out: list[str] = field(default_factory=list[str])


@dataclass
class SuiteBuilder:
    """Makes the requests of a checkpoint. demo: the demo models, which know only their tasks;
    grammars: whether it can be constrained; texts: the user's prompts."""

    tokenizer: Tokenizer
    max_tokens: int
    max_model_len: int
    seed: int = 0
    page_size: int = 16
    demo: bool = False
    grammars: bool = True
    texts: Sequence[str] = ()
    left_out: list[str] = field(default_factory=list[str])

    def suite(self) -> Suite:
        """Return the waves: alone, at once, shared prefixes, prompts that cross them, the same from
        the cache, long, structured and sampled. Prefixes are repeated after crossed ones, when the
        cache holds others that it could confuse them with."""
        chats = self._chats()
        prefixed = self._prefixed()
        waves = [
            *[Wave(f"alone {i}", (case,)) for i, case in enumerate(chats[:2])],
            Wave("batch", chats),
            Wave("prefix", prefixed),
            Wave("crossed prefixes", self._crossed(chats, prefixed)),
            Wave("prefix again", prefixed, cold="prefix"),
            Wave("long", self._long()),
            Wave("structured", self._structured(chats)),
            Wave("cached", chats, cold="batch"),
            self.sampled_wave(chats, 0),
        ]
        return Suite(tuple(w for w in waves if w.cases), chats, self.left_out)

    def sampled_wave(self, chats: Sequence[Case], number: int, size: int = len(SAMPLED)) -> Wave:
        """Return a wave of sampled requests, every setting in turn, with seeds of its own."""
        cases: list[Case] = []
        for i in range(size):
            place = number * size + i
            kind, fields = SAMPLED[place % len(SAMPLED)]
            chat = chats[place % len(chats)]
            params = chat.sampling.clone(**fields, seed=self.seed + place)
            cases.append(Case(f"{kind}, {chat.kind}", chat.prompt, params))
        return Wave(f"{SAMPLED_WAVE} {number}", tuple(cases))

    def _case(self, kind: str, prompt: Sequence[int]) -> Iterator[Case]:
        room = self.max_model_len - len(prompt) - 1
        if room < 1:
            self.left_out.append(f"{kind}: its {len(prompt)} tokens do not fit the context")
            return
        params = GREEDY.clone(max_tokens=min(self.max_tokens, room))
        yield Case(kind, tuple(prompt), params)

    def _chats(self) -> tuple[Case, ...]:
        cases: list[Case] = []
        if self.texts:
            for i, text in enumerate(self.texts):
                cases += self._case(f"prompt {i + 1}", self._render(text))
        elif self.demo:
            for example in read_heldout(12):
                prompt = self.tokenizer.render_chat(
                    example.messages, tools=example.tools or None, enable_thinking=example.thinking
                )
                thinking = ", thinking" if example.thinking else ""
                cases += self._case(f"{example.family}{thinking}", prompt)
        else:
            for kind, text in CHATS:
                cases += self._case(kind, self._render(text))
            cases += self._thinking_and_tools()
        if not cases:
            raise ValueError(
                f"No prompt fits max_model_len {self.max_model_len}; raise it, or give shorter "
                "prompts."
            )
        return tuple(cases)

    def _thinking_and_tools(self) -> Iterator[Case]:
        template = self.tokenizer.hf.chat_template or ""
        if "enable_thinking" in template:
            yield from self._case("thinking", self._render(THINKING, enable_thinking=True))
        else:
            self.left_out.append("thinking: the chat template has no such switch")
        if "tools" in template:
            yield from self._case("tools", self._render(TOOL_QUESTION, tools=TOOLS))
        else:
            self.left_out.append("tools: the chat template has no place for them")

    def _prefixed(self) -> tuple[Case, ...]:
        cases: list[Case] = []
        for question in QUESTIONS:
            cases += self._case("shared prefix", self._render(SHARED + question))
        return tuple(cases)

    def _crossed(self, chats: Sequence[Case], prefixed: Sequence[Case]) -> tuple[Case, ...]:
        """Return prompts whose first pages are a chat's and whose next ones a cached prompt's: each
        page is in the cache, but not after those pages."""
        cases: list[Case] = []
        for chat, other in zip(chats, prefixed, strict=False):
            pages = min(len(chat.prompt) // self.page_size, 2)
            start = pages * self.page_size
            if pages and len(other.prompt) > start + self.page_size:
                prompt = (*chat.prompt[:start], *other.prompt[start:])
                cases += self._case("crossed prefixes", prompt)
        if not cases:
            self.left_out.append(
                f"crossed prefixes: the prompts are shorter than pages of {self.page_size} tokens"
            )
        return tuple(cases[:3])

    def _long(self) -> tuple[Case, ...]:
        lines = [
            f"Item {i}: the price of article {7 * i + 3} is {13 * i % 97}." for i in range(200)
        ]
        ids = self._render("\n".join(lines) + "\nName the price of article 24.")
        size = min(LONG_TOKENS, self.max_model_len - self.max_tokens - 1)
        if size < 64:
            self.left_out.append("long context: the context is shorter than 64 tokens")
            return ()
        return tuple(self._case("long context", [*ids[: size // 2], *ids[-(size - size // 2) :]]))

    def _structured(self, chats: Sequence[Case]) -> tuple[Case, ...]:
        if not self.grammars:
            self.left_out.append("structured output: the checkpoint has no tokenizer.json")
            return ()
        cases: list[Case] = []
        for i, (kind, form) in enumerate(STRUCTURES):
            chat = chats[i % len(chats)]
            for temperature in (0.0, 1.0):
                params = chat.sampling.clone(
                    structured_outputs=form, temperature=temperature, seed=self.seed + i
                )
                cases.append(Case(kind, chat.prompt, params))
        return tuple(cases)

    def _render(self, text: str, **options: Any) -> list[int]:
        if not self.tokenizer.hf.chat_template:
            return self.tokenizer.encode(text)
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": text}]
        return self.tokenizer.render_chat(messages, **options)


def read_prompts(path: Path) -> list[str]:
    """Read one prompt a line: JSON strings, or plain text. Raises ValueError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The prompts cannot be read from {path}: {error}") from None
    texts = [_parse_line(line) for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"{path} has no prompt; write one a line.")
    return texts


def _parse_line(line: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return line
    return value if isinstance(value, str) else line
