"""The offline API: logprobs, logits processors and structured outputs."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from strobe import LLM, SamplingParams
from strobe.outputs import CompletionOutput, Logprob, RequestOutput
from tests.support.bookkeeping_checks import check_engine
from tests.support.text_pair import EOS_IDS, Pair

GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=1, max_tokens=20, seed=7)
PROMPTS = ["hello there", "Sort these words: pear, apple, fig", "7 * 8 ="]

SCHEMA = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["cat", "dog", "zebra"]},
        "legs": {"type": "integer", "minimum": 0, "maximum": 9},
        "tame": {"type": "boolean"},
    },
    "required": ["animal", "legs", "tame"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(pair: Pair) -> LLM:
    return LLM(pair.target, pair.draft, device="cpu", adaptive=False)


@pytest.fixture(autouse=True)
def _idle(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    assert llm.engine.components.pool.available == llm.engine.components.pool.capacity
    check_engine(llm.engine)


def generate(llm: LLM, prompt: Any, params: Any) -> list[RequestOutput]:
    return llm.generate(prompt, params, use_tqdm=False)


def answer(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    return generate(llm, prompt, params)[0].outputs[0]


SPECULATION = [None, False, {"method": "ngram"}, {"num_drafts": 2}]


# log probabilities


@pytest.fixture(scope="module")
def hf(pair: Pair) -> Any:
    return AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()


def true_logprobs(hf: Any, tokens: list[int]) -> torch.Tensor:
    """Return transformers' log probabilities after each token, [T, V]."""
    with torch.no_grad():
        return hf(torch.tensor([tokens])).logits[0].log_softmax(-1)


