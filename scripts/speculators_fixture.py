"""Write small DFlash, DFlash2 and DSpark drafters with the `speculators` package, and record its
models' outputs. Runs in its own environment, which has that package and not Strobe:

    python -m venv build/speculators
    build/speculators/bin/pip install speculators==0.9.0 transformers==5.19.0 torch==2.13.0
    build/speculators/bin/python scripts/speculators_fixture.py build/speculators/out

OUT gets a random target, a checkpoint for each drafter and `recorded.safetensors`: one greedy text
of the target, its hidden states, and each DFlash drafter's logits and tokens for the block at every
anchor in the answer. `heads.safetensors` has the same of the other drafters: the rows that their
heads read, and what the package's own heads make of them when each draft follows those before it.
With --against tests/reference/data/speculators the result is compared with the tests' files; the
exit status is 1 if it differs.

Legend: A anchors, B rows of a block, D drafts, C candidates, H hidden size, V' rows of the head.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.models.dflash import DFlashDraftModel
from speculators.models.dflash2 import DFlash2DraftModel
from speculators.models.dspark import DSparkDraftModel
from speculators.train.cli import create_transformer_layer_config
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB, REDUCED, MASK, WINDOW = 61, 23, 60, 20
PROMPT, ANSWER = 8, 24
LAYERS = [1, 2, 3]
YARN = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0}
FULL, SLIDING = "full_attention", "sliding_attention"

DRAFTERS: dict[str, dict[str, Any]] = {
    "full": {
        "layer_types": [FULL, FULL],
        "layers": {
            "attention_bias": True,
            "rope_parameters": {**YARN, "original_max_position_embeddings": 32},
        },
    },
    "causal": {"arch": "llama", "layer_types": [SLIDING, FULL], "reduced": True},
    "both_ways": {
        "layer_types": [SLIDING, SLIDING],
        "reduced": True,
        "model": {"sliding_window_non_causal": True},
    },
    "first_slot": {"layer_types": [SLIDING], "model": {"sample_from_anchor": True}},
    "selector": {
        "method": DFlash2DraftModel,
        "layer_types": [SLIDING],
        "model": {
            "conv_kernel_size": 3,
            "conv_group_size": 4,
            "selector_rank": 8,
            "selector_top_k": 4,
        },
    },
    "vanilla": {
        "method": DSparkDraftModel,
        "layer_types": [FULL],
        "model": {"markov_rank": 8},
    },
    "gated": {
        "method": DSparkDraftModel,
        "layer_types": [SLIDING],
        "reduced": True,
        "model": {
            "markov_rank": 8,
            "markov_head_type": "gated",
            "sample_from_anchor": False,
        },
    },
    "rnn": {
        "method": DSparkDraftModel,
        "layer_types": [FULL],
        "reduced": True,
        "model": {
            "markov_rank": 8,
            "markov_head_type": "rnn",
            "confidence_head_with_markov": False,
        },
    },
    "rnn_apart": {
        "method": DSparkDraftModel,
        "layer_types": [FULL],
        "reduced": True,
        "model": {
            "markov_rank": 8,
            "markov_head_type": "rnn",
            "sample_from_anchor": False,
        },
    },
}
"""method: the drafter's class, if not DFlash's. arch: architecture of the layers' config. layers,
model: extra fields of the layers' config and the drafter's. reduced: whether the head has only a
part of the vocabulary."""


@dataclass(frozen=True)
class Blocks:
    """The blocks at anchors [A]: their tokens [A], the rows that the output layer reads
    [A, B, H] and its outputs [A, B, V']."""

    anchors: Tensor
    anchor_tokens: Tensor
    hidden: Tensor
    logits: Tensor


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draw weights large enough for every part to affect the logits; embeddings and heads that a
    drafter shares with its target stay."""
    noise = torch.Generator().manual_seed(seed)
    drafter = isinstance(model, DFlashDraftModel)
    for name, value in model.named_parameters():
        shared = name.startswith(("embed_tokens", "lm_head", "verifier_"))
        if drafter and shared:
            continue
        if value.dim() == 1 and "norm" in name:
            value.data.uniform_(0.5, 1.5, generator=noise)
        else:
            value.data.normal_(0.0, scale_of(name), generator=noise)


def scale_of(name: str) -> float:
    """Return the standard deviation of a random tensor."""
    if "codebook" in name or "markov_w" in name:
        return 1.0
    return 0.5 if "embed" in name or "lm_head" in name else 0.3


def make_target() -> Qwen3ForCausalLM:
    """Make a random target and write it to `target`."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float().eval()
    randomise(model, seed=0)
    model.save_pretrained("target")
    return model


def make_drafter(name: str, seed: int) -> None:
    """Make a drafter as the package's training does, and write it to `name`."""
    settings = DRAFTERS[name]
    types = settings["layer_types"]
    layers = create_transformer_layer_config(
        "target",
        num_layers=len(types),
        draft_arch=settings.get("arch", "qwen3"),
        hidden_act="silu",
        sliding_window=WINDOW,
        full_attention_indices=[i for i, kind in enumerate(types) if kind == FULL],
    )
    for key, value in settings.get("layers", {}).items():
        setattr(layers, key, value)
    d2t = t2d = None
    if settings.get("reduced"):
        counts = {7 * i % VOCAB: VOCAB - i for i in range(VOCAB)}
        d2t, t2d = build_vocab_mappings_from_distribution(counts, REDUCED, VOCAB)
    method = settings.get("method", DFlashDraftModel)
    model = method.from_training_args(
        layers,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path="target",
        draft_vocab_size=REDUCED if settings.get("reduced") else VOCAB,
        block_size=5,
        mask_token_id=MASK,
        target_layer_ids=LAYERS,
        **settings.get("model", {}),
    )
    randomise(model, seed)
    model.save_pretrained(name)
    (Path(name) / "config.py").unlink()  # an unused copy of the package's source


@torch.no_grad()
def write_text(target: Qwen3ForCausalLM) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a greedy text's tokens [1, T] and its hidden states, [1, T, H] each."""
    noise = torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCAB, (1, PROMPT), generator=noise)
    tokens = target.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens, target(tokens, output_hidden_states=True).hidden_states


