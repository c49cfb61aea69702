"""The same code on a GPU: the pair in the box, speculation on and off, against the CPU."""

import pytest
import torch

from strobe import LLM, SamplingParams
from strobe.demo import pick_examples, prompts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=96)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11, max_tokens=96)


def answers(params: SamplingParams, **options: object) -> list[list[int]]:
    llm = LLM(dtype="float32", kv_cache_memory="1GiB", **options)
    outputs = llm.generate(prompts_of(llm, pick_examples(12)), params, use_tqdm=False)
    llm.engine.check()
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(autouse=True)
def exact_products():
    """fp32 products without tf32, as losslessness in fp32 means it."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("overlap", [1, 2])
def test_speculation_on_equals_off_in_fp32(params: SamplingParams, overlap: int):
    plain = answers(params, method="none", device="cuda")
    assert answers(params, device="cuda", overlap=overlap) == plain


def test_a_gpu_gives_the_tokens_of_the_cpu():
    assert answers(SEEDED, device="cuda") == answers(SEEDED, device="cpu")


def test_the_device_is_chosen_by_itself():
    assert LLM(kv_cache_memory="64MiB").engine.resolved.device.type == "cuda"
