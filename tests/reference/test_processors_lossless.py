"""Every logits processor, every grammar and every log probability, while speculating.

The same tokens must come from three sources: plain Python over transformers' logits, one token at a
time; plain decoding, one request at a time; and every way to draft, schedule and store. Each pair
of the values below occurs in at least one run.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from tokenizers import Tokenizer
from torch import Tensor

from strobe.config import EngineConfig
from strobe.engine.engine import Engine
from strobe.request import Request, TokenLogprob
from strobe.sampling.grammar_compiler import GrammarCompiler, grammar_source
from strobe.sampling.noise import noise_key
from strobe.sampling_params import SamplingParams
from tests.support import reference_processors
from tests.support.bookkeeping_checks import check_engine
from tests.support.engine_runs import drain, make_engine, run
from tests.support.pairwise import all_pairs, covering, pairs_of
from tests.support.reference_sampling import race
from tests.support.scripted_drafting import Scripted, adversary, oracle, wavering
from tests.support.step_failures import fail_calls, run_with_failures
from tests.support.tiny_checkpoints import EOS_IDS, VOCAB, edit_json, make_tokenizer, pool_bytes
from tests.support.transformers_parity import greedy

LENGTH = 80
"""max_model_len of every engine here."""

PROPOSERS = "dflash", "ngram", "oracle", "adversary", "wavering"
SCRIPTS = {"oracle": oracle, "adversary": adversary, "wavering": wavering}

DIMENSIONS: dict[str, tuple[Any, ...]] = {
    "feature": ("penalties", "bias", "logprobs", "json", "texts", "everything"),
    "proposer": PROPOSERS,
    "drafts": (1, 3, 7),
    "overlap": (1, 2),
    "pool": ("ample", "tiny"),
    "caching": (True, False),
    "rows": ("tight", "ample"),
    "seqs": (1, 4),
}


@dataclass(frozen=True)
class Combination:
    """One run: a value of each dimension."""

    feature: str
    proposer: str
    drafts: int
    overlap: int
    pool: str
    caching: bool
    rows: str
    seqs: int

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())

    @property
    def preempts(self) -> bool:
        return self.pool == "tiny" and self.seqs > 1


def relative_time(values: Mapping[str, Any]) -> float:
    """Estimate a run's time: one request at a time takes more steps."""
    return 5.0 if values["seqs"] == 1 else 3.0


def fast_combinations() -> list[Combination]:
    """Return a covering set that takes little time. It begins with combinations in which requests
    preempt each other, one of each feature."""
    rng = random.Random(4)
    first: list[dict[str, Any]] = []
    for feature, proposer in zip(DIMENSIONS["feature"], rng.sample(PROPOSERS * 2, 6), strict=True):
        values = {name: rng.choice(values) for name, values in DIMENSIONS.items()}
        fixed = {"feature": feature, "proposer": proposer, "pool": "tiny", "seqs": 4}
        first.append(values | fixed)
    found = covering(DIMENSIONS, rng, tries=200, first=first, time=relative_time)
    return [Combination(**values) for values in found]


def combinations() -> list[Combination]:
    """Return a covering set, and more combinations in which requests preempt each other."""
    rng = random.Random(4)
    chosen = [Combination(**values) for values in covering(DIMENSIONS, rng)]
    for feature in DIMENSIONS["feature"]:
        values = {name: rng.choice(values) for name, values in DIMENSIONS.items()}
        values |= {"feature": feature, "pool": "tiny", "seqs": 4, "proposer": "wavering"}
        chosen.append(Combination(**values))
    return chosen


FAST = fast_combinations()
COMBINATIONS = [
    *(
        pytest.param(c, id=str(c), marks=[] if i < 6 or i % 2 else [pytest.mark.full])
        for i, c in enumerate(FAST)
    ),
    *(pytest.param(c, id=f"{c}-slow", marks=pytest.mark.full) for c in combinations()),
]


