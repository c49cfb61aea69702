"""Shadow mode: plain answers, and drafters that are scored beside them."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from strobe.config import DEMO_MODELS, EngineConfig
from strobe.engine.build import resolve
from strobe.engine.engine import Engine
from strobe.sampling_params import SamplingParams
from strobe.speculation.shadow.share_account import ShareAccount
from strobe.step import ScoredBlock, Span, TokenEvent
from strobe.text.tokenizer import Tokenizer
from tests.support.draft_heads import to_dflash2, to_dspark
from tests.support.full_marks import full_where
from tests.support.recurrent_checkpoints import make_hybrid
from tests.support.tiny_checkpoints import make_draft, make_target

TEXTS = (
    "Sort these words from A to Z: ocean, stone, umbrella, ember, water, ocean, stone.",
    "Repeat: ocean stone ocean stone ocean stone.",
)
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_model_len": 512,
    "kv_cache_memory": 1 << 24,
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.2},
    "grammar": {
        "temperature": 1.2,
        "structured_outputs": {"regex": "(ocean, |stone, |[a-f]x){20}"},
    },
}


class UnlimitedAccount(ShareAccount):
    """An account that affords every answer, so that tests do not depend on time."""

    def affords_answer(self, num_open: int) -> bool:
        return True

    def affords_block(self) -> bool:
        return True


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    chats = [tokenizer.render([{"role": "user", "content": text}]) for text in TEXTS]
    return [tokenizer.encode_chat(chat) for chat in chats]


@pytest.fixture(scope="module")
def shadow() -> Engine:
    drafter = str(DEMO_MODELS / "draft")
    engine = Engine(EngineConfig(shadow=True, draft=drafter, shadow_share=1.0, **OPTIONS))
    assert engine.shadow is not None
    engine.shadow.start()
    engine.shadow.ledger.account = UnlimitedAccount(1.0)
    return engine


@pytest.fixture(scope="module")
def speculative() -> Engine:
    return Engine(EngineConfig(adaptive=False, **OPTIONS))


def run(engine: Engine, prompts: list[list[int]], **fields: Any) -> dict[int, list[TokenEvent]]:
    """Answer the prompts together; return each answer's events."""
    for key, prompt in enumerate(prompts):
        engine.add_prompt(prompt, SamplingParams(max_tokens=50, **fields), key=key, seed=key)
    events: dict[int, list[TokenEvent]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            events[event.key].append(event)  # pyright: ignore[reportArgumentType]
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def blocks_of(events: list[TokenEvent], drafter: str) -> list[ScoredBlock]:
    return [block for event in events for block in event.scored if block.drafter == drafter]


@full_where(
    lambda method, fields: (method == "ngram") is (list(SAMPLINGS.values()).index(fields) % 2 == 0)
)
@pytest.mark.parametrize("method", ["dflash", "ngram"])
@pytest.mark.parametrize("fields", SAMPLINGS.values(), ids=SAMPLINGS)
def test_scored_blocks_equal_verify_steps(
    shadow: Engine,
    speculative: Engine,
    prompts: list[list[int]],
    fields: Mapping[str, Any],
    method: str,
):
    assert shadow.shadow is not None
    names = {"dflash": "draft", "ngram": "ngram"}
    num_drafts = {d.name: d.num_drafts for d in shadow.shadow.drafters}[names[method]]
    speculation = {"method": method, "num_drafts": num_drafts}
    scored = run(shadow, prompts, **fields)
    verified = run(speculative, prompts, speculation=speculation, **fields)
    num_accepted = 0
    for key in verified:
        assert tokens_of(scored[key]) == tokens_of(verified[key])
        steps = [
            (event.num_computed_tokens, event.num_accepted)
            for event in verified[key]
            if event.num_computed_tokens >= len(prompts[key])
        ]
        blocks = [(b.start, b.num_accepted) for b in blocks_of(scored[key], names[method])]
        assert blocks == steps[: len(blocks)]
        assert len(blocks) >= len(steps) - 1
        num_accepted += sum(accepted for _, accepted in blocks)
    assert num_accepted or method == "ngram"


def test_answers_equal_plain_decoding_and_do_not_wait_for_scores(
    shadow: Engine, prompts: list[list[int]]
):
    plain = Engine(EngineConfig(method="none", **OPTIONS))
    for fields in SAMPLINGS.values():
        answers = run(shadow, prompts, **fields)
        expected = run(plain, prompts, **fields)
        assert {key: tokens_of(events) for key, events in answers.items()} == {
            key: tokens_of(events) for key, events in expected.items()
        }
        assert all(len(event.tokens) <= 1 for events in answers.values() for event in events)


def test_prefix_hit_of_unscored_answer_is_not_shared(shadow: Engine, prompts: list[list[int]]):
    """Pages without the drafters' context would make the drafts wrong."""
    assert shadow.shadow is not None
    prompt = prompts[0] * 4
    shadow.reset()
    first = run(shadow, [prompt], temperature=0.0)
    shadow.reset()
    shadow.shadow.ledger.is_on = False
    run(shadow, [prompt], temperature=0.0)
    shadow.shadow.ledger.is_on = True
    for _ in range(2):  # after pages that no drafter has read, and after pages that all have
        again = run(shadow, [prompt], temperature=0.0)
        assert blocks_of(again[0], "draft") == blocks_of(first[0], "draft")
    assert shadow.stats.prefix_hits > 0


def test_failing_drafter_ends_scoring_and_no_answer(
    shadow: Engine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    mode = shadow.shadow
    assert mode is not None
    expected = run(shadow, prompts, temperature=0.0)

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("the drafter broke")

    monkeypatch.setattr(mode.drafting, "propose", fail)
    answers = run(shadow, prompts, temperature=0.0)
    assert [tokens_of(answers[key]) for key in answers] == [
        tokens_of(expected[key]) for key in expected
    ]
    assert mode.ledger.fault == "RuntimeError: the drafter broke"
    assert not mode.ledger.is_on
    mode.ledger.fault = None
    mode.start()


def test_share_bounds_cost_of_scoring():
    """By a simulated clock: steps of 10 ms, 30 ms more while an answer of 40 steps is scored."""
    for share in (0.02, 0.1, 0.5):
        account = ShareAccount(share)
        total = 0.0
        spent = 0.0
        open_answers: list[int] = []
        num_scored = 0
        for step in range(40_000):
            if step % 10 == 0 and account.affords_answer(len(open_answers)):
                open_answers.append(40)
                num_scored += 1
            cost = 0.03 * len(open_answers) if account.affords_block() else 0.0
            account.earn(0.01 + cost)
            account.spend(cost)
            total += 0.01 + cost
            spent += cost
            open_answers = [left - 1 for left in open_answers if left > 1 or account.finish()]
        assert spent <= share * total
        assert spent >= 0.5 * share * total
        assert num_scored > 3


class WorkClock:
    """A clock that only work advances: 10 ms for a row of the target, and so many for a row that a
    drafter drafts or reads."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, draft_ms: float):
        self.now = 0.0
        self.engine = engine
        self.draft_ms = draft_ms
        self.draft_seconds = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)
        self._slow_down(monkeypatch, engine.verify_step, "run", self._run)
        for proposer in engine.proposers.on_device.values():
            self._slow_down(monkeypatch, proposer, "propose", self._draft)
            self._slow_down(monkeypatch, proposer, "observe", self._read)

    def _slow_down(
        self, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, work: Callable[..., None]
    ) -> None:
        true = getattr(owner, name)

        def slow(*arguments: Any, **options: Any) -> Any:
            work(*arguments)
            return true(*arguments, **options)

        monkeypatch.setattr(owner, name, slow)

    def _run(self, spans: Sequence[Span], *_: object) -> None:
        self.now += 0.01 * sum(span.num_rows for span in spans)

    def _draft(self, spans: Sequence[Span]) -> None:
        self._spend(16 * len(spans))

    def _read(self, context: Any, _: object) -> None:
        self._spend(len(context.positions))

    def _spend(self, rows: int) -> None:
        self.now += self.draft_ms / 1e3 * rows
        self.draft_seconds += self.draft_ms / 1e3 * rows


def test_share_bounds_drafters_work_in_the_engine(
    prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    options = {"draft": str(DEMO_MODELS / "draft"), "shadow_share": 0.1, **OPTIONS}
    engine = Engine(EngineConfig(shadow=True, **options))
    assert engine.shadow is not None
    clock = WorkClock(engine, monkeypatch, draft_ms=1.0)
    engine.shadow.start()
    run(engine, prompts * 10, temperature=0.0)
    assert engine.stats.shadow_requests > 2
    assert engine.stats.shadow_seconds >= clock.draft_seconds - 1e-6
    assert 0.03 <= clock.draft_seconds / clock.now <= 0.1


BAD_OPTIONS = {
    "no drafter": ({"target": "T"}, "shadow is set, but no drafter is named"),
    "method": ({"method": "ngram"}, "method is 'ngram', but in shadow mode"),
    "share of 0": ({"shadow_share": 0.0}, "shadow_share"),
    "share above 1": ({"shadow_share": 1.5}, "shadow_share"),
    "twice": ({"shadow_draft": ("ngram", "ngram")}, "names 'ngram' twice"),
    "parallel": ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, but shadow mode"),
}


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_shadow_options_are_sentences(options: dict[str, Any], message: str, tmp_path: Path):
    if "target" in options:
        make_target(tmp_path)
        options = {"target": str(tmp_path)}
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve(EngineConfig(device="cpu", shadow=True).with_(**options))


@pytest.mark.parametrize(
    "options", [{"shadow_share": 0.5}, {"shadow_draft": ("ngram",)}], ids=["share", "draft"]
)
def test_shadow_options_without_shadow_are_sentences(options: dict[str, Any]):
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*, but shadow is off"):
        EngineConfig(**options)


def test_incompatible_drafter_is_a_sentence(tmp_path: Path):
    make_target(tmp_path)
    options = {"target": str(tmp_path), "shadow_draft": (str(DEMO_MODELS / "draft"),)}
    with pytest.raises(ValueError, match=re.escape(str(DEMO_MODELS / "draft"))):
        resolve(EngineConfig(device="cpu", shadow=True, **options))


def test_several_drafters_are_scored_on_the_same_answers(prompts: list[list[int]], tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(DEMO_MODELS / "draft", other)
    drafters = {"draft": str(DEMO_MODELS / "draft"), "shadow_draft": (str(other),)}
    engine = Engine(EngineConfig(shadow=True, shadow_share=1.0, **drafters, **OPTIONS))
    assert engine.shadow is not None
    engine.shadow.start()
    engine.shadow.ledger.account = UnlimitedAccount(1.0)
    events = run(engine, prompts, temperature=0.0)
    for answer in events.values():
        first = [(b.start, b.num_accepted) for b in blocks_of(answer, "draft")]
        second = [(b.start, b.num_accepted) for b in blocks_of(answer, "other")]
        assert first
        assert first == second
        assert blocks_of(answer, "ngram")


@pytest.mark.parametrize("kind", ["full", "recurrent"])
def test_drafters_of_every_head_are_scored_on_the_same_answers(kind: str, tmp_path: Path):
    target = tmp_path / "target"
    if kind == "recurrent":
        make_hybrid(target)
    else:
        make_target(target)
    first = make_draft(tmp_path / "dflash1")
    second = to_dflash2(first, tmp_path / "dflash2")
    third = to_dspark(first, tmp_path / "dspark")
    drafters = tuple(str(path) for path in (first, second, third))
    options = {**OPTIONS, "target": str(target), "max_model_len": 256}
    engine = Engine(EngineConfig(shadow=True, shadow_share=1.0, shadow_draft=drafters, **options))
    assert engine.shadow is not None
    engine.shadow.start()
    engine.shadow.ledger.account = UnlimitedAccount(1.0)
    prompts = [[3, 5, 8, 13] * 3, [2, 7, 1] * 5]
    events = run(engine, prompts, temperature=0.0, ignore_eos=True)
    assert engine.shadow.ledger.fault is None
    plain = run(
        Engine(EngineConfig(method="none", **options)), prompts, temperature=0.0, ignore_eos=True
    )
    for key, answer in events.items():
        assert tokens_of(answer) == tokens_of(plain[key])
        for name in ("dflash1", "dflash2", "dspark", "ngram"):
            blocks = blocks_of(answer, name)
            starts = [block.start for block in blocks]
            assert starts[0] == len(prompts[key])
            # Each block begins where the one before it ended, so that all its steps are counted.
            ends = [block.start + block.num_accepted + 1 for block in blocks]
            assert starts[1:] == ends[:-1]
