"""A script for vLLM's offline API runs with only its import lines changed. It also fixes the number
of drafts, since the adaptive one depends on measured times."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from strobe.config import DEMO_MODELS

ROOT = Path(__file__).parents[2]
SCRIPT = """
import argparse

from strobe import LLM, SamplingParams
from strobe.outputs import Counter, Vector

parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--draft")
parser.add_argument("--num-spec-tokens", type=int, default=15)
args = parser.parse_args()

if __name__ == "__main__":
    llm = LLM(
        model=args.model,
        speculative_config={
            "method": "dflash",
            "model": args.draft,
            "num_speculative_tokens": args.num_spec_tokens,
        },
        trust_remote_code=True,
        tensor_parallel_size=1,
        dtype="auto",
        seed=0,
        max_model_len=512,
        max_num_seqs=4,
        gpu_memory_utilization=0.8,
        enforce_eager=False,
        adaptive=False,
        enable_chunked_prefill=True,
        disable_log_stats=False,
        limit_mm_per_prompt={"image": 5},
    )
    tokenizer = llm.get_tokenizer()
    questions = [
        "Sort these words: pear, apple, fig",
        "Give name and city as JSON: Maria is in Berlin.",
    ]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True,
            enable_thinking=False,
        )
        for question in questions
    ]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    ids = [{"prompt_token_ids": tokenizer.encode(p, add_special_tokens=False)} for p in prompts]
    outputs = llm.generate(ids, sampling_params=params, use_tqdm=False)
    again = llm.generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in again]
    for output in outputs:
        print("text:", output.outputs[0].text)

    drafts = drafted = accepted = 0
    per_position = [0] * args.num_spec_tokens
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            assert isinstance(metric, Counter)
            drafts += metric.value
        elif metric.name == "vllm:spec_decode_num_draft_tokens":
            assert isinstance(metric, Counter)
            drafted += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens":
            assert isinstance(metric, Counter)
            accepted += metric.value
        elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            assert isinstance(metric, Vector)
            for position, count in enumerate(metric.values):
                per_position[position] += count
    assert sum(per_position) == accepted <= drafted
    print("mean acceptance length:", 1 + accepted / drafts if drafts else 1)
    print("at the first token:", per_position[0] / drafts if drafts else 0)
"""


def test_vllm_script_runs_and_reports_acceptance_length(tmp_path: Path):
    (tmp_path / "script.py").write_text(SCRIPT)
    names = [f"--model={DEMO_MODELS / 'target'}", f"--draft={DEMO_MODELS / 'draft'}"]
    run = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), *names, "--num-spec-tokens=7"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    values = dict(line.split(": ", 1) for line in run.stdout.splitlines() if ": " in line)
    assert "apple" in run.stdout
    assert 3 < float(values["mean acceptance length"]) <= 8  # 7 drafts and the target's own token
    assert float(values["at the first token"]) > 0.8
    assert run.stderr.splitlines() == [
        "trust_remote_code is set, but code of a checkpoint's own is never run.",
        "limit_mm_per_prompt has no effect: Strobe reads text only.",
        "gpu_memory_utilization has no effect on a CPU; kv_cache_memory has.",
    ]
