"""Check that SmolLM2's drafts change no token, and that greedy answers are those of transformers.

    python scripts/smollm2/lossless.py chats.jsonl [--count 100] [--max-tokens 128]

Answers each chat of `chats.py` in fp32 with and without drafts at temperatures 0, 0.7 and 1, and
prints how many answers are equal. transformers sees a greedy answer at once: each of its tokens
has to be the likeliest one after those before it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.smollm2.checkpoint import convert  # noqa: E402
from strobe import LLM, SamplingParams  # noqa: E402
from strobe.hub.packaged import packaged_file  # noqa: E402
from strobe.outputs import RequestOutput  # noqa: E402


def answers(
    llm: LLM, chats: list[Any], temperature: float, max_tokens: int, *, drafts: bool
) -> list[RequestOutput]:
    """Answer all chats at once."""
    speculation = None if drafts else False
    params = [
        SamplingParams(
            temperature=temperature, seed=i, max_tokens=max_tokens, speculation=speculation
        )
        for i in range(len(chats))
    ]
    return llm.chat(chats, params, use_tqdm=False)


def tokens(output: RequestOutput) -> list[int]:
    """Return the answer's token ids."""
    return list(output.outputs[0].token_ids)


@torch.inference_mode()
def chosen_by_transformers(outputs: list[RequestOutput]) -> int:
    """Return how many answers transformers would give, too."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        convert(packaged_file("smollm2"), Path(directory))
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        equal = 0
        for output in outputs:
            answer = tokens(output)
            ids = torch.tensor([[*output.prompt_token_ids, *answer]])
            best = model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(-1)
            equal += best.tolist() == answer
        return equal


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("chats", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()
    lines = itertools.islice(options.chats.open(encoding="utf-8"), options.count)
    chats = [json.loads(line)["messages"] for line in lines]
    llm = LLM("smollm2", dtype="float32", weight_dtype="float32", max_num_seqs=25)
    for temperature in (0.0, 0.7, 1.0):
        plain, drafted = (
            answers(llm, chats, temperature, options.max_tokens, drafts=drafts)
            for drafts in (False, True)
        )
        same = sum(tokens(a) == tokens(b) for a, b in zip(plain, drafted, strict=True))
        length = sum(map(len, map(tokens, plain)))
        print(f"T = {temperature:g}: {same} of {len(chats)} equal, {length} tokens", flush=True)
        if temperature == 0:
            print(f"  {chosen_by_transformers(plain)} are those of transformers", flush=True)


if __name__ == "__main__":
    main()
