"""Drafters with random DFlash2 and DSpark heads for SmolLM2, as vLLM 0.32 drafted with them.

Each takes the backbone of a DFlash drafter. The heads are drawn anew from a seed, in
one order for all checkpoints, and stored in bfloat16. `reference/data/head_drafts.json` has what
vLLM's CPU build (V2 runner, fp32, greedy) did with them: for each prompt the answer, the tokens of
each verify step, and each step's newest token, its position, and the drafts after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BACKBONE = Path(__file__).parents[1] / "reference" / "data" / "smollm2_draft"
"""The DFlash drafter from which the shipped one was trained, in bfloat16."""
SEED = 7
RANK = 32
BLOCK = 8
SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": RANK,
    "selector_top_k": 16,
}
MARKOV = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


class Heads:
    """The backbone's tensors and config, and the tensors of both heads."""

    def __init__(self, source: Path):
        self.backbone = dict[str, Tensor]()
        for part in sorted(source.glob("*.safetensors")):
            self.backbone |= load_file(part)
        config = json.loads((source / "config.json").read_text())
        self.nested: dict[str, Any] = config.pop("dflash_config")
        del config["architectures"]
        self.config: dict[str, Any] = config
        self._noise = torch.Generator().manual_seed(SEED)
        self.selector = self._draw_selector()
        self.markov = self._draw_markov()

    def _draw(self, *shape: int, std: float) -> Tensor:
        return std * torch.randn(*shape, generator=self._noise)

    def _draw_selector(self) -> dict[str, Tensor]:
        hidden = self.config["hidden_size"]
        vocab = self.config["vocab_size"]
        taps = SELECTOR["conv_kernel_size"]
        groups = hidden // SELECTOR["conv_group_size"]
        identity = torch.zeros(2, taps, hidden)
        identity[:, 0] = 1
        drawn = dict[str, Tensor]()
        for layer in range(self.config["num_hidden_layers"]):
            for part in ("attention_conv", "mlp_conv"):
                name = f"layers.{layer}.{part}"
                base = identity + self._draw(2, taps, hidden, std=0.01)
                drawn[f"{name}.base_kernel"] = base
                projection = self._draw(2 * taps * groups, hidden, std=0.003)
                drawn[f"{name}.kernel_projection.weight"] = projection
        name = "candidate_selector"
        drawn[f"{name}.predecessor_codebook"] = self._draw(vocab, RANK, std=0.3)
        drawn[f"{name}.successor_codebook"] = self._draw(vocab, RANK, std=0.3)
        drawn[f"{name}.hidden_projection.weight"] = self._draw(RANK, hidden, std=0.04)
        return drawn

    def _draw_markov(self) -> dict[str, Tensor]:
        hidden = self.config["hidden_size"]
        vocab = self.config["vocab_size"]
        return {
            "markov_head.markov_w1.weight": self._draw(vocab, RANK, std=0.35),
            "markov_head.markov_w2.weight": self._draw(vocab, RANK, std=0.35),
            "confidence_head.proj.weight": self._draw(1, hidden + RANK, std=0.03),
            "confidence_head.proj.bias": self._draw(1, std=0.3),
        }

    def zlab(self, block: int = BLOCK, **top: Any) -> dict[str, Any]:
        """DFlash2 in z-lab's format. block: the rows that vLLM ran."""
        nested = {**self.nested, "block_size": block, **SELECTOR}
        config = {"architectures": ["DFlash2DraftModel"], "is_causal": False, **top}
        return {**self.config, **config, "dflash_config": nested}

    def sliding(self) -> dict[str, Any]:
        """The same with windows that are narrow enough to matter."""
        layers = self.config["num_hidden_layers"]
        windows = {"sliding_window": 24, "use_sliding_window": True}
        return self.zlab(layer_types=["sliding_attention"] * layers, **windows)

    def speculators(self, method: str, **keys: Any) -> dict[str, Any]:
        """A head in the speculators library's format."""
        proposal = {"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}
        outer = ("block_size", "num_target_layers")
        layers = {key: value for key, value in self.config.items() if key not in outer}
        about = {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "smollm2"},
        }
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": method,
            "speculators_version": "0.9.0",
            "speculators_config": about,
            "transformer_layer_config": layers,
            "block_size": BLOCK,
            "mask_token_id": self.nested["mask_token_id"],
            "aux_hidden_state_layer_ids": [i + 1 for i in self.nested["target_layer_ids"]],
            "draft_vocab_size": self.config["vocab_size"],
            "has_no_defaults_at_init": False,
            **keys,
        }

    def deepspec(self, **keys: Any) -> dict[str, Any]:
        """DSpark in DeepSpec's flat format."""
        own = {"num_anchors": 512, "tie_word_embeddings": False, "block_size": BLOCK - 1}
        flat = {"architectures": ["Qwen3DSparkModel"], **self.nested, **own}
        return {**self.config, **flat, **MARKOV, **keys}

    def specforge(self) -> dict[str, Any]:
        """DSpark in SpecForge's nested format, with the head's keys at both places."""
        nested = {"projector_type": "dspark", **self.nested, **MARKOV}
        flat = {"architectures": ["DSparkDraftModel"], "block_size": BLOCK - 1, **MARKOV}
        return {**self.config, **flat, "dflash_config": nested}


SELECTORS: dict[str, Callable[[Heads], dict[str, Any]]] = {
    "d2": Heads.zlab,
    "d2k4": lambda heads: heads.zlab(block=5),
    "d2spec": lambda heads: heads.speculators("dflash2", **SELECTOR),
    "d2swa": Heads.sliding,
}
MARKOVS: dict[str, Callable[[Heads], dict[str, Any]]] = {
    "ds": Heads.deepspec,
    "dsnest": Heads.specforge,
    "dsbonus": lambda heads: heads.deepspec(sample_from_anchor=False, block_size=BLOCK),
    "dsspec": lambda heads: heads.speculators("dspark", **MARKOV),
}
NAMES = (*SELECTORS, *MARKOVS)
"""The recorded checkpoints; d2k4 is d2 with 4 drafts."""
OWN = ("ds", "dsbonus")
"""Those with copies of the target's embedding and head, which lose bits in bfloat16."""


def write(name: str, heads: Heads, embedding: Tensor, directory: Path) -> Path:
    """Write one of the checkpoints. embedding: the target's, which is its head, too."""
    is_selector = name in SELECTORS
    tensors = heads.backbone | (heads.selector if is_selector else heads.markov)
    if name in OWN:
        tensors |= {"embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    directory.mkdir(parents=True, exist_ok=True)
    stored = {key: value.to(torch.bfloat16).contiguous() for key, value in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    make = SELECTORS[name] if is_selector else MARKOVS[name]
    (directory / "config.json").write_text(json.dumps(make(heads)))
    return directory


def shipped() -> Path:
    """The drafter that all of them are made from."""
    return BACKBONE


def recorded(name: str) -> Sequence[dict[str, Any]]:
    """Return what vLLM did for each prompt: prompt, answer, steps and drafts."""
    path = Path(__file__).parents[1] / "reference/data/head_drafts.json"
    return json.loads(path.read_text())[name]