def test_every_pair_of_values_occurs():
    for chosen in (FAST, combinations()):
        assert set().union(*(pairs_of(vars(c)) for c in chosen)) == all_pairs(DIMENSIONS)
        assert {c.feature for c in chosen if c.preempts} == set(DIMENSIONS["feature"])


# requests

Job = tuple[list[int], SamplingParams]

COLD = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
STOPS = COLD.clone(ignore_eos=False)
WARM = SamplingParams(temperature=1.0, max_tokens=18, seed=7)

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["yes", "no"]}},
    "required": ["a"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3,6}( [0-9]+)?"
CHOICES = ("yes", "no", "abba", "trueue")
WORDS = r"\[[a-c]+(,[a-c]+)*\]"
LARK = 'start: "[" word ("," word)* "]"\nword: /[a-c]+/'
GBNF = 'root ::= "[" word ("," word)* "]"\nword ::= [a-c]+'
MARKER = (13, 5)


def prompts() -> list[list[int]]:
    """Return nine prompts: some share a prefix, one is a single token."""
    noise = torch.Generator().manual_seed(9)
    texts = [torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (5, 33, 12, 1, 20)]
    return [*texts, [*texts[1][:32], 3], [*texts[1][:17], 8], [4, 9, 2] * 5, [*texts[1][:16], 1, 2]]


def sampling_params() -> dict[str, list[SamplingParams]]:
    """Return the sampling parameters of each feature's requests, mixed with plain ones."""
    every = {"presence_penalty": 0.9, "frequency_penalty": 0.7, "repetition_penalty": 1.4}
    allowed = list(range(0, VOCAB, 3))
    scored = STOPS.clone(logprobs=2, prompt_logprobs=3)
    kinds: dict[str, list[SamplingParams]] = {
        "penalties": [
            COLD.clone(presence_penalty=2.0),
            COLD.clone(frequency_penalty=1.5, max_tokens=30),
            COLD.clone(repetition_penalty=1.7),
            COLD.clone(presence_penalty=-1.0, frequency_penalty=-0.5, repetition_penalty=0.8),
            COLD.clone(**every),
            COLD,
            WARM.clone(**every, n=2),
            WARM.clone(frequency_penalty=-2.0, top_p=0.9),
            STOPS.clone(**every, min_tokens=12, stop_token_ids=list(range(0, VOCAB, 2))),
        ],
        "bias": [
            COLD.clone(logit_bias={3: 6.0, 9: -100.0, 30: 5.0}),
            COLD.clone(allowed_token_ids=allowed),
            COLD.clone(allowed_token_ids=[5], max_tokens=9),
            STOPS.clone(logit_bias={EOS_IDS[0]: 4.0}, min_tokens=6),
            COLD.clone(allowed_token_ids=allowed, logit_bias={3: 3.0, 4: 100.0}, **every),
            COLD,
            WARM.clone(logit_bias=dict.fromkeys(range(20), 2.0), n=2),
            WARM.clone(allowed_token_ids=allowed, top_k=5),
            WARM.clone(logit_bias={1: -100, 2: 2.5}, presence_penalty=-2.0, min_tokens=18),
        ],
        "logprobs": [
            COLD.clone(logprobs=0),
            COLD.clone(logprobs=3, prompt_logprobs=0),
            STOPS.clone(prompt_logprobs=5, logprobs=VOCAB),
            COLD.clone(prompt_logprobs=1),
            WARM.clone(logprobs=2, prompt_logprobs=2, n=2),
            COLD,
            COLD.clone(max_tokens=0, prompt_logprobs=2, logprobs=1),
            WARM.clone(logprobs=1, **every, allowed_token_ids=allowed),
            WARM.clone(top_k=4),
        ],
        "json": [
            STOPS.clone(structured_outputs={"json": SCHEMA}, max_tokens=40),
            STOPS.clone(structured_outputs={"json": json.dumps(SCHEMA)}, logit_bias={48: -9.0}),
            STOPS.clone(structured_outputs={"json_object": True}, max_tokens=30),
            COLD,
            WARM.clone(structured_outputs={"json": SCHEMA}, n=2, max_tokens=40),
            WARM.clone(structured_outputs={"json_object": True}, temperature=2.0),
            scored.clone(structured_outputs={"json": SCHEMA}),
            WARM,
            STOPS.clone(structured_outputs={"json": SCHEMA, "think_end": MARKER, "think_start": 2}),
        ],
        "texts": [
            STOPS.clone(structured_outputs={"regex": REGEX}),
            STOPS.clone(structured_outputs={"choice": CHOICES}),
            STOPS.clone(structured_outputs={"grammar": LARK}, max_tokens=30, **every),
            WARM.clone(structured_outputs={"grammar": GBNF}, n=2, temperature=2.0),
            COLD,
            STOPS.clone(
                structured_outputs={"regex": REGEX, "think_end": MARKER},
                logit_bias=dict.fromkeys(MARKER, 4.0),
                presence_penalty=2.0,
            ),
            WARM.clone(structured_outputs={"choice": CHOICES}, min_tokens=9, logprobs=1),
            STOPS.clone(structured_outputs={"regex": "[xyz]*"}, allowed_token_ids=[1, 2]),
            WARM.clone(structured_outputs={"regex": REGEX, "prefix": "no "}, top_k=3),
        ],
    }
    kinds["everything"] = [
        kinds["penalties"][6],
        kinds["bias"][4],
        kinds["json"][0].clone(**every),
        scored.clone(**every, n=2, ignore_eos=True),
        COLD,
        kinds["texts"][3].clone(logprobs=0),
        WARM.clone(n=2),
        kinds["json"][4].clone(prompt_logprobs=0, presence_penalty=0.4, n=1),
        STOPS.clone(min_tokens=10, logit_bias={EOS_IDS[1]: 9.0}, frequency_penalty=1.0),
    ]
    return kinds