def check_entry(llm: LLM, entry: dict[int, Logprob], row: torch.Tensor, token: int, top: int):
    assert next(iter(entry)) == token
    assert top <= len(entry) <= top + 1
    for candidate, logprob in entry.items():
        assert math.isclose(logprob.logprob, row[candidate].item(), abs_tol=1e-4)
        decoded = llm.tokenizer.decode([candidate], skip_special_tokens=False)
        assert logprob.decoded_token == decoded
        assert logprob.rank == int((row > row[candidate]).sum()) + 1
    assert {logprob.rank for logprob in entry.values()} >= set(range(1, top + 1))


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
@pytest.mark.parametrize("params", [GREEDY, WARM.clone(n=2)], ids=["greedy", "sampled"])
def test_logprobs_have_vllms_form_and_transformers_values(
    llm: LLM, hf: Any, params: SamplingParams, speculation: Any
):
    sampling = params.clone(logprobs=3, prompt_logprobs=2, speculation=speculation)
    for output in generate(llm, PROMPTS, sampling):
        prompt = output.prompt_token_ids
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for completion in output.outputs:
            truth = true_logprobs(hf, [*prompt, *completion.token_ids])
            assert completion.logprobs is not None
            assert len(completion.logprobs) == len(completion.token_ids)
            entries = zip(
                truth[len(prompt) - 1 :], completion.token_ids, completion.logprobs, strict=False
            )
            for row, token, entry in entries:
                check_entry(llm, entry, row, token, 3)
            own = [
                e[t].logprob for e, t in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            assert math.isclose(completion.cumulative_logprob or 0, sum(own), abs_tol=1e-9)
        for row, token, entry in zip(truth, prompt[1:], output.prompt_logprobs[1:], strict=False):
            assert entry is not None
            check_entry(llm, entry, row, token, 2)


@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
def test_named_tokens_have_transformers_values_beside_top_tokens(
    llm: LLM, hf: Any, speculation: Any
):
    named = [2000, 7, 300]
    ask = WARM.clone(logprob_token_ids=named, speculation=speculation)
    params = [ask, WARM.clone(logprobs=3), ask.clone(logprobs=0, logprob_token_ids=named[:1])]
    outputs = generate(llm, [PROMPTS[0]] * 3, params)
    for output, ids in zip(outputs, (named, None, named[:1]), strict=True):
        (completion,) = output.outputs
        assert completion.token_ids == outputs[0].outputs[0].token_ids
        truth = true_logprobs(hf, [*output.prompt_token_ids, *completion.token_ids])
        rows = truth[len(output.prompt_token_ids) - 1 :]
        assert completion.logprobs is not None
        for row, token, entry in zip(rows, completion.token_ids, completion.logprobs, strict=False):
            if ids is None:
                check_entry(llm, entry, row, token, 3)
                continue
            assert list(entry) == [token, *(t for t in ids if t != token)]
            assert entry[token].rank == int((row > row[token]).sum()) + 1
            for candidate, logprob in entry.items():
                assert math.isclose(logprob.logprob, row[candidate].item(), abs_tol=1e-4)
                assert candidate == token or logprob.rank is None


def test_logprobs_are_none_by_default(llm: LLM):
    (output,) = generate(llm, PROMPTS[0], GREEDY)
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_zero_logprobs_return_only_the_token_itself(llm: LLM):
    (output,) = generate(llm, PROMPTS[0], GREEDY.clone(logprobs=0, prompt_logprobs=0))
    completion = output.outputs[0]
    assert [list(entry) for entry in completion.logprobs or []] == [
        [t] for t in completion.token_ids
    ]
    scores = output.prompt_logprobs or []
    assert [list(entry or []) for entry in scores[1:]] == [[t] for t in output.prompt_token_ids[1:]]


def test_logprobs_are_unaffected_by_processors(llm: LLM, hf: Any):
    processors: dict[str, Any] = {
        "logit_bias": {300: 100.0},
        "presence_penalty": 2.0,
        "temperature": 0.7,
        "top_k": 2,
        "logprobs": 0,
    }
    (output,) = generate(llm, PROMPTS[0], WARM.clone(**processors))
    completion = output.outputs[0]
    truth = true_logprobs(hf, [*output.prompt_token_ids, *completion.token_ids])
    assert completion.token_ids[0] == 300
    for i, (token, entry) in enumerate(
        zip(completion.token_ids, completion.logprobs or [], strict=True)
    ):
        row = truth[len(output.prompt_token_ids) - 1 + i]
        check_entry(llm, entry, row, token, 0)
    assert any(
        (entry[t].rank or 0) > 50
        for t, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    )


def test_stop_string_truncates_logprobs_with_the_tokens(llm: LLM):
    full = answer(llm, PROMPTS[0], GREEDY.clone(logprobs=1))
    middle = len(full.text) // 2
    stop = full.text[middle : middle + 3]
    cut = answer(llm, PROMPTS[0], GREEDY.clone(logprobs=1, stop=stop))
    assert cut.stop_reason == stop
    size = len(cut.token_ids)
    assert size < len(full.token_ids)
    assert [list(e) for e in cut.logprobs or []] == [list(e) for e in full.logprobs or []][:size]
    own = [e[t].logprob for e, t in zip(cut.logprobs or [], cut.token_ids, strict=True)]
    assert math.isclose(cut.cumulative_logprob or 0, sum(own), abs_tol=1e-9)


def test_stream_deltas_carry_score_and_piece_per_token(llm: LLM):
    params = GREEDY.clone(logprobs=1)
    expected = answer(llm, PROMPTS[1], params)
    deltas = list(llm.stream(PROMPTS[1], params))
    assert all(len(d.token_ids) == len(d.logprobs) == len(d.pieces) for d in deltas)
    assert "".join(piece for d in deltas for piece in d.pieces) == expected.text
    assert [entry.token for d in deltas for entry in d.logprobs] == expected.token_ids
    assert all(0 <= d.num_accepted <= min(d.num_verified, len(d.token_ids)) for d in deltas)
    assert expected.speculation is not None
    assert sum(d.num_verified for d in deltas) == expected.speculation.counts.num_verified
    assert deltas[-1].output.logprobs == expected.logprobs


def test_stream_rejects_prompt_logprobs(llm: LLM):
    with pytest.raises(ValueError, match=r"prompt_logprobs is 0, .*use generate"):
        next(llm.stream(PROMPTS[1], GREEDY.clone(prompt_logprobs=0)))


def test_prompt_logprobs_with_zero_max_tokens(llm: LLM, hf: Any):
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=1)
    for speculation in SPECULATION:
        for output in generate(llm, PROMPTS, params.clone(speculation=speculation)):
            completion = output.outputs[0]
            assert (completion.text, completion.token_ids, completion.finish_reason) == (
                "",
                [],
                "length",
            )
            assert (completion.logprobs, completion.cumulative_logprob) == ([], 0.0)
            truth = true_logprobs(hf, output.prompt_token_ids)
            scores = (output.prompt_logprobs or [])[1:]
            for row, token, entry in zip(truth, output.prompt_token_ids[1:], scores, strict=False):
                assert entry is not None
                check_entry(llm, entry, row, token, 1)
    output = generate(llm, [[300]], params)[0]
    assert output.prompt_logprobs == [None]