@torch.no_grad()
def run_blocks(model: Any, tokens: Tensor, features: Tensor, last: Tensor) -> Blocks:
    """Run the package's forward over the text, with an anchor at every position of the answer that
    a block fits after."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def watch(module: Any, arguments: tuple[Tensor], output: Tensor) -> None:
        inputs.append(arguments[0])
        outputs.append(output)

    hook = model.lm_head.register_forward_hook(watch)
    length = tokens.shape[1]
    anchors = torch.arange(PROMPT, length - model.block_size)
    loss_mask = torch.zeros(1, length)
    loss_mask[:, anchors] = 1  # exactly max_anchors, so that the package keeps all
    options, _ = model.get_trainer_kwargs(
        loss_fn="ce",
        loss_implementation="eager",  # the others need a GPU
        max_anchors=len(anchors),
    )
    model(
        hidden_states=features,
        input_ids=tokens,
        loss_mask=loss_mask,
        verifier_last_hidden_states=last,
        document_ids=torch.zeros(1, length, dtype=torch.long),
        **options,
    )
    hook.remove()
    shape = (len(anchors), model.block_size, -1)
    return Blocks(
        anchors=anchors,
        anchor_tokens=tokens[0, anchors],
        hidden=inputs[0].view(shape),
        logits=outputs[0].view(shape),
    )


def target_tokens(model: Any, ids: Tensor) -> Tensor:
    """Return the target's tokens of rows of the output layer."""
    return ids if model.d2t is None else ids + model.d2t[ids]


def dflash_drafts(model: Any, blocks: Blocks) -> dict[str, Tensor]:
    """Return logits [A, B, V'] and tokens [A, B] of all rows."""
    tokens = target_tokens(model, blocks.logits.argmax(-1))
    return {"logits": blocks.logits.contiguous(), "tokens": tokens}


@torch.no_grad()
def selector_drafts(model: Any, blocks: Blocks) -> dict[str, Tensor]:
    """Return candidates and their scores after the draft before [A, D, C], and drafts [A, D]."""
    previous = blocks.anchor_tokens
    candidates: list[Tensor] = []
    scores: list[Tensor] = []
    drafts: list[Tensor] = []
    for row in range(first_row(model), model.block_size):
        ids, values = model.candidate_selector.select(
            blocks.logits[:, row], blocks.hidden[:, row], previous
        )
        previous = ids.gather(1, values.argmax(1, keepdim=True))[:, 0]
        candidates.append(ids)
        scores.append(values)
        drafts.append(previous)
    return {
        "candidates": torch.stack(candidates, 1),
        "scores": torch.stack(scores, 1),
        "tokens": torch.stack(drafts, 1),
    }