SAMPLING = sampling_params()
PROMPTS = prompts()


def jobs(feature: str) -> list[Job]:
    return list(zip(PROMPTS, SAMPLING[feature], strict=True))


# the reference


class Reader(NamedTuple):
    """transformers' model of the tiny target, and a checkpoint of it with a tokenizer."""

    hf: Any
    path: Path

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits of every position, [T, V]."""
        return logits_of(self, tuple(tokens))


@cache
def logits_of(reader: Reader, tokens: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        return reader.hf(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module")
def reader(target: Any, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    path = tmp_path_factory.mktemp("reader") / "target"
    shutil.copytree(target.path, path)
    make_tokenizer(path)
    return Reader(target.hf, path)


class GrammarReader:
    """The tokens that a request's grammar allows, from a matcher that reads one token at a time."""

    def __init__(self, grammars: GrammarCompiler, structured: Any):
        self.wanted = structured
        self.matcher = LLMatcher(grammars.tokenizer, grammar_source(structured), log_level=0)

    def allowed(self, output: Sequence[int]) -> set[int]:
        """Return the token ids allowed after `output`, one token longer than in the last call."""
        think_end = list(self.wanted.think_end)
        think_start = self.wanted.think_start
        thinks = bool(think_end) and (think_start is None or list(output[:1]) == [think_start])
        size = len(think_end)
        ends = [i for i in range(size, len(output) + 1) if list(output[i - size : i]) == think_end]
        if thinks and not ends:
            return set(range(VOCAB))
        read = output[ends[0] :] if thinks else output
        if read:
            assert self.matcher.consume_token(read[-1]), "the answer left its grammar"
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        tokens = set(np.flatnonzero(np.unpackbits(bits, bitorder="little")[:VOCAB]).tolist())
        return tokens | {think_start} if think_start is not None and not output else tokens


