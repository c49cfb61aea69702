"""Write small DFlash drafters with the `speculators` package, and record its model's outputs. Runs
in its own environment, which has that package and not Strobe:

    python -m venv build/speculators
    build/speculators/bin/pip install speculators==0.9.0 transformers==5.19.0 torch==2.13.0
    build/speculators/bin/python scripts/speculators_fixture.py build/speculators/out

OUT gets a random target, a checkpoint for each drafter and `recorded.safetensors`: one greedy text
of the target, its hidden states, and each drafter's logits and tokens for the block at every anchor
in the answer. With --against tests/reference/data/speculators the result is compared with the
tests' files; the exit status is 1 if it differs.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
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
}
"""arch: architecture of the layers' config. layers, model: extra fields of the layers' config and
the drafter's. reduced: whether the head has only a part of the vocabulary."""


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
            scale = 0.5 if "embed" in name or "lm_head" in name else 0.3
            value.data.normal_(0.0, scale, generator=noise)


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
    model = DFlashDraftModel.from_training_args(
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
def draft(
    name: str, tokens: Tensor, features: Tensor, last: Tensor, attention: str
) -> dict[str, Tensor]:
    """Load `name` with the package and run its forward over the text, with an anchor at every
    position of the answer that a block fits after: anchors [A], logits [A, B, V'] and tokens [A, B]
    of the target's vocabulary."""
    config = DFlashSpeculatorConfig.from_pretrained(name)
    config.transformer_layer_config._attn_implementation = attention
    model = DFlashDraftModel.from_pretrained(name, config=config).float().eval()
    outputs: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    length = tokens.shape[1]
    anchors = torch.arange(PROMPT, length - model.block_size)
    loss_mask = torch.zeros(1, length)
    loss_mask[:, anchors] = 1  # exactly max_anchors, so that the package keeps all
    model(
        hidden_states=features,
        input_ids=tokens,
        loss_mask=loss_mask,
        verifier_last_hidden_states=last,
        document_ids=torch.zeros(1, length, dtype=torch.long),
        max_anchors=len(anchors),
        loss_config=resolve_loss_config("ce", "eager"),  # the others need a GPU
    )
    logits = outputs[0].view(len(anchors), model.block_size, -1)
    ids = logits.argmax(-1)
    ids = ids if model.d2t is None else ids + model.d2t[ids]
    return {"anchors": anchors, "logits": logits.contiguous(), "tokens": ids}


def make(attention: str) -> None:
    """Write everything to the current directory."""
    target = make_target()
    tokens, hidden = write_text(target)
    features = torch.cat([hidden[i] for i in LAYERS], -1)
    recorded = {"tokens": tokens[0], "features": features[0]}
    for seed, name in enumerate(DRAFTERS, start=2):
        make_drafter(name, seed)
        drafted = draft(name, tokens, features, hidden[-1], attention)
        recorded |= {f"{name}.{key}": value for key, value in drafted.items()}
    save_file(recorded, "recorded.safetensors")


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