def test_empty_answer_reports_why_nothing_was_drafted(llm: LLM):
    report = answer(llm, PROMPTS[0], SamplingParams(max_tokens=0)).speculation
    assert report is not None
    assert (report.used, report.counts.steps) == (False, 0)
    assert report.off_reason == "the answer ended before the first draft"


# logits processors


def test_logit_bias_and_allowed_token_ids(llm: LLM):
    assert set(answer(llm, PROMPTS[0], GREEDY.clone(logit_bias={300: 100})).token_ids) == {300}
    allowed = [310, 311, 312, 313]
    for params in (GREEDY, WARM):
        tokens = answer(llm, PROMPTS[0], params.clone(allowed_token_ids=allowed)).token_ids
        assert len(tokens) == params.max_tokens
        assert set(tokens) <= set(allowed)
    free = answer(llm, PROMPTS[0], GREEDY).token_ids
    banned = answer(llm, PROMPTS[0], GREEDY.clone(logit_bias=dict.fromkeys(free, -100)))
    assert not set(banned.token_ids) & set(free)


@pytest.mark.parametrize(
    "rule", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"repetition_penalty": 50.0}]
)
def test_penalties_reduce_repetition(llm: LLM, rule: dict[str, float]):
    params = GREEDY.clone(logit_bias=dict.fromkeys(range(300, 340), 60.0), max_tokens=30)
    plain = answer(llm, PROMPTS[0], params).token_ids
    varied = answer(llm, PROMPTS[0], params.clone(**rule)).token_ids
    assert len(set(varied)) > len(set(plain))


# structured output


def matches_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"animal", "legs", "tame"}
        and value["animal"] in ("cat", "dog", "zebra")
        and value["legs"] in range(10)
        and isinstance(value["tame"], bool)
    )


FORMS: list[tuple[dict[str, Any], Any]] = [
    ({"json": SCHEMA}, matches_schema),
    ({"json": json.dumps(SCHEMA)}, matches_schema),
    ({"regex": r"[a-z]{3,8}-\d{2}"}, re.compile(r"[a-z]{3,8}-\d{2}").fullmatch),
    ({"choice": ["yes", "no", "maybe so"]}, lambda text: text in ("yes", "no", "maybe so")),
    ({"grammar": 'start: "<" /[a-d]{2,5}/ ">"'}, re.compile("<[a-d]{2,5}>").fullmatch),
    ({"grammar": 'root ::= "<" [a-d] [a-d]? ">"'}, re.compile("<[a-d]{1,2}>").fullmatch),
]


@pytest.mark.parametrize(("form", "fits"), FORMS, ids=[str(form)[:20] for form, _ in FORMS])
def test_structured_answer_is_valid_for_every_method(llm: LLM, form: dict[str, Any], fits: Any):
    for params in (GREEDY.clone(max_tokens=300), WARM.clone(max_tokens=300, n=2, temperature=2)):
        results = []
        for speculation in SPECULATION:
            sampling = params.clone(structured_outputs=form, speculation=speculation)
            results.append([a for o in generate(llm, PROMPTS, sampling) for a in o.outputs])
        for answers in results:
            assert [a.token_ids for a in answers] == [a.token_ids for a in results[0]]
            assert {a.finish_reason for a in answers} == {"stop"}
            assert all(fits(a.text) for a in answers)
            assert all(a.token_ids[-1] in EOS_IDS for a in answers)