def check_tokens(reader: Reader, job: Job, sibling: int, output: list[int]) -> tuple[int, int]:
    """Check that each token follows from transformers' logits, slow processors and the noise;
    return the number of tokens, and of those too near a tie to check."""
    prompt, sampling = job
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else EOS_IDS)}
    key = noise_key(sampling.seed or 0, sibling) % 2**64
    grammars = GrammarCompiler(reader.path / "tokenizer.json", VOCAB, EOS_IDS)
    structured = sampling.structured_outputs
    reading = None if structured is None else GrammarReader(grammars, structured)
    unsure = 0
    logits = reader.logits([*prompt, *output])
    for i, token in enumerate(output):
        row = logits[len(prompt) + i - 1].tolist()
        row = reference_processors.processed(row, sampling, prompt, output[:i], ends)
        if reading is not None:
            row = reference_processors.within(row, reading.allowed(output[:i]))
        if sampling.temperature == 0:
            best = max(row)
            unsure += sum(x > best - 1e-4 for x in row) > 1 and best != 0
            assert row[token] >= best - 1e-4, (sampling, i)
        else:
            filters = sampling.top_k, sampling.top_p
            expected, margin = race(row, sampling.temperature, key, len(prompt) + i, *filters)
            if margin < 1e-3:
                unsure += 1
            else:
                assert token == expected, (sampling, i)
        stops = token in ends and (structured is not None or i >= sampling.min_tokens)
        assert stops <= (i == len(output) - 1), "the answer went on after its end"
    if len(output) < (sampling.max_tokens or 0):
        assert output[-1] in ends
    return len(output), unsure


class Output(NamedTuple):
    """The output of one sibling."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob | None]
    finish_reason: str | None


def outputs(
    requests: Sequence[Request], logprobs: dict[Request, list[TokenLogprob]]
) -> list[Output]:
    return [Output(r.output_ids, logprobs[r], r.prompt_logprobs, r.finish_reason) for r in requests]


def config(reader: Reader, **options: Any) -> EngineConfig:
    return EngineConfig(target=str(reader.path), max_model_len=LENGTH).with_(**options)


def add(engine: Engine, jobs: Sequence[Job]) -> list[Request]:
    return [
        engine.add(prompt, sampling, sibling=i, seed=sampling.seed)
        for prompt, sampling in jobs
        for i in range(sampling.n)
    ]


@pytest.fixture(scope="module")
def plain(reader: Reader) -> Callable[[str], list[Output]]:
    """Return a function that answers a feature's requests by plain decoding, one at a time."""
    cache: dict[str, list[Output]] = {}

    def get(feature: str) -> list[Output]:
        if feature not in cache:
            options: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False}
            engine = make_engine(config(reader, **options))
            requests = add(engine, jobs(feature))
            cache[feature] = outputs(requests, drain(engine, requests))
        return cache[feature]

    return get


@pytest.mark.parametrize("feature", DIMENSIONS["feature"])
def test_plain_decoding_matches_slow_processors(
    feature: str, reader: Reader, plain: Callable[[str], list[Output]]
):
    answers = iter(plain(feature))
    total = unsure = 0
    for job in jobs(feature):
        for sibling in range(job[1].n):
            answer = next(answers)
            counts = check_tokens(reader, job, sibling, answer.tokens)
            total, unsure = total + counts[0], unsure + counts[1]
            ends = {*job[1].stop_token_ids, *(() if job[1].ignore_eos else EOS_IDS)}
            full = len(answer.tokens) == job[1].max_tokens
            assert answer.finish_reason == ("length" if full else "stop") or (
                full and answer.tokens[-1] in ends and answer.finish_reason == "stop"
            )
    assert total > 90
    assert unsure <= total / 20


def test_processors_change_answers_and_grammars_finish(
    reader: Reader, plain: Callable[[str], list[Output]]
):
    """Otherwise the comparisons would prove little."""
    for feature in ("penalties", "bias"):
        outputs_left = iter(plain(feature))
        for prompt, sampling in jobs(feature):
            answers = [next(outputs_left).tokens for _ in range(sampling.n)]
            if sampling != COLD and sampling.temperature == 0:
                assert answers[0] != greedy(reader.hf, prompt, 20, eos_token_id=None)
            assert len(set(map(tuple, answers))) == sampling.n
    fast = Tokenizer.from_file(str(reader.path / "tokenizer.json"))
    texts = [fast.decode(answer.tokens) for answer in plain("texts")]
    assert re.fullmatch(REGEX, texts[0])
    assert texts[1] in CHOICES
    assert any(re.fullmatch(WORDS, text) for text in texts[2:5])
    finished = [a for a in plain("json") + plain("everything") if a.finish_reason == "stop"]
    assert len(finished) > 3
    parsed = [json.loads(fast.decode(plain("json")[i].tokens)) for i in (0, 4)]
    assert all(isinstance(value["a"], bool) for value in parsed)


