"""The demo models keep their model card's promises, on a few held-out prompts."""

from scripts.demo_models.tasks import check, heldout
from strobe import LLM, SamplingParams
from strobe.config import DEMO_MODELS
from strobe.tools.demo_comparison import prompts_of


def test_answers_are_right_and_drafts_accepted():
    examples = heldout(4, seed=3)
    llm = LLM(device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=400)
    answers = [o.outputs[0] for o in llm.generate(prompts_of(llm, examples), params)]
    families: dict[str, list[tuple[bool, int, int]]] = {}
    for example, answer in zip(examples, answers, strict=True):
        assert answer.speculation is not None
        figures = (
            check(example, answer.text),
            len(answer.token_ids) - 1,
            answer.speculation.counts.steps,
        )
        families.setdefault(example.family, []).append(figures)
    assert sum(right for rows in families.values() for right, _, _ in rows) >= 22  # of 24
    for rows in families.values():
        assert sum(right for right, _, _ in rows) >= 3
        assert sum(tokens for _, tokens, _ in rows) >= 3.0 * sum(steps for _, _, steps in rows)
    tokens, steps = (sum(row[i] for rows in families.values() for row in rows) for i in (1, 2))
    assert tokens >= 5.0 * steps


def test_outputs_equal_plain_decoding():
    plain, drafting = LLM(method="none", device="cpu"), LLM(device="cpu", overlap=2)
    prompts = prompts_of(plain, heldout(1, seed=5))
    for params in (
        SamplingParams(temperature=0.0, max_tokens=120),
        SamplingParams(temperature=1.0, top_p=0.95, min_p=0.01, seed=9, max_tokens=120),
    ):
        a, b = (llm.generate(prompts, params) for llm in (plain, drafting))
        assert [o.outputs[0].token_ids for o in a] == [o.outputs[0].token_ids for o in b]


def test_model_files_are_small():
    sizes = [
        p.stat().st_size for part in ("target", "draft") for p in (DEMO_MODELS / part).iterdir()
    ]
    assert max(sizes) < 16 * 2**20
    assert sum(sizes) <= 25 * 10**6


def test_temperature_too_small_for_fp32_is_greedy():
    assert SamplingParams(temperature=1e-46).temperature == 0.0
