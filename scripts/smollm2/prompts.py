"""Prompts from text at hand: Python's library, its documentation and Strobe's own, and templates.

    python scripts/smollm2/prompts.py TARGET prompts.npz

Each prompt is the user's turn of a chat. Kinds: "code", "rewriting", "lists", "arithmetic". The
target itself writes the prompts of kind "chat"; see `answers.py`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import itertools
import random
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parents[2]
KINDS = "chat", "code", "rewriting", "lists", "arithmetic"
SKIPPED = {"test", "tests", "idle_test", "lib2to3", "encodings", "site-packages", "dist-packages"}
"""Folders of the library that are left out."""
COUNTS = {"code": 24_000, "rewriting": 24_000, "lists": 6_000, "arithmetic": 4_000}
LONGEST = 200
"""Maximum tokens of a prompt, the system's turn included."""
HELDOUT = 50
"""One in this many prompts is held out."""

ABOUT_CODE = (
    "Explain what this Python function does.\n\n```python\n{}\n```",
    "What does this code do?\n\n```python\n{}\n```",
    "Write a docstring for this function:\n\n{}",
    "Write a unit test for this function:\n\n```python\n{}\n```",
    "Find possible bugs in this code:\n\n{}",
)
FROM_DOC = (
    "Write a Python function `{name}({args})`. {doc}",
    'Implement this function in Python:\n\ndef {name}({args}):\n    """{doc}"""',
    "Write a Python function that does the following: {doc}",
    "How would you write `{name}` in Python? It should do this: {doc}",
    "Write JavaScript code for this: {doc}",
)
REWRITE_CODE = (
    "Add type hints to this function:\n\n```python\n{}\n```",
    "Add comments to this code:\n\n```python\n{}\n```",
    "Rewrite this function with clearer variable names:\n\n```python\n{}\n```",
    "Format this code and print all of it:\n\n{}",
    "Fix any errors in this code and show the corrected code:\n\n```python\n{}\n```",
)
REWRITE_TEXT = (
    "Rewrite the following text: {}",
    "Rewrite this text so that it is easier to read:\n\n{}",
    "Correct the spelling and grammar of this text:\n\n{}",
    "Make this paragraph shorter:\n\n{}",
    "Rephrase this in a formal tone.\n\n{}",
    "Paraphrase the following paragraph.\n\n{}",
    "Summarize this text in one sentence: {}",
    "Repeat the following text word for word:\n\n{}",
    "Turn this text into a list of bullet points:\n\n{}",
    "Edit this text for clarity and conciseness. Only return the edited text.\n\n{}",
    "Proofread this: {}",
    "Rewrite the text below as an email to a colleague.\n\n{}",
)
PROGRAMS = (
    "sorts a list of numbers", "reverses a string", "counts the words of a text file",
    "computes the factorial of a number", "finds the largest number in a list",
    "checks whether a word is a palindrome", "computes the Fibonacci sequence",
    "merges two sorted lists", "removes duplicates from a list", "reads a CSV file",
    "converts Celsius to Fahrenheit", "finds all prime numbers up to n",
    "computes the greatest common divisor of two numbers", "counts the vowels in a string",
    "implements binary search", "implements a stack", "implements a queue with two stacks",
    "computes the average of a list", "flattens a nested list", "prints a multiplication table",
    "finds the second largest number in a list", "checks whether a number is prime",
    "counts how often each word occurs in a text", "sorts a dictionary by its values",
    "generates a random password", "downloads a web page", "parses a JSON file",
    "computes the sum of the digits of a number", "transposes a matrix",
    "multiplies two matrices", "checks whether two strings are anagrams",
    "draws a triangle of stars", "implements a linked list", "implements bubble sort",
    "implements quicksort", "implements merge sort", "computes the area of a circle",
    "converts a number to binary", "validates an email address", "plays rock, paper, scissors",
)  # fmt: skip
LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "Bash")
PROGRAM = (
    "Write a {} function that {}.",
    "Write a {} program that {}.",
    "Show me {} code that {}.",
    "How do I write code in {} that {}?",
    "Write a {} function that {}, and explain how it works.",
)
THINGS = (
    "fruits", "animals", "countries in Europe", "rivers", "programming languages", "books",
    "tips for better sleep", "reasons to exercise", "healthy breakfasts", "names for a cat",
    "ideas for a party", "questions for an interview", "ways to save money", "famous scientists",
    "planets and moons", "musical instruments", "sports", "colors", "vegetables",
    "tools for a workshop", "ways to learn a language", "benefits of reading",
    "steps to plan a trip", "movies for children", "jobs in medicine", "kinds of clouds",
    "inventions", "things to pack for a hike", "synonyms of happy", "adjectives for food",
    "verbs of movement", "capital cities", "mountains", "birds", "trees", "flowers", "hobbies",
    "board games", "card games", "dog breeds", "desserts", "soups", "spices", "kinds of bread",
    "historical events", "painters", "composers", "ocean animals", "insects", "dinosaurs",
    "gemstones", "metals", "gases", "shapes", "units of length", "tips for public speaking",
    "rules for a classroom", "kinds of renewable energy", "ways to reduce waste",
    "ways to stay focused", "parts of a computer",
)  # fmt: skip
LIST = (
    "List {n} {things}.",
    "Give me a list of {n} {things}.",
    "Name {n} {things} and describe each in one sentence.",
    "What are {n} {things}? Answer with a numbered list.",
    "Make a table of {n} {things}.",
    "Write {n} {things} as a JSON array.",
)
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Ida", "Jack", "Mia")
GOODS = ("apples", "pencils", "books", "coins", "marbles", "cookies", "stamps", "cards", "eggs")