@pytest.mark.parametrize("strength", [0.7, 1.3, 3.0])
def test_repetition_penalty_matches_transformers(strength: float, reader: Reader):
    engine = make_engine(config(reader, method="ngram", num_drafts=3))
    sampling = COLD.clone(repetition_penalty=strength, max_tokens=24)
    for prompt, tokens in zip(PROMPTS[:4], run(engine, PROMPTS[:4], sampling), strict=True):
        expected = greedy(reader.hf, prompt, 24, eos_token_id=None, repetition_penalty=strength)
        assert tokens == expected


# log probabilities


def check_scores(rows: Tensor, tokens: Sequence[int], scores: Sequence[Any], top: int) -> None:
    """Compare with transformers' logits before each token, rows [n, V]."""
    expected = rows.log_softmax(-1)
    assert len(scores) == len(tokens) == len(expected)
    for row, token, score in zip(expected, tokens, scores, strict=True):
        assert score.token == token
        assert abs(score.logprob - row[token].item()) < 1e-4
        ranks = [int((row > row[token] + edge).sum()) + 1 for edge in (1e-5, -1e-5)]
        assert ranks[0] <= score.rank <= ranks[1]
        ids, values = [i for i, _ in score.top], [v for _, v in score.top]
        assert len(set(ids)) == len(ids) == top
        assert values == sorted(values, reverse=True)
        assert torch.allclose(row[ids], torch.tensor(values), atol=1e-4)
        assert torch.allclose(row.topk(top).values, torch.tensor(values), atol=1e-4)
        if score.rank <= top:
            assert dict(score.top)[token] == score.logprob


def check_logprobs(reader: Reader, job: Job, sibling: int, answer: Output) -> None:
    """Check that log probabilities match transformers' logits, and appear only where requested."""
    (prompt, sampling), tokens = job, answer.tokens
    logits = reader.logits([*prompt, *tokens])
    if sampling.logprobs is None:
        assert not answer.logprobs
    else:
        rows = logits[len(prompt) - 1 : len(prompt) - 1 + len(tokens)]
        check_scores(rows, tokens, answer.logprobs, sampling.logprobs)
    if sampling.prompt_logprobs is None or sibling:
        assert not answer.prompt_logprobs
    else:
        assert answer.prompt_logprobs[0] is None
        rows, scores = logits[: len(prompt) - 1], answer.prompt_logprobs[1:]
        check_scores(rows, prompt[1:], scores, sampling.prompt_logprobs)


@pytest.mark.parametrize("feature", DIMENSIONS["feature"])
def test_plain_logprobs_match_transformers(
    feature: str, reader: Reader, plain: Callable[[str], list[Output]]
):
    check_all_logprobs(reader, feature, plain(feature))


def check_all_logprobs(reader: Reader, feature: str, answers: Sequence[Output]) -> None:
    siblings = [(job, i) for job in jobs(feature) for i in range(job[1].n)]
    for (job, sibling), answer in zip(siblings, answers, strict=True):
        check_logprobs(reader, job, sibling, answer)


# while speculating


