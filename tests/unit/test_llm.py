"""The offline API: prompts, streams, reports, and recovery from failures."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, EngineConfig, SamplingParams
from strobe.counters import DraftCounts
from strobe.outputs import CompletionOutput, RequestOutput, StreamDelta
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import make_engine
from tests.support.scripted_drafting import Scripted, wavering
from tests.support.text_pair import Pair
from tests.support.tiny_checkpoints import edit_json

GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=1, max_tokens=12, seed=7)
PROMPTS = ["hello there", "Sort these words: pear, apple, fig", "7 * 8 ="]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(pair: Pair) -> LLM:
    """Return a target with its drafter; tests leave it idle."""
    return LLM(pair.target, pair.draft, device="cpu", adaptive=False)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> LLM:
    """Return the target alone."""
    return LLM(pair.target, device="cpu")


@pytest.fixture(autouse=True)
def _idle(llm: LLM) -> Iterator[None]:
    yield
    assert_idle(llm)


def assert_idle(llm: LLM) -> None:
    """Check that nothing runs, every page is free, and host and device agree."""
    assert not llm.engine.has_work
    pool = llm.engine.components.pool
    assert pool.available == pool.capacity
    check_engine(llm.engine)


def answers(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def seen(answer: CompletionOutput) -> tuple[Any, ...]:
    """Return the parts of an answer that must not depend on drafting."""
    return answer.text, answer.token_ids, answer.finish_reason, answer.stop_reason


# prompts and outputs


def test_prompt_may_be_text_dict_or_token_ids(llm: LLM):
    text = PROMPTS[0]
    ids = llm.tokenizer.encode(text)
    (expected,) = llm.generate(text, GREEDY, use_tqdm=False)
    assert (expected.prompt, expected.prompt_token_ids) == (text, ids)
    forms: list[tuple[Any, str | None]] = [
        ([text], text),
        ({"prompt": text}, text),
        ([{"prompt": text}], text),
        ({"prompt_token_ids": ids, "prompt": text}, text),
        ({"prompt_token_ids": ids}, None),
        (ids, None),
        (tuple(ids), None),
        ([ids], None),
    ]
    for form, prompt in forms:
        (output,) = llm.generate(form, GREEDY, use_tqdm=False)
        assert seen(output.outputs[0]) == seen(expected.outputs[0])
        assert (output.prompt, output.prompt_token_ids) == (prompt, ids)


def test_prefix_cache_is_separate_per_salt(pair: Pair):
    engine = LLM(pair.target, pair.draft, device="cpu", page_size=4)
    ids = list(range(40, 60))

    def cached(**more: str) -> int | None:
        (output,) = engine.generate({"prompt_token_ids": ids, **more}, GREEDY, use_tqdm=False)
        return output.num_cached_tokens

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a")] == [0, 16, 0, 16]
    for salt in ("", "a\ud800"):
        (output,) = engine.generate({"prompt": "x", "cache_salt": salt}, GREEDY, use_tqdm=False)
        expected = (
            f"cache_salt is {salt!r}, but must be a text of one or more whole Unicode characters."
        )
        assert output.outputs[0].error == expected


def test_no_prompts_give_no_outputs(llm: LLM):
    assert llm.generate([], GREEDY) == []


def test_outputs_follow_prompt_order(llm: LLM):
    lengths = [20, 1, 9, 3]
    prompts = [*PROMPTS, PROMPTS[0]]
    params = [GREEDY.clone(max_tokens=length) for length in lengths]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens) for tokens in answers(outputs)] == lengths
    assert answers(outputs)[3] == answers(outputs)[0][:3]
    assert len({output.request_id for output in outputs}) == 4
    assert all(output.finished for output in outputs)


def test_more_prompts_than_slots_are_all_answered(pair: Pair, llm: LLM):
    small = LLM(pair.target, pair.draft, max_num_seqs=2)
    prompts = [PROMPTS[i % 3] for i in range(7)]
    many = small.generate(prompts, GREEDY, use_tqdm=False)
    three = answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert answers(many) == [three[i % 3] for i in range(7)]
    assert_idle(small)


def test_siblings_with_one_seed_differ_and_repeat(llm: LLM):
    first = llm.generate(PROMPTS[:2], WARM.clone(n=4), use_tqdm=False)
    assert [[a.index for a in output.outputs] for output in first] == [[0, 1, 2, 3]] * 2
    for output in first:
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
    again = llm.generate(PROMPTS[:2], WARM.clone(n=4), use_tqdm=False)
    assert answers(again) == answers(first)
    (two,) = llm.generate(PROMPTS[0], WARM.clone(n=2), use_tqdm=False)
    assert answers([two]) == answers(first)[:2], "a sibling depends on n"


def test_unseeded_answers_differ_per_call_but_not_per_engine(pair: Pair):
    params = WARM.clone(seed=None)
    runs = []
    for seed in (3, 3, 4):
        engine = LLM(pair.target, pair.draft, seed=seed)
        runs.append([answers(engine.generate(PROMPTS, params, use_tqdm=False)) for _ in range(2)])
    assert runs[0][0] != runs[0][1]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_greedy_answer_is_equal_alone_and_batched(llm: LLM):
    alone = [answers(llm.generate(prompt, GREEDY, use_tqdm=False))[0] for prompt in PROMPTS]
    for _ in range(2):
        assert answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == alone


def test_progress_bar_counts_prompts_on_stderr(llm: LLM, capsys: pytest.CaptureFixture[str]):
    llm.generate(PROMPTS, WARM.clone(n=2))
    out, err = capsys.readouterr()
    assert out == ""
    assert "Processed prompts: 100%" in err
    assert "3/3" in err
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_several_engines_run_side_by_side(llm: LLM, plain: LLM, pair: Pair):
    other = LLM(pair.target, method="ngram")
    streams = [engine.stream(PROMPTS[1], GREEDY) for engine in (llm, plain, other)]
    texts = ["", "", ""]
    for deltas in zip_longest(*streams):
        for i, delta in enumerate(deltas):
            texts[i] += delta.text if delta is not None else ""
    assert texts[0] == texts[1] == texts[2] != ""
    assert_idle(other)
    assert_idle(plain)


# chat


def test_chat_is_generate_with_template(llm: LLM):
    (output,) = llm.chat(HELLO, GREEDY, use_tqdm=False)
    ids = llm.tokenizer.render_chat(HELLO)
    assert output.prompt_token_ids == ids
    assert output.prompt == llm.tokenizer.chat_text(HELLO)
    assert answers([output]) == answers(llm.generate(ids, GREEDY, use_tqdm=False))


def test_chat_accepts_several_conversations_tools_and_options(llm: LLM):
    tools = [{"type": "function", "function": {"name": "weigh_apples"}}]
    system = [{"role": "system", "content": "Be brief."}, *HELLO]
    outputs = llm.chat(
        [HELLO, system],
        GREEDY,
        use_tqdm=False,
        tools=tools,
        chat_template_kwargs={"enable_thinking": False},
    )
    for output in outputs:
        assert "weigh_apples" in str(output.prompt)
        assert str(output.prompt).endswith("<think>\n\n</think>\n\n")
    assert "Be brief." in str(outputs[1].prompt)
    (thinking,) = llm.chat(
        HELLO, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": True}
    )
    assert str(thinking.prompt).endswith("<|im_start|>assistant\n")
    (own,) = llm.chat(
        HELLO, GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}{{ tail }}",
        chat_template_kwargs={"tail": "!"},
    )  # fmt: skip
    assert own.prompt == "hello!"
    (bare,) = llm.chat(HELLO, GREEDY, use_tqdm=False, add_generation_prompt=False)
    assert str(bare.prompt).endswith("<|im_end|>\n")


# streams


def collect(stream: Iterator[StreamDelta]) -> tuple[str, list[int], list[StreamDelta]]:
    deltas = list(stream)
    return "".join(d.text for d in deltas), [t for d in deltas for t in d.token_ids], deltas


@pytest.mark.parametrize("params", [GREEDY, WARM, WARM.clone(max_tokens=1)], ids=["0", "1", "one"])
def test_stream_deltas_add_up_to_the_answer(llm: LLM, params: SamplingParams):
    for prompt in PROMPTS:
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        text, tokens, deltas = collect(llm.stream(prompt, params))
        assert (text, tokens) == (output.outputs[0].text, output.outputs[0].token_ids)
        last = deltas[-1].output
        assert seen(last) == seen(output.outputs[0])
        assert last.speculation is not None


def test_only_the_last_delta_is_finished(llm: LLM):
    reported: list[bool] = []
    for delta in llm.stream(PROMPTS[0], GREEDY):
        reported.append(delta.finished)
    assert reported == [False] * (len(reported) - 1) + [True]


def test_sibling_stream_deltas_carry_their_index(llm: LLM):
    (output,) = llm.generate(PROMPTS[0], WARM.clone(n=3), use_tqdm=False)
    texts = ["", "", ""]
    for delta in llm.stream(PROMPTS[0], WARM.clone(n=3)):
        texts[delta.index] += delta.text
    assert texts == [answer.text for answer in output.outputs]


def test_stream_chat_equals_chat(llm: LLM):
    (output,) = llm.chat(
        HELLO, GREEDY, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
    )
    text, _, _ = collect(llm.stream_chat(HELLO, GREEDY, enable_thinking=False))
    assert text == output.outputs[0].text


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_closing_a_stream_frees_its_requests(pair: Pair, overlap: int, steps: int):
    engine = LLM(pair.target, pair.draft, overlap=overlap)
    stream = engine.stream(PROMPTS[0], GREEDY.clone(n=2))
    for _ in range(steps):
        delta = next(stream)
    stream.close()
    assert_idle(engine)
    if steps:
        assert delta.output.finish_reason == "abort"
        assert delta.output.speculation is not None
    (output,) = engine.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 24
    assert_idle(engine)


@pytest.mark.parametrize("overlap", [1, 2])
def test_streams_and_batches_are_independent(pair: Pair, overlap: int):
    engine = LLM(pair.target, pair.draft, overlap=overlap)
    expected = [
        output.outputs[0].text for output in engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    ]
    first, second = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    closed = engine.stream(PROMPTS[2], GREEDY)
    texts = [next(first).text, next(second).text]
    next(closed)
    texts[0] += next(first).text
    closed.close()
    (batch,) = engine.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert [*texts, batch.outputs[0].text] == expected
    assert_idle(engine)


# failures


class Failure(Exception):
    """The exception that these tests raise."""


def fail_at(llm: LLM, call: int, action: Callable[[], None]) -> None:
    """Call `action` before the target's forward number `call`, counted from 1."""
    forward, calls = llm.engine.runner.forward, [0]

    def failing(batch: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            action()
        return forward(batch, **options)

    llm.engine.runner.forward = failing


def throw() -> None:
    raise Failure("out of memory")


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("call", [1, 2, 4])
def test_engine_is_usable_after_an_exception_in_a_step(
    pair: Pair, plain: LLM, overlap: int, call: int
):
    engine = LLM(pair.target, pair.draft, overlap=overlap, max_num_batched_tokens=64,
                 max_num_seqs=3)  # fmt: skip
    fail_at(engine, call, throw)
    with pytest.raises(Failure):
        engine.generate(["long " * 40, *PROMPTS], WARM.clone(n=2), use_tqdm=False)
    assert_idle(engine)
    assert answers(engine.generate(PROMPTS, GREEDY, use_tqdm=False)) == answers(
        plain.generate(PROMPTS, GREEDY, use_tqdm=False)
    )
    assert_idle(engine)


def test_exception_in_one_stream_leaves_the_other(pair: Pair, plain: LLM):
    engine = LLM(pair.target, pair.draft)
    first, second = engine.stream(PROMPTS[0], GREEDY), engine.stream(PROMPTS[1], GREEDY)
    text = next(first).text
    next(second)
    fail_at(engine, 1, throw)
    with pytest.raises(Failure):
        collect(second)
    text += collect(first)[0]
    (expected,) = plain.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert text == expected.outputs[0].text
    assert_idle(engine)


def test_ctrl_c_takes_effect_after_the_step(pair: Pair):
    engine = LLM(pair.target, pair.draft)
    fail_at(engine, 3, lambda: signal.raise_signal(signal.SIGINT))
    steps = engine.engine.stats.steps
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert engine.engine.stats.steps == steps + 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_idle(engine)


def test_ctrl_c_in_stream_keeps_output(pair: Pair):
    engine = LLM(pair.target, pair.draft)
    fail_at(engine, 3, lambda: signal.raise_signal(signal.SIGINT))
    stream = engine.stream(PROMPTS[0], GREEDY)
    delta = next(stream)
    with pytest.raises(KeyboardInterrupt):
        collect(stream)
    assert delta.output.finish_reason == "abort"
    assert len(delta.output.token_ids) >= 3
    assert_idle(engine)


def test_own_sigint_handler_is_not_replaced(llm: LLM):
    pressed: list[int] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        signal.raise_signal(signal.SIGINT)
        collect(stream)
    finally:
        signal.signal(signal.SIGINT, usual)
    assert pressed == [signal.SIGINT]


def test_generate_runs_in_another_thread(llm: LLM):
    outputs: list[RequestOutput] = []
    thread = threading.Thread(
        target=lambda: outputs.extend(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    )
    thread.start()
    thread.join()
    assert answers(outputs) == answers(llm.generate(PROMPTS, GREEDY, use_tqdm=False))


# ends of answers


def test_checkpoint_recommends_sampling_and_end_tokens(pair: Pair, tmp_path: Path):
    target = pair.copied(tmp_path).target
    free = LLM(target).generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    end = next(token for token in free[4:] if token not in free[:4])
    length = free.index(end) + 1
    edit_json(
        target / "generation_config.json",
        eos_token_id=[0, 2, end],
        temperature=0.6,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        do_sample=True,
        repetition_penalty=1.05,
    )
    engine = LLM(target)
    params = engine.get_default_sampling_params()
    assert params == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, min_p=0.01, repetition_penalty=1.05
    )
    (answer,) = engine.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids == free[:length]
    assert answer.text == engine.tokenizer.decode(free[: length - 1])
    (longer,) = engine.generate(PROMPTS[0], GREEDY.clone(ignore_eos=True), use_tqdm=False)
    assert longer.outputs[0].token_ids == free
    with_end = GREEDY.clone(include_stop_str_in_output=True)
    (with_stop,) = engine.generate(PROMPTS[0], with_end, use_tqdm=False)
    assert with_stop.outputs[0].text == engine.tokenizer.decode(free[:length])
    edit_json(target / "generation_config.json", do_sample=False)
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.05)
    assert LLM(target).get_default_sampling_params() == greedy
    edit_json(target / "generation_config.json", repetition_penalty=None)
    assert LLM(target).get_default_sampling_params() == SamplingParams(temperature=0.0)
    edit_json(target / "generation_config.json", eos_token_id=end)
    assert (
        LLM(target).generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        == (free[:length])
    )


