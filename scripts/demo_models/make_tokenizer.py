"""Train the tokenizer of the demo models on generated tasks and write its files.

    python scripts/demo_models/make_tokenizer.py [--examples N] [--out DIRECTORY]

Byte-level BPE without normalisation, so that any Unicode text survives a round trip; digits stand
alone. The chat template is `chat_template.jinja` in the output folder.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.demo_models.tasks import small_talk, training  # noqa: E402

VOCABULARY = 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")
PIECES = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"
FRAME = (
    "system\nuser\nassistant\ntool\n\n\nThese tools are available, one in each line:\n"
    "To use a tool, write its name and arguments as JSON between "
)


def texts(examples: int) -> Iterator[str]:
    """Yield the tokenizer's training text: messages, tools, reasonings and answers."""
    rng = random.Random("small talk for the tokenizer")
    for i, example in enumerate(training(examples, seed=0)):
        yield from (message["content"] for message in example.messages)
        yield from (json.dumps(tool) for tool in example.tools)
        yield example.answer
        if example.reasoning:
            yield example.reasoning
        if i % 10 == 0:
            yield FRAME
            yield from (message["content"] for message in small_talk.small_talk(rng, False))


def train(examples: int) -> Tokenizer:
    """Train a byte-level BPE of exactly `VOCABULARY` entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(VISIBLE),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(examples), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in VISIBLE])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != VOCABULARY:
        raise ValueError(f"The vocabulary has {size} entries; give more --examples.")
    return tokenizer


def config(tokenizer: Tokenizer, template: str) -> dict[str, object]:
    """Return the contents of `tokenizer_config.json`."""
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": text in SPECIAL,
        }
        for text in (*SPECIAL, *VISIBLE)
    }
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|mask|>"],
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "mask_token": "<|mask|>",
        "model_max_length": 2048,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }


def main() -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=40_000)
    parser.add_argument("--out", type=Path, default=ROOT / "strobe/demo_models/target")
    options = parser.parse_args()
    template = (options.out / "chat_template.jinja").read_text()
    tokenizer = train(options.examples)
    tokenizer.save(str(options.out / "tokenizer.json"))
    text = json.dumps(config(tokenizer, template), indent=2, ensure_ascii=False)
    (options.out / "tokenizer_config.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
