"""Drafts that a request reads: those of each step, rejected ones included."""

from __future__ import annotations

from typing import Any

import pytest

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from strobe.step import TokenEvent
from strobe.text.tokenizer import Tokenizer

PROMPT = "Sort these words from A to Z: ocean, stone, umbrella, ember, water, ocean, stone."


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    chat = Tokenizer(DEMO_MODELS / "target").render([{"role": "user", "content": PROMPT}])
    return Tokenizer(DEMO_MODELS / "target").encode_chat(chat)


@pytest.fixture(scope="module", params=[True, False], ids=["adaptive", "fixed"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(EngineConfig(device="cpu", adaptive=request.param, max_num_seqs=4))


def run(engine: Engine, prompt: list[int], *samplings: SamplingParams) -> list[list[TokenEvent]]:
    """Answer the prompt with each of the parameters at once; return each answer's events."""
    for key, sampling in enumerate(samplings):
        engine.add_prompt(prompt, sampling, key=key, seed=key)
    answers: list[list[TokenEvent]] = [[] for _ in samplings]
    while engine.has_work:
        for event in engine.step():
            answers[event.key].append(event)  # pyright: ignore[reportArgumentType]
    return answers


def sampling(**fields: Any) -> SamplingParams:
    speculation = {"return_drafts": True, **fields.pop("speculation", {})}
    return SamplingParams(max_tokens=60, temperature=1.5, speculation=speculation, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"speculation": {"method": "ngram"}},
        {"speculation": {"method": "dflash+ngram"}},
        {"structured_outputs": {"regex": "(ocean, |stone, |[a-f]x){20}"}},
    ],
    ids=["dflash", "ngram", "both", "grammar"],
)
def test_drafts_are_those_that_were_verified(
    engine: Engine, prompt: list[int], fields: dict[str, Any]
):
    num_rejected = 0
    for events in run(engine, prompt, sampling(**fields), sampling(**fields)):
        for event in events:
            accepted, verified = event.num_accepted, event.num_verified
            assert len(event.drafts) >= verified
            assert list(event.drafts[:accepted]) == list(event.tokens[:accepted])
            if accepted < min(verified, len(event.tokens)):
                assert event.drafts[accepted] != event.tokens[accepted]
                num_rejected += verified - accepted
            assert not any(event.margins) or len(event.margins) == len(event.drafts)
    assert num_rejected > 0


def test_drafts_are_returned_to_those_who_ask_alone(engine: Engine, prompt: list[int]):
    silent = SamplingParams(max_tokens=60, temperature=1.5)
    asked, other = run(engine, prompt, sampling(), silent)
    assert any(event.drafts for event in asked)
    assert not any(event.drafts or event.margins for event in other)
    (again,) = run(engine, prompt, silent)  # in the slot of one that asked
    assert not any(event.drafts for event in again)