def test_default_sampling_params_are_vllms(llm: LLM):
    assert llm.get_default_sampling_params() == SamplingParams()
    (output,) = llm.generate(PROMPTS[0], use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 16


def test_stop_token_ends_the_answer_and_is_its_stop_reason(llm: LLM):
    (free,) = answers(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False))
    stop = next(token for token in free[4:] if token not in free[:4])
    length = free.index(stop) + 1
    (output,) = llm.generate(PROMPTS[0], GREEDY.clone(stop_token_ids=[stop]), use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == free[:length]
    assert answer.text == llm.tokenizer.decode(free[: length - 1])


def test_repetition_ends_the_answer_at_the_same_token_with_speculation(llm: LLM):
    detection = {"max_pattern_size": 4, "min_count": 3}
    params = GREEDY.clone(allowed_token_ids=[9], repetition_detection=detection)
    for speculation in (True, False):
        (output,) = llm.generate(PROMPTS[0], params.clone(speculation=speculation), use_tqdm=False)
        answer = output.outputs[0]
        assert (answer.finish_reason, answer.stop_reason) == ("repetition", None)
        assert answer.token_ids == [9] * 3
    assert_idle(llm)


def test_answer_without_max_tokens_fills_the_context(pair: Pair):
    engine = LLM(pair.target, pair.draft, max_model_len=40)
    (output,) = engine.generate(PROMPTS[0], GREEDY.clone(max_tokens=None), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 40
    assert_idle(engine)


# speculation on and off


@pytest.fixture(scope="module")
def knowing(pair: Pair, plain: LLM) -> LLM:
    """Return an engine whose drafter knows the greedy answers and errs at changing positions."""
    engine = make_engine(
        EngineConfig(target=str(pair.target), draft=str(pair.draft), device="cpu"),
        lambda parts, name: Scripted(parts.state, 7, wavering),
        names=["dflash"],
    )
    known = {
        tuple(output.prompt_token_ids): output.prompt_token_ids + output.outputs[0].token_ids
        for output in plain.generate(PROMPTS, GREEDY.clone(max_tokens=64), use_tqdm=False)
    }

    class Known(dict[Any, list[int]]):
        def get(self, request: Any, default: Any = None) -> Any:
            return known.get(tuple(request.tokens[: request.num_prompt]), default)

    drafter: Any = engine.proposers["dflash"]
    drafter.answers = Known()
    return LLM(engine=engine)


def stops_within(text: str) -> list[dict[str, Any]]:
    """Return ways to end an answer in the middle of its text."""
    middle = len(text) // 2
    return [
        {"stop": text[middle : middle + 3]},
        {"stop": [text[middle : middle + 9], text[middle + 4 : middle + 6]]},
        {"stop": text[middle : middle + 4], "include_stop_str_in_output": True},
        {"stop": max(sorted(set(text)), key=text.count), "min_tokens": 9},
        {"stop": "never found"},
        {"min_tokens": 24},
        {"skip_special_tokens": False},
    ]


@pytest.mark.parametrize("number", range(7))
def test_speculation_on_and_off_give_the_same_texts(
    knowing: LLM, llm: LLM, plain: LLM, number: int
):
    outputs_plain = plain.generate(PROMPTS, GREEDY, use_tqdm=False)
    changes = [stops_within(output.outputs[0].text)[number] for output in outputs_plain]
    params = [GREEDY.clone(**change) for change in changes]
    all_expected = [
        seen(output.outputs[0]) for output in plain.generate(PROMPTS, params, use_tqdm=False)
    ]
    if "stop" in changes[0] and number != 4:
        assert [reason for _, _, reason, _ in all_expected] == ["stop"] * 3
        assert all(params[0].min_tokens < len(tokens) < 24 for _, tokens, _, _ in all_expected)
    accepted = 0
    for engine, choice in [
        (knowing, None),
        (knowing, False),
        (knowing, {"num_drafts": 2}),
        (llm, None),
        (llm, {"method": "ngram"}),
    ]:
        chosen = [p.clone(speculation=choice) for p in params]
        outputs = engine.generate(PROMPTS, chosen, use_tqdm=False)
        assert [seen(output.outputs[0]) for output in outputs] == all_expected
        for output in outputs:
            report = output.outputs[0].speculation
            assert report is not None
            accepted += report.counts.num_accepted
        for prompt, param, expected in zip(PROMPTS, chosen, all_expected, strict=True):
            text, tokens, _ = collect(engine.stream(prompt, param))
            assert (text, tokens) == expected[:2]
    assert accepted > 6, "too few drafts were accepted to prove much"
    assert_idle(knowing)


def test_sampled_answers_are_equal_with_and_without_speculation(llm: LLM, plain: LLM):
    params = WARM.clone(n=2, top_k=8, top_p=0.9, min_p=0.01, max_tokens=24)
    expected = answers(plain.generate(PROMPTS, params, use_tqdm=False))
    for choice in (None, False, {"method": "ngram"}, {"num_drafts": 1}):
        chosen = params.clone(speculation=choice)
        assert answers(llm.generate(PROMPTS, chosen, use_tqdm=False)) == expected


# reports


def report(llm: LLM, prompt: Any, **changes: Any) -> Any:
    (output,) = llm.generate(prompt, GREEDY.clone(**changes), use_tqdm=False)
    return output.outputs[0].speculation


def test_speculation_report_adds_up(knowing: LLM):
    got = report(knowing, PROMPTS[0])
    assert (got.used, got.method, got.off_reason) == (True, "dflash", None)
    counts = got.counts
    assert counts.steps > 1
    assert counts.steps <= counts.num_verified <= 7 * counts.steps
    assert 0 < counts.num_accepted < counts.num_verified
    assert counts.acceptance_length == 1 + counts.num_accepted / counts.steps
    assert len(counts.accepted_per_position) <= 7
    assert sum(counts.accepted_per_position) == counts.num_accepted
    assert counts.accepted_per_position == sorted(counts.accepted_per_position, reverse=True)
    num_tokens = (
        1 + counts.steps + counts.num_accepted
    )  # the prefill's token, one per step, and accepted drafts
    assert 24 <= num_tokens < 24 + 7  # drafts that the last step accepts past the end count, too


@pytest.mark.parametrize(
    ("choice", "method", "reason"),
    [
        (False, "none", "the request turned speculation off"),
        ({"method": "none"}, "none", "the request turned speculation off"),
        ({"num_drafts": 0}, "none", "the request turned speculation off"),
        ({"method": "ngram", "num_drafts": 0}, "none", "the request turned speculation off"),
    ],
)
def test_request_can_turn_speculation_off(llm: LLM, choice: Any, method: str, reason: str):
    got = report(llm, PROMPTS[0], speculation=choice)
    assert (got.used, got.method, got.off_reason) == (False, method, reason)
    assert got.counts == DraftCounts()
    assert got.counts.acceptance_length is None


def test_report_says_why_nothing_was_drafted(pair: Pair, llm: LLM, plain: LLM):
    assert report(plain, PROMPTS[0]).off_reason == "no drafter is loaded"
    off = LLM(pair.target, pair.draft, method="none", adaptive=False)
    assert report(off, PROMPTS[0]).off_reason == "the engine's method is none"
    assert report(off, PROMPTS[0], speculation={"method": "dflash"}).used
    short = report(llm, PROMPTS[0], max_tokens=1)
    assert (short.used, short.method) == (False, "dflash")
    assert short.off_reason == "the answer ended before the first draft"
    lookup = report(llm, list(range(300, 320)), max_tokens=2, speculation={"method": "ngram"})
    assert (lookup.used, lookup.method) == (False, "ngram")
    assert lookup.off_reason == "no earlier text matched the newest tokens"


def test_request_can_choose_method_and_num_drafts(llm: LLM):
    ids = [300, 301, 302, 303] * 6
    lookup = report(llm, ids, speculation={"method": "ngram"}, max_tokens=40)
    assert (lookup.used, lookup.method) == (True, "ngram")
    few = report(llm, PROMPTS[0], speculation={"num_drafts": 3})
    assert (few.method, len(few.counts.accepted_per_position)) == ("dflash", 3)
    assert few.counts.num_verified <= 3 * few.counts.steps
    (mixed,) = llm.generate([ids], GREEDY.clone(n=2, speculation={"method": "ngram"}))
    assert [answer.speculation.method for answer in mixed.outputs] == ["ngram"] * 2


def test_requests_of_different_methods_run_together(llm: LLM):
    choices: list[Any] = [None, False, {"method": "ngram"}, {"num_drafts": 1}]
    params = [GREEDY.clone(speculation=choice) for choice in choices]
    outputs = llm.generate([PROMPTS[1]] * 4, params, use_tqdm=False)
    assert len({tuple(tokens) for tokens in answers(outputs)}) == 1
    methods = [o.outputs[0].speculation.method for o in outputs if o.outputs[0].speculation]
    assert methods == ["dflash", "none", "ngram", "dflash"]


METRICS = [
    "vllm:spec_decode_num_drafts",
    "vllm:spec_decode_num_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "strobe:spec_decode_drafts_made",
    "strobe:spec_decode_rested_steps",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:external_prefix_cache_queries",
    "vllm:external_prefix_cache_hits",
    "strobe:kv_offload_saves",
    "strobe:kv_offload_loads",
    "strobe:states_kept",
    "strobe:state_hits",
    "strobe:engine_steps",
    "strobe:shadow_answers",
    "strobe:shadow_blocks",
    "strobe:shadow_seconds",
    "strobe:step_seconds",
]


def counted(llm: LLM) -> dict[str, Any]:
    return {m.name: m.values if hasattr(m, "values") else m.value for m in llm.get_metrics()}


def test_metrics_have_vllms_names_and_sum_over_requests(knowing: LLM):
    assert [metric.name for metric in knowing.get_metrics()] == METRICS
    before = counted(knowing)
    outputs = knowing.generate(PROMPTS, GREEDY, use_tqdm=False)
    after = counted(knowing)
    more = {name: after[name] - before[name] for name in METRICS if "per_pos" not in name}
    reports: list[Any] = [output.outputs[0].speculation for output in outputs]
    assert more["vllm:spec_decode_num_drafts"] == sum(r.counts.steps for r in reports)
    assert more["vllm:spec_decode_num_draft_tokens"] == sum(r.counts.num_verified for r in reports)
    num_accepted = sum(r.counts.num_accepted for r in reports)
    assert more["vllm:spec_decode_num_accepted_tokens"] == num_accepted > 0
    assert sum(after[METRICS[3]]) == after["vllm:spec_decode_num_accepted_tokens"]
    assert more["vllm:prompt_tokens"] == sum(len(output.prompt_token_ids) for output in outputs)
    assert more["vllm:generation_tokens"] == sum(map(len, answers(outputs)))
    assert more["strobe:spec_decode_drafts_made"] == sum(r.counts.num_proposed for r in reports)
    assert more["strobe:spec_decode_rested_steps"] == 0
    assert more["strobe:engine_steps"] == 1 + max(r.counts.steps for r in reports)
    assert more["vllm:num_preemptions"] == 0


VERIFY = re.compile(
    r"verify request=(\S+) accepted=(\d+)/(\d+) committed=(\d+) acceptance_rate=(\d\.\d{3})"
)


def test_every_verify_step_logs_one_debug_line(knowing: LLM, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "strobe"):
        knowing.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, "strobe"):
        (output,) = knowing.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    got: Any = output.outputs[0].speculation
    counts = got.counts
    lines = [VERIFY.fullmatch(r.getMessage()) for r in caplog.records if r.name[:6] == "strobe"]
    assert len(lines) == counts.steps
    accepted = drafted = 0
    for line in lines:
        assert line is not None
        assert line[1] == output.request_id
        assert int(line[4]) == int(line[2]) + 1
        accepted, drafted = accepted + int(line[2]), drafted + int(line[3])
        assert line[5] == f"{accepted / drafted:.3f}"
    assert (accepted, drafted) == (counts.num_accepted, counts.num_verified)


def test_demo_models_answer_and_draft_well():
    demo = LLM()
    (output,) = demo.chat(
        [{"role": "user", "content": "Sort these words: pear, apple, fig"}],
        SamplingParams(temperature=0, max_tokens=200),
        use_tqdm=False,
        chat_template_kwargs={"enable_thinking": False},
    )
    (answer,) = output.outputs
    assert answer.finish_reason == "stop"
    assert answer.text.index("apple") < answer.text.index("fig") < answer.text.rindex("pear")
    assert answer.speculation is not None
    length = answer.speculation.counts.acceptance_length
    assert length is not None
    assert length > 3  # measured 8.7
    assert demo.get_tokenizer() is demo.tokenizer.hf
    assert_idle(demo)


def test_shadow_mode_needs_a_server():
    with pytest.raises(ValueError, match="shadow is True, but only a server reports its scores"):
        LLM(shadow=True, device="cpu")
