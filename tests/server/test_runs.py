"""Generation of answers from scripted engine events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from strobe.config import DEMO_MODELS
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.client import EngineDead, EngineStopped, Generation
from strobe.server.engine_process.engine_messages import Finish, Submit
from strobe.server.generation.api_errors import ApiError
from strobe.server.generation.run import GenerationJob, Progress, PromptRun, speculation
from strobe.server.openai.step_report import step_of
from strobe.server.schema.field_errors import FieldError, FieldNames
from strobe.server.serving import Serving
from strobe.server.telemetry.server_metrics import ServerMetrics
from strobe.text.tokenizer import Tokenizer
from tests.server.support.engineless_server import START, RecordingClient, event, samples, serving


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO_MODELS / "target")


def ended(metrics: ServerMetrics) -> dict[str, float]:
    """The number of finished answers by reason."""
    finished = samples(metrics, "vllm:request_success")
    return {s.labels["finished_reason"]: s.value for s in finished if s.value}


def test_events_after_stop_string_are_dropped(tokenizer: Tokenizer):
    """The engine runs further steps until it learns of the stop; they may arrive together."""

    async def main() -> tuple[list[Progress], PromptRun, Serving]:
        served = serving(tokenizer)
        params = SamplingParams(max_tokens=50, stop=["b"])
        run = PromptRun(served, GenerationJob([5, 6], params, "r"))
        first, *others = (tokenizer.encode(text) for text in ("a", " b", " c", " d"))
        generation: Generation = run._generation
        generation.add_events([event(first, start=START)])
        for tokens in others:
            generation.add_events([event(tokens, num_verified=15, num_accepted=0)])
        generation.add_events([event([7], finish_reason="length")])
        return [p async for steps in run.steps() for p in steps], run, served

    progress, run, served = asyncio.run(main())
    assert [p.finished for p in progress] == [False, True]
    assert "".join(p.delta.text for p in progress) == run.choices[0].output.text == "a "
    assert run.choices[0].output.finish_reason == "stop"
    assert run.choices[0].draft_counts.steps == 1
    assert ended(served.metrics) == {"stop": 1}


@pytest.mark.parametrize(
    ("alternative", "start"),
    [(None, "response_format"), ('start: "a"', "response_format or tools")],
)
def test_grammar_error_names_tools_if_they_are_part_of_it(
    tokenizer: Tokenizer, alternative: str | None, start: str
):
    params = SamplingParams(structured_outputs={"regex": "a", "alternative": alternative})
    names = FieldNames(structured_outputs="response_format")
    job = GenerationJob([5], params, "r", names=names)
    run = PromptRun(serving(tokenizer), job)
    error = run.to_field_error("structured_outputs: the grammar does not compile: why.")
    assert str(error) == f"{start}: the grammar does not compile: why."
    assert error.param == "response_format"


def test_stop_string_ends_only_its_answer(tokenizer: Tokenizer):
    async def main() -> list[Any]:
        served = serving(tokenizer)
        run = PromptRun(
            served, GenerationJob([5], SamplingParams(max_tokens=50, n=2, stop=["b"]), "r")
        )
        generation: Generation = run._generation
        generation.add_events([event(tokenizer.encode("b"), 1, start=START)])
        steps = run.steps()
        assert [p.choice.index for p in await anext(steps)] == [1]
        assert not run.abandoned
        generation.add_events([event([9], 1), event([9], 0, start=START, finish_reason="stop")])
        assert [[p.choice.index for p in step] async for step in steps] == [[0]]
        assert isinstance(served.client, RecordingClient)
        return served.client.sent

    sent = asyncio.run(main())
    assert isinstance(sent[0], Submit)
    assert sent[1:] == [Finish(0, 1, "stop")]


def test_close_notifies_engine_once(tokenizer: Tokenizer):
    async def main() -> tuple[list[Any], PromptRun]:
        served = serving(tokenizer)
        run = PromptRun(served, GenerationJob([5], SamplingParams(max_tokens=50, n=2), "r"))
        waiting = asyncio.ensure_future(anext(run.steps(), None))
        await asyncio.sleep(0)
        run.close()
        run.close()
        assert await waiting is None
        assert served.client.num_open == 0
        assert isinstance(served.client, RecordingClient)
        return served.client.sent[1:], run

    sent, run = asyncio.run(main())
    assert sent == [Finish(0, None, "abort")]
    assert run.abandoned


@pytest.mark.parametrize("kind", [EngineDead, EngineStopped])
def test_error_reaches_waiting_reader_without_engine_message(
    tokenizer: Tokenizer, kind: type[Exception]
):
    async def main() -> list[Any]:
        served = serving(tokenizer)
        run = PromptRun(served, GenerationJob([5], SamplingParams(max_tokens=50), "r"))
        waiting = asyncio.ensure_future(anext(run.steps()))
        await asyncio.sleep(0)
        run._generation.fail(kind("gone"))
        with pytest.raises(kind):
            await waiting
        assert isinstance(served.client, RecordingClient)
        return served.client.sent[1:]

    assert asyncio.run(main()) == []


def test_queue_limit_counts_answers(tokenizer: Tokenizer):
    """Two slots and a queue of three: five answers."""

    async def main() -> None:
        served = serving(tokenizer, max_waiting=3)
        four = SamplingParams(max_tokens=5, n=4)
        run = PromptRun(served, GenerationJob([5], four, "a"))
        with pytest.raises(ApiError) as full:
            PromptRun(served, GenerationJob([5], SamplingParams(max_tokens=5, n=2), "b"))
        assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
        assert served.client.num_open == 4
        PromptRun(served, GenerationJob([5], SamplingParams(max_tokens=5), "c"))
        run.close()
        PromptRun(served, GenerationJob([5], four, "d"))
        with pytest.raises(FieldError, match=r"6 answers.*at most 5"):
            served.check_room(6)

    asyncio.run(main())


@pytest.mark.parametrize(("ends", "seconds"), [((10.25, 10.5, 11.0), 0.75), ((10.25,), None)])
def test_report_has_the_engines_decoding_time(
    tokenizer: Tokenizer, ends: Sequence[float], seconds: float | None
):
    async def main() -> dict[str, Any]:
        run = PromptRun(
            serving(tokenizer), GenerationJob([5, 6], SamplingParams(max_tokens=50), "r")
        )
        for number, ended in enumerate(ends):
            first = START if number == 0 else None
            run._generation.add_events([event([7], start=first)], ended)
        run._generation.add_events([event([], finish_reason="length")], 99.0)
        async for _ in run.steps():
            pass
        return speculation([run])

    assert asyncio.run(main())["decode_seconds"] == seconds


def test_step_reports_rejected_drafts_and_confidence(tokenizer: Tokenizer):
    right, wrong, own, last = (tokenizer.encode(text)[0] for text in ("a", " b", " c", " d"))

    async def main() -> list[Progress]:
        served = serving(tokenizer)
        run = PromptRun(served, GenerationJob([5, 6], SamplingParams(), "r"))
        drafts = {"drafts": [right, wrong, last, last], "margins": [9.0, 0.0, 1.0, 1.0]}
        run._generation.add_events([event([own], start=START)])
        run._generation.add_events(
            [event([right, own], num_verified=3, num_accepted=1)._replace(**drafts)]
        )
        ending = event([right], num_verified=3, num_accepted=1, finish_reason="length")
        run._generation.add_events([ending._replace(drafts=[right, wrong, last])])
        return [p async for steps in run.steps() for p in steps]

    first, second, end = [step_of(p.delta, tokenizer) for p in asyncio.run(main())]
    assert "rejected" not in first
    assert second["rejected"] == [tokenizer.token_text(token) for token in (wrong, last)]
    assert second["confidence"] == [1.0, 0.5, 0.731]
    assert end["rejected"] == end["confidence"] == []  # nothing was asked after the answer's end