@torch.no_grad()
def markov_drafts(model: Any, blocks: Blocks) -> dict[str, Tensor]:
    """Return corrected logits [A, D, V'] after the drafts before, confidence logits [A, D], and
    drafts [A, D]."""
    first = first_row(model)
    previous = blocks.anchor_tokens[:, None].repeat(1, model.block_size)
    tokens = previous.clone()
    head = model.markov_head
    for row in range(first, model.block_size):
        bias = head.block_bias(prev_token_ids=previous, hidden_states=blocks.hidden)
        corrected = blocks.logits + bias
        tokens[:, row] = target_tokens(model, corrected[:, row].argmax(-1))
        previous[:, row + 1 :] = tokens[:, row, None]
    read = blocks.hidden
    if model.config.confidence_head_with_markov:
        read = torch.cat([read, head.prev_embeddings(previous)], -1)
    confidence = model.confidence_head(read)
    return {
        "scores": corrected[:, first:].contiguous(),
        "confidence": confidence[:, first:].contiguous(),
        "tokens": tokens[:, first:].contiguous(),
    }


def first_row(model: Any) -> int:
    """Return the first row of a block that drafts."""
    return 0 if model.config.sample_from_anchor else 1


HEADS = {DFlash2DraftModel: selector_drafts, DSparkDraftModel: markov_drafts}
"""What records the drafts of the methods with a head of their own."""


def load(name: str, attention: str) -> Any:
    """Load a drafter's checkpoint with the package."""
    method = DRAFTERS[name].get("method", DFlashDraftModel)
    config = method.config_class.from_pretrained(name)
    config.transformer_layer_config._attn_implementation = attention
    return method.from_pretrained(name, config=config).float().eval()


def make(attention: str) -> None:
    """Write everything to the current directory."""
    target = make_target()
    tokens, hidden = write_text(target)
    features = torch.cat([hidden[i] for i in LAYERS], -1)
    recorded = {"tokens": tokens[0], "features": features[0]}
    heads: dict[str, Tensor] = {}
    for seed, name in enumerate(DRAFTERS, start=2):
        make_drafter(name, seed)
        model = load(name, attention)
        blocks = run_blocks(model, tokens, features, hidden[-1])
        record = HEADS.get(type(model))
        if record is None:
            drafted = {"anchors": blocks.anchors, **dflash_drafts(model, blocks)}
            recorded |= {f"{name}.{key}": value for key, value in drafted.items()}
            continue
        drafted = {"anchors": blocks.anchors, "hidden": blocks.hidden.contiguous()}
        drafted |= record(model, blocks)
        heads |= {f"{name}.{key}": value for key, value in drafted.items()}
    save_file(recorded, "recorded.safetensors")
    save_file(heads, "heads.safetensors")


def differences(out: Path, expected_dir: Path) -> list[str]:
    """Return how two directories of such files differ."""
    problems: list[str] = []
    for path in sorted(expected_dir.rglob("*.json")):
        other_file = out / path.relative_to(expected_dir)
        if json.loads(other_file.read_text()) != json.loads(path.read_text()):
            problems.append(f"{path.relative_to(expected_dir)} differs")
    for path in sorted(expected_dir.rglob("*.safetensors")):
        expected, actual = load_file(path), load_file(out / path.relative_to(expected_dir))
        if expected.keys() != actual.keys():
            problems.append(
                f"{path.relative_to(expected_dir)}: {sorted(expected.keys() ^ actual.keys())}"
            )
        for name in expected.keys() & actual.keys():
            try:
                torch.testing.assert_close(actual[name], expected[name], atol=1e-5, rtol=1e-5)
            except AssertionError as error:
                problems.append(f"{path.relative_to(expected_dir)}, {name}: {error}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description="Drafters as the speculators package writes them.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, help="an earlier OUT to compare with")
    kinds = ("eager", "sdpa", "simple_flex_attention")
    parser.add_argument("--attention", choices=kinds, default=kinds[0])
    options = parser.parse_args()
    out, expected_dir = options.out.resolve(), options.against and options.against.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # checkpoints name their target as "target", not by a path of this machine
    make(options.attention)
    if expected_dir is not None:
        problems = differences(out, expected_dir)
        raise SystemExit("\n".join(problems) if problems else 0)


if __name__ == "__main__":
    main()
