"""`python -m strobe.tools.train.regenerate`: replace a data set's answers with the target's own.

A drafter learns to predict one target's tokens, which answers from elsewhere do not contain.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from transformers import AutoTokenizer

from strobe.llm import LLM
from strobe.models.architectures import load_target_config
from strobe.sampling_params import SamplingParams
from strobe.terminal.progress import Progress
from strobe.terminal.wording import counted
from strobe.tools.exit_status import exit_status
from strobe.tools.train.data import (
    ChatTokenizer,
    answer_turns,
    read_lines,
    render,
    template_options,
)

Answer = Callable[[list[list[int]], int], Sequence[Sequence[int]]]
"""(prompts as token ids, index of the first one) -> the target's answers as token ids."""


@dataclass(frozen=True)
class RegenerateSettings:
    """Write the target's own answers to the prompts of a data set."""

    target: Path
    """Directory of the target."""
    data: Path
    """JSONL of chats (messages) or of prompt_ids; answers in it are replaced."""
    output: Path
    """JSONL of prompt_ids and output_ids, one line per answer; an existing file is continued."""
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Probability mass of the tokens to sample from."""
    seed: int = 0
    """Seed of the first answer; each next answer adds 1."""
    max_tokens: int = 2048
    """Maximum tokens of an answer; the target's context may end it earlier."""
    at_once: int = 256
    """Prompts sent to the engine together."""

    def __post_init__(self) -> None:
        if self.at_once < 1 or self.max_tokens < 1:
            raise ValueError("at_once and max_tokens must be at least 1.")


def prompts(path: Path, tokenizer: ChatTokenizer, *, room: int) -> Iterator[list[int]]:
    """Yield a data set's prompts as token ids: one before each answer of a chat, and one more for a
    chat that ends with a user message. Raises ValueError for a prompt of more than `room` tokens.
    """
    for place, line in read_lines(path):
        if "prompt_ids" in line:
            encoded = [list(line["prompt_ids"])]
        else:
            turns = answer_turns(line, place)
            messages = line["messages"]
            if messages and messages[-1]["role"] != "assistant":
                turns = [*turns, len(messages)]
            options = template_options(line)
            encoded = [render(tokenizer, messages[:i], options, answer=True) for i in turns]
        for ids in encoded:
            if not 1 <= len(ids) <= room:
                raise ValueError(
                    f"{place}: a prompt has {len(ids)} tokens, but the target's context has room "
                    f"for 1 to {room} before an answer; shorten it or leave it out."
                )
            yield ids


def regenerate(prompts: Sequence[list[int]], answer: Answer, output: Path, *, at_once: int) -> int:
    """Answer the prompts, `at_once` at a time, and append to `output`; return the number of answers
    in it. An existing file must start with the same prompts and is continued."""
    done = 0
    if output.exists():
        written = [line for _, line in read_lines(output)]
        done = len(written)
        if done > len(prompts) or any(
            a["prompt_ids"] != b for a, b in zip(written, prompts, strict=False)
        ):
            raise ValueError(f"{output} holds answers to other prompts; name another --output.")
    output.parent.mkdir(parents=True, exist_ok=True)
    with (
        output.open("a", encoding="utf-8") as file,
        Progress("answering", len(prompts), done, "prompts") as shown,
    ):
        for start in range(done, len(prompts), at_once):
            part = list(prompts[start : start + at_once])
            for ids, tokens in zip(part, answer(part, start), strict=True):
                print(json.dumps({"prompt_ids": ids, "output_ids": list(tokens)}), file=file)
            file.flush()
            os.fsync(file.fileno())
            shown.update(done=start + len(part))
    return len(prompts)


def engine_answer(settings: RegenerateSettings) -> Answer:
    """Return a function that answers prompts with Strobe's engine, without a drafter."""
    return partial(_answer, llm=LLM(str(settings.target)), settings=settings)


def _answer(
    part: list[list[int]], start: int, *, llm: LLM, settings: RegenerateSettings
) -> list[list[int]]:
    """Answer a part of all prompts. start: the number of the first one, which decides its seed."""
    params = [
        SamplingParams(
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=settings.seed + start + i,
            max_tokens=settings.max_tokens,
        )
        for i in range(len(part))
    ]
    inputs = [{"prompt_token_ids": ids} for ids in part]
    answers = [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]
    error = next((answer.error for answer in answers if answer.error is not None), None)
    if error is not None:
        raise ValueError(error)
    return [list(answer.token_ids) for answer in answers]


def main() -> int:
    """Run the command line; return the exit status."""
    settings = tyro.cli(RegenerateSettings, prog="python -m strobe.tools.train.regenerate")
    config = load_target_config(settings.target)
    tokenizer = AutoTokenizer.from_pretrained(str(settings.target))
    all_prompts = list(prompts(settings.data, tokenizer, room=config.decoder.max_position - 1))
    count = regenerate(
        all_prompts, engine_answer(settings), settings.output, at_once=settings.at_once
    )
    print(f"{counted(count, 'answer')} in {settings.output}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_status(main))