def engine_for(c: Combination, reader: Reader, drafter: Path) -> Engine:
    loads = c.proposer == "dflash"
    options: dict[str, Any] = {
        "draft": str(drafter) if loads else None,
        "method": None if loads else "ngram",
        "num_drafts": c.drafts,
        "max_num_seqs": c.seqs,
        "max_num_batched_tokens": c.seqs * (c.drafts + 1) + 3 if c.rows == "tight" else None,
        "page_size": 4,
        "overlap": c.overlap,
        "enable_prefix_caching": c.caching,
    }
    if c.pool == "tiny":
        layers = 2 if loads else 0
        options["kv_cache_memory"] = pool_bytes(LENGTH // 4, 4, drafter_layers=layers)
    script = SCRIPTS.get(c.proposer)
    if script is None:
        return make_engine(config(reader, **options))
    return make_engine(
        config(reader, **options),
        lambda parts, _: Scripted(parts.state, c.drafts, script),
        names=["ngram"],
    )


def check_counts(c: Combination, requests: Sequence[Request]) -> None:
    """The oracle's drafts are all accepted up to the answer's end and the adversary's never, unless
    a grammar forces others."""
    for request in requests:
        counts = request.draft_counts
        if c.proposer == "adversary" and request.sampling.structured_outputs is None:
            assert counts.num_accepted == 0
        if c.proposer == "oracle":
            assert counts.num_verified - counts.num_accepted <= c.drafts
            if not request.num_preemptions and request.num_output:
                assert counts.steps == -(-(request.num_output - 1) // (c.drafts + 1))


@pytest.mark.parametrize("c", COMBINATIONS)
def test_speculation_changes_no_token_and_no_logprob(
    c: Combination,
    reader: Reader,
    draft: Callable[..., Path],
    plain: Callable[[str], list[Output]],
):
    """Runs twice on one engine, so that the second run finds its prefixes cached."""
    expected = plain(c.feature)
    engine = engine_for(c, reader, draft())
    for _ in range(2):
        requests = add(engine, jobs(c.feature))
        if c.proposer in SCRIPTS:
            script: Any = engine.proposers["ngram"]
            for request, answer in zip(requests, expected, strict=True):
                script.answers[request] = request.tokens + answer.tokens
        answers = outputs(requests, drain(engine, requests))
        assert [a.tokens for a in answers] == [a.tokens for a in expected]
        assert [a.finish_reason for a in answers] == [a.finish_reason for a in expected]
        check_all_logprobs(reader, c.feature, answers)
        check_counts(c, requests)
    assert (engine.stats.preemptions > 0) >= c.preempts
    assert engine.stats.draft_counts.num_verified > 0
    if c.proposer == "wavering" and c.drafts > 1:
        assert 0 < engine.stats.draft_counts.num_accepted < engine.stats.draft_counts.num_verified


def scripted(reader: Reader, drafts: int, **options: Any) -> tuple[Engine, dict[Request, Any]]:
    """Return an engine whose drafts are always right, and the answers it drafts from."""
    engine = make_engine(
        config(reader, method="ngram", num_drafts=drafts, page_size=4, **options),
        lambda parts, _: Scripted(parts.state, drafts, oracle),
        names=["ngram"],
    )
    script: Any = engine.proposers["ngram"]
    return engine, script.answers


@pytest.mark.parametrize("drafts", [1, 7])
@pytest.mark.parametrize("feature", DIMENSIONS["feature"])
def test_correct_drafts_are_all_accepted_with_every_feature(
    feature: str, drafts: int, reader: Reader, plain: Callable[[str], list[Output]]
):
    engine, answers = scripted(reader, drafts, overlap=2)
    requests = add(engine, jobs(feature))
    for request, answer in zip(requests, plain(feature), strict=True):
        answers[request] = request.tokens + answer.tokens
    drain(engine, requests)
    assert engine.stats.preemptions == 0
    for request in requests:
        counts, num_decoded = request.draft_counts, max(request.num_output - 1, 0)
        assert counts.steps == -(-num_decoded // (drafts + 1))
        assert counts.num_verified == counts.steps * drafts
        excess = counts.steps * (drafts + 1) - num_decoded  # drafts past the answer's end
        assert counts.num_accepted >= counts.num_verified - excess


# edge cases


def test_prompt_preempted_during_scoring_gets_all_scores(reader: Reader):
    noise = torch.Generator().manual_seed(3)
    short, long = (torch.randint(0, VOCAB, (n,), generator=noise).tolist() for n in (5, 56))
    engine, answers = scripted(
        reader,
        7,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        kv_cache_memory=pool_bytes(LENGTH // 4, 4),
        enable_prefix_caching=False,
    )
    short_request = engine.add(short, COLD.clone(max_tokens=None))
    answers[short_request] = short + greedy(reader.hf, short, LENGTH - 5, eos_token_id=None)
    sampling = COLD.clone(max_tokens=4, prompt_logprobs=2, logprobs=1)
    scored_request = engine.add(long, sampling)
    seen: list[tuple[int, int]] = []
    logprobs = drain(
        engine,
        [short_request, scored_request],
        each_step=lambda _: seen.append(
            (scored_request.num_preemptions, len(scored_request.prompt_logprobs))
        ),
    )
    assert any(preempted and 1 < num_scores < 56 for preempted, num_scores in seen)
    assert scored_request.output_ids == greedy(reader.hf, long, 4, eos_token_id=None)
    answer = outputs([scored_request], logprobs)[0]
    check_logprobs(reader, (long, sampling), 0, answer)


def test_prompt_scoring_skips_the_prefix_cache(reader: Reader):
    prompt = [*range(30), 3, 1]
    engine = make_engine(config(reader, page_size=4))
    sampling = COLD.clone(max_tokens=2)
    for scores, cached in ((None, 0), (None, 28), (1, 0), (None, 28), (0, 0)):
        job = (prompt, sampling.clone(prompt_logprobs=scores))
        requests = add(engine, [job])
        (answer,) = outputs(requests, drain(engine, requests))
        check_logprobs(reader, job, 0, answer)
        assert requests[0].num_cached == cached


@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("place", ["sample", "count_tokens"])
def test_failed_step_counts_no_token_twice(
    place: str, overlap: int, reader: Reader, plain: Callable[[str], list[Output]]
):
    engine, answers = scripted(reader, 3, overlap=overlap, max_num_seqs=3)
    fail_calls(engine.sampling, place, lambda call: call % 3 == 1, has_effect=False)
    expected = plain("everything")
    requests = add(engine, jobs("everything"))
    for request, answer in zip(requests, expected, strict=True):
        answers[request] = request.tokens + answer.tokens
    assert run_with_failures(engine) > 5
    assert [r.output_ids for r in requests] == [a.tokens for a in expected]


def test_stuck_grammar_ends_only_its_request(reader: Reader):
    engine, _ = scripted(reader, 3)
    sampling = STOPS.clone(structured_outputs={"regex": REGEX})
    stuck, other = add(engine, [(PROMPTS[0], sampling), (PROMPTS[2], sampling)])
    engine.step()
    assert stuck.num_output == 1
    (slot,) = [r.slot for r in engine.scheduler.running if r.request is stuck]
    engine.grammars.advance(slot, [VOCAB - 1])  # a token that the grammar forbids
    drain_events = [event for _ in range(40) for event in engine.step()]
    last = next(e for e in drain_events if e.key == stuck.key and e.finish_reason)
    assert (list(last.tokens), last.finish_reason) == ([], "error")
    assert "cannot be followed further" in str(last.error)
    assert last.error == stuck.error
    assert (other.finish_reason, other.error) == ("stop", None)
    assert not engine.has_work
    check_engine(engine)


def test_grammar_end_finishes_the_answer_before_min_tokens(reader: Reader):
    """The grammar has nothing left to write; speculation makes no difference."""
    sampling = STOPS.clone(structured_outputs={"choice": ["no"]}, min_tokens=9)
    outputs = {}
    for drafts in (0, 1, 3, 7):
        engine, answers = scripted(reader, drafts or 1)
        (request,) = add(engine, [(PROMPTS[0], sampling.clone(speculation=drafts > 0))])
        answers[request] = PROMPTS[0] + outputs.get(0, [])
        drain(engine, [request])
        outputs[drafts] = request.output_ids
    tokens = outputs[0]
    assert len(tokens) == 2
    assert tokens[-1] in EOS_IDS
    assert outputs == dict.fromkeys(outputs, tokens)


@pytest.mark.parametrize("overlap", [1, 2])
def test_grammar_walks_after_all_tokens_are_consumed(
    overlap: int, reader: Reader, plain: Callable[[str], list[Output]]
):
    """Also with two steps in flight for requests with grammars."""
    engine, answers = scripted(reader, 3, overlap=overlap)
    requests = add(engine, jobs("everything"))
    for request, answer in zip(requests, plain("everything"), strict=True):
        answers[request] = request.tokens + answer.tokens
    launch, twice, walk = engine.launch, set[Request](), engine.grammars.walk

    def launching(plan: Any) -> Any:
        running = {record.slot: record.request for record in engine.scheduler.running}
        flying = {s.slot for earlier in engine._pending for s in earlier.plan.spans}
        twice.update(running[s.slot] for s in plan.spans if s.slot in flying and s.num_drafts)
        return launch(plan)

    def walking(slots: Any, drafts: Any) -> Any:
        for slot in [slot for slot in slots if slot in engine.grammars._cursors]:
            length = int(engine.state.cursor[slot, 0])
            (record,) = [r for r in engine.scheduler.running if r.slot == slot]
            num_consumed = len(engine.grammars._cursors[slot].output_ids)
            assert (
                num_consumed == max(0, length + 1 - record.request.num_prompt) or not num_consumed
            )
        return walk(slots, drafts)

    engine.launch, engine.grammars.walk = launching, walking
    drain(engine, requests)
    assert bool(twice) == (overlap == 2)
    if overlap == 2:
        assert twice >= {r for r in requests if r.num_output > 8}


PREVIOUS = {
    "stops": [
        COLD.clone(stop_token_ids=list(range(0, VOCAB, 2)), min_tokens=20),
        COLD.clone(stop_token_ids=[1, 3], min_tokens=20),
    ],
    "allowed": [COLD.clone(allowed_token_ids=[5, 6]), COLD.clone(logit_bias={7: 1.0})],
    "bias": [COLD.clone(logit_bias={9: 50.0}), COLD.clone(allowed_token_ids=[9, 10, 11])],
    "penalties": [COLD.clone(presence_penalty=2.0), COLD.clone(frequency_penalty=0.3)],
    "grammar": [
        STOPS.clone(structured_outputs={"choice": ["no"]}),
        STOPS.clone(structured_outputs={"regex": REGEX}),
    ],
}


@pytest.mark.parametrize("name", PREVIOUS)
def test_slot_reuse_clears_processors(name: str, reader: Reader):
    """Both requests use the only slot, one after the other; each must match a run of its own."""
    texts = [PROMPTS[4], PROMPTS[2]]

    def engine() -> Engine:
        return make_engine(config(reader, max_num_seqs=1, method="ngram", num_drafts=2))

    for order in (PREVIOUS[name], PREVIOUS[name][::-1]):
        expected = [
            run(engine(), [t], sampling)[0] for t, sampling in zip(texts, order, strict=True)
        ]
        assert run(engine(), texts, order) == expected


def test_model_without_eos_uses_tokenizer_eos(reader: Reader, tmp_path: Path):
    path = tmp_path / "target"
    shutil.copytree(reader.path, path)
    edit_json(path / "config.json", eos_token_id=None)
    edit_json(path / "generation_config.json", eos_token_id=None)
    engine = make_engine(EngineConfig(target=str(path), max_model_len=LENGTH))
    (end,) = engine.grammars.compiler.tokenizer.eos_tokens
    request = engine.add(PROMPTS[0], STOPS.clone(structured_outputs={"choice": ["no"]}))
    drain(engine, [request])
    assert (request.output_ids[-1], request.finish_reason) == (end, "stop")
    free = engine.add(PROMPTS[0], STOPS.clone(logit_bias={end: 100}))
    drain(engine, [free])
    assert free.finish_reason == "length"
