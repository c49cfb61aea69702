"""Tiny drafters with DFlash2's and DSpark's heads, made from a DFlash drafter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny_checkpoints import VOCAB

RANK = 8
TAPS = 3
GROUP = 8
CANDIDATES = 5
KNOWN = [i for i in range(VOCAB) if i % 4 != 3]
"""The tokens of a reduced vocabulary."""


def _source(source: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = load_file(source / "model.safetensors")
    return tensors, json.loads((source / "config.json").read_text())


def _write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def to_dflash2(
    source: Path,
    directory: Path,
    *,
    neutral: bool = False,
    candidates: int = CANDIDATES,
    suffix: str = "",
    seed: int = 8,
    **nested: Any,
) -> Path:
    """Write a DFlash2 drafter with random convolutions and selector. neutral: those with which
    training begins, which change nothing. suffix: of the codebooks' names. nested: more keys."""
    tensors, config = _source(source)
    hidden = config["hidden_size"]
    vocab = config["vocab_size"]
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 0.3) -> Tensor:
        return (0.0 if neutral else std) * torch.randn(*shape, generator=noise)

    for layer in range(config["num_hidden_layers"]):
        for part in ("attention_conv", "mlp_conv"):
            name = f"layers.{layer}.{part}"
            base = draw(2, TAPS, hidden)
            base[:, 0] += 1
            tensors[f"{name}.base_kernel"] = base
            rows = 2 * TAPS * (hidden // GROUP)
            tensors[f"{name}.kernel_projection.weight"] = draw(rows, hidden)
    name = "candidate_selector"
    tensors[f"{name}.predecessor_codebook{suffix}"] = torch.randn(vocab, RANK, generator=noise)
    tensors[f"{name}.successor_codebook{suffix}"] = draw(vocab, RANK, std=1.0)
    tensors[f"{name}.hidden_projection.weight"] = torch.randn(RANK, hidden, generator=noise)
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= {
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": candidates,
        **nested,
    }
    return _write(directory, tensors, config)


def to_dspark(
    source: Path,
    directory: Path,
    *,
    kind: str = "vanilla",
    reduced: Tensor | None = None,
    neutral: bool = False,
    seed: int = 9,
    **keys: Any,
) -> Path:
    """Write a DSpark drafter in DeepSpec's flat format with a random Markov head, and a confidence
    head that reads the token before. reduced: the target's head, of which the drafter gets the
    rows of `KNOWN`. neutral: the Markov head changes nothing. keys: more of the config."""
    tensors, config = _source(source)
    hidden = config["hidden_size"]
    vocab = config["vocab_size"]
    noise = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float = 0.5) -> Tensor:
        return std * torch.randn(*shape, generator=noise)

    rank = keys.get("markov_rank", RANK)
    config |= config.pop("dflash_config")
    config |= {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": rank,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "num_anchors": 512,
    }
    rows = vocab
    if reduced is not None:
        ids = torch.tensor(KNOWN)
        rows = len(KNOWN)
        tensors["lm_head.weight"] = reduced.detach()[ids]
        tensors["d2t"] = ids - torch.arange(rows)
        config["draft_vocab_size"] = rows
    if rank:
        tensors["markov_head.markov_w1.weight"] = draw(vocab, rank)
        second = draw(rows, rank, std=1.5)
        tensors["markov_head.markov_w2.weight"] = torch.zeros_like(second) if neutral else second
        if kind == "gated":
            tensors["markov_head.gate_proj.weight"] = draw(rank, hidden + rank)
            tensors["markov_head.gate_proj.bias"] = draw(rank)
        if kind == "rnn":
            tensors["markov_head.joint_proj.weight"] = draw(3 * rank, 2 * rank + hidden)
            tensors["markov_head.joint_proj.bias"] = draw(3 * rank)
    tensors["confidence_head.proj.weight"] = draw(1, hidden + rank, std=0.2)
    tensors["confidence_head.proj.bias"] = draw(1)
    return _write(directory, tensors, config | keys)


HEADS: dict[str, Callable[..., Path]] = {
    "dflash2": to_dflash2,
    "dspark": to_dspark,
    "dspark, best tokens only": lambda *paths: to_dspark(*paths, dspark_draft_topk=CANDIDATES),
    "gated dspark": lambda *paths: to_dspark(*paths, kind="gated"),
    "rnn dspark": lambda *paths: to_dspark(*paths, kind="rnn", sample_from_anchor=False),
}
"""Heads for tests of whole engines: each writes a drafter's copy with it, (source, directory)."""