def is_heldout(ids: Sequence[int]) -> bool:
    """Return whether a prompt is held out of training, by the hash of its token ids."""
    digest = hashlib.sha256(np.asarray(ids, np.uint16).tobytes()).digest()
    return int.from_bytes(digest[:8], "big") % HELDOUT == 0


def library() -> Iterator[str]:
    """Yield the source files of Python's library and of Strobe."""
    for root in (Path(sysconfig.get_path("stdlib")), ROOT / "strobe"):
        for path in sorted(root.rglob("*.py")):
            if SKIPPED.isdisjoint(path.relative_to(root).parts):
                yield path.read_bytes().decode("utf-8", errors="replace")


def functions(sources: Sequence[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the text of short functions; name, arguments and description of documented ones."""
    texts: list[str] = []
    documented: list[dict[str, str]] = []
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            text = ast.get_source_segment(source, node, padded=True) or ""
            indent = len(text) - len(text.lstrip())
            text = "\n".join(line[indent:] for line in text.splitlines())
            if 80 < len(text) < 520:
                texts.append(text)
            doc = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 25 < len(doc) < 300:
                documented.append({
                    "name": node.name, "args": ast.unparse(node.args), "doc": doc,
                })  # fmt: skip
    return texts, documented


def paragraphs(sources: Sequence[str]) -> list[str]:
    """Return paragraphs of prose: docstrings, the language's reference, Markdown pages."""
    texts = list(importlib.import_module("pydoc_data.topics").topics.values())
    texts += [page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md"))]
    for source in sources:
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts += [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds)]
    parts = (" ".join(part.split()) for text in texts for part in re.split(r"\n\s*\n", text))
    prose = (part for part in parts if 90 < len(part) < 520 and part[0].isalpha())
    return sorted({p for p in prose if sum(c.isalpha() or c == " " for c in p) > 0.85 * len(p)})


def arithmetic(rng: random.Random) -> str:
    """Return a question about numbers."""
    a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 12)
    first, second = rng.sample(NAMES, 2)
    goods = rng.choice(GOODS)
    return rng.choice((
        f"What is {a} + {b}?",
        f"What is {a} - {b}?",
        f"What is {a} times {c}?",
        f"Calculate {a * c} / {c}.",
        f"Calculate ({a} + {b}) * {c} step by step.",
        f"{first} has {a} {goods} and gives {c} to {second}. How many does {first} have now?",
        f"{first} buys {c} {goods} for {b} cents each. How much is that? Explain each step.",
        f"What is {c * 5}% of {a * 10}?",
        f"Solve for x: {c}x + {a} = {a + b}.",
        f"A train travels {a} kilometers in {c} hours. What is its average speed?",
        f"Count from {c} to {c + 15}.",
    ))  # fmt: skip


def user_turns(kind: str, seed: int) -> Iterator[str]:
    """Yield texts of a kind without end."""
    rng = random.Random(f"{kind} {seed}")
    if kind == "arithmetic":
        while True:
            yield arithmetic(rng)
    if kind == "lists":
        while True:
            yield rng.choice(LIST).format(n=rng.randint(3, 12), things=rng.choice(THINGS))
    sources = list(library())
    texts, documented = functions(sources)
    prose = paragraphs(sources)
    while True:
        if kind == "rewriting":
            with_code = rng.random() < 0.25
            pattern = rng.choice(REWRITE_CODE if with_code else REWRITE_TEXT)
            yield pattern.format(rng.choice(texts if with_code else prose))
        else:
            yield rng.choice((
                rng.choice(ABOUT_CODE).format(rng.choice(texts)),
                rng.choice(FROM_DOC).format(**rng.choice(documented)),
                rng.choice(PROGRAM).format(rng.choice(LANGUAGES), rng.choice(PROGRAMS)),
            ))  # fmt: skip


def render(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of chats that start with these texts, ready for the answer."""
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]
    encodings = tokenizer.backend_tokenizer.encode_batch(chats, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def text_prompts(tokenizer: Any, kind: str, count: int, seed: int) -> list[list[int]]:
    """Return up to `count` different prompts of a kind."""
    turns = itertools.islice(user_turns(kind, seed), count)
    ids = render(tokenizer, sorted(set(turns)))
    return [prompt for prompt in ids if len(prompt) <= LONGEST]


def flat(rows: Sequence[Sequence[int]]) -> dict[str, NDArray[Any]]:
    """Return rows of token ids as two arrays, ids and lengths, as `rows_of` reads them."""
    ids = np.fromiter((i for row in rows for i in row), np.uint16)
    return {"ids": ids, "lengths": np.array([len(row) for row in rows], np.uint16)}


def rows_of(ids: NDArray[Any], lengths: NDArray[Any]) -> list[list[int]]:
    """Reverse `flat`."""
    ends = lengths.astype(np.int64).cumsum()
    return [part.tolist() for part in np.split(ids, ends[:-1])]


def main() -> None:
    """Write the prompts and their kinds."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    rows: list[list[int]] = []
    kinds: list[int] = []
    for kind, count in COUNTS.items():
        prompts = text_prompts(tokenizer, kind, count, seed=0)
        rows += prompts
        kinds += [KINDS.index(kind)] * len(prompts)
        print(kind, len(prompts), sum(map(len, prompts)) // len(prompts), "tokens on average")
    np.savez_compressed(sys.argv[2], kinds=np.array(kinds, np.uint8), **flat(rows))


if __name__ == "__main__":
    main()
