"""The demo models on a GPU, with and without speculation, compared with the CPU."""

import pytest

from strobe import LLM, SamplingParams
from strobe.tools.demo_comparison import choose_examples, prompts_of
from tests.support.bookkeeping_checks import check_engine
from tests.support.gpu_checks import NEEDS_GPU

pytestmark = NEEDS_GPU

GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=96)


def answers(params: SamplingParams, **options: object) -> list[list[int]]:
    llm = LLM(dtype="float32", kv_cache_memory="1GiB", **options)
    outputs = llm.generate(prompts_of(llm, choose_examples(12)), params, use_tqdm=False)
    check_engine(llm.engine)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", [1, 2])
def test_speculation_on_equals_off_in_fp32(params: SamplingParams, overlap: int):
    plain = answers(params, method="none", device="cuda")
    assert answers(params, device="cuda", overlap=overlap) == plain


FIELDS = {
    "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {40: 4.0, 41: -100.0}, "min_tokens": 20},
    "allowed": {"allowed_token_ids": list(range(2, 1500))},
    "json": {"structured_outputs": {"json_object": True}},
    "regex": {"structured_outputs": {"regex": "[a-z ]{5,60}"}},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_processors_match_plain_decoding_and_the_cpu(params: SamplingParams, fields: dict):
    params_with_fields = params.clone(**fields, max_tokens=48)
    plain = answers(params_with_fields, method="none", device="cuda")
    assert answers(params_with_fields, device="cuda", overlap=2) == plain
    assert plain == answers(params_with_fields, device="cpu")


def test_gpu_logprobs_match_cpu():
    logprobs = []
    for device in ("cuda", "cpu"):
        llm = LLM(dtype="float32", kv_cache_memory="1GiB", device=device)
        (output,) = llm.generate(
            prompts_of(llm, choose_examples(1)),
            GREEDY.clone(logprobs=2, prompt_logprobs=1),
            use_tqdm=False,
        )
        entries = [entry for entry in output.prompt_logprobs or [] if entry]
        entries += output.outputs[0].logprobs or []
        logprobs.append(
            [{token: logprob.logprob for token, logprob in entry.items()} for entry in entries]
        )
    assert len(logprobs[0]) == len(logprobs[1]) > 40
    for cuda, cpu in zip(*logprobs, strict=True):
        assert cuda.keys() == cpu.keys()
        assert all(abs(cuda[token] - cpu[token]) < 1e-3 for token in cuda)


def test_gpu_tokens_match_cpu():
    assert answers(SEEDED, device="cuda") == answers(SEEDED, device="cpu")


def test_default_device_is_the_gpu():
    assert LLM(kv_cache_memory="64MiB").engine.resolved.device.type == "cuda"