def test_any_json_object_parses(llm: LLM):
    """Few characters are allowed, so that a random model reaches the end."""
    ids = [llm.tokenizer.encode(c, add_special_tokens=False)[0] for c in '{}[],:"ab1']
    params = WARM.clone(
        structured_outputs={"json_object": True},
        allowed_token_ids=[*ids, *EOS_IDS],
        max_tokens=80,
        temperature=20,
    )
    texts = set[str]()
    for seed in range(8):
        completion = answer(llm, PROMPTS[1], params.clone(seed=seed))
        if completion.finish_reason == "stop":
            texts.add(completion.text)
            assert isinstance(json.loads(completion.text), dict)
    assert len(texts) > 2


def test_demo_models_draft_json_as_well_as_text():
    demo = LLM()
    text = "Give the name and the age as JSON: Anna is 30 years old and lives in Rome."
    texts, lengths = [], []
    for form in (None, {"json_object": True}):
        (output,) = demo.chat(
            [{"role": "user", "content": text}],
            SamplingParams(temperature=0, max_tokens=100, structured_outputs=form),
            use_tqdm=False,
            chat_template_kwargs={"enable_thinking": False},
        )
        (completion,) = output.outputs
        assert completion.finish_reason == "stop"
        assert json.loads(completion.text)["name"] == "Anna"
        assert completion.speculation is not None
        texts.append(completion.text)
        lengths.append(completion.speculation.counts.acceptance_length or 0)
    assert texts[0] == texts[1]
    assert min(lengths) > 3  # measured 10.0 with both


# errors

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {2048: 1}}, "logit_bias holds token id 2048, but the vocabulary has ids 0 to"),
    ({"allowed_token_ids": [5, 9999]}, "allowed_token_ids holds token id 9999"),
    ({"logprob_token_ids": [2048]}, "logprob_token_ids holds token id 2048"),
    ({"structured_outputs": {"regex": "(a"}}, "the grammar does not compile: .*unclosed group"),
    ({"structured_outputs": {"json": {"type": "hamster"}}}, "does not compile: .*hamster"),
    ({"structured_outputs": {"regex": "a", "think_end": [9999]}}, "think_end holds token id 9999"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=[str(f)[:40] for f, _ in WRONG])
def test_unrunnable_prompt_fails_alone_in_a_batch(llm: LLM, fields: dict[str, Any], message: str):
    alone = answer(llm, PROMPTS[0], GREEDY)
    params = [GREEDY, GREEDY.clone(**fields, n=2), GREEDY.clone(structured_outputs={"regex": "a"})]
    first, wrong, last = generate(llm, [PROMPTS[0]] * 3, params)
    assert first.outputs[0].token_ids == alone.token_ids
    assert last.outputs[0].text == "a"
    assert [a.finish_reason for a in wrong.outputs] == ["error", "error"]
    for completion in wrong.outputs:
        assert re.search(message, str(completion.error)), completion.error
        assert str(completion.error).endswith(".")
        assert completion.token_ids == []
    with pytest.raises(ValueError, match=message):
        next(llm.stream(PROMPTS[0], GREEDY.clone(**fields)))


def test_missing_tokenizer_json_matters_for_grammars_only(pair: Pair, tmp_path: Path):
    llm = LLM(pair.copied(tmp_path).target)
    shutil.move(tmp_path / "target" / "tokenizer.json", tmp_path / "elsewhere.json")
    completion = answer(llm, PROMPTS[0], GREEDY.clone(structured_outputs={"regex": "a"}))
    assert completion.finish_reason == "error"
    assert re.search(
        r"tokenizer\.json, which does not exist; save the tokenizer", str(completion.error)
    )
    assert answer(llm, PROMPTS[0], GREEDY).finish_reason != "error"
