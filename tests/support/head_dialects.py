"""Tiny drafters with each head in each dialect of its config, and as GGUF files. A test runs all
pairs, and docs/checkpoints.md has a table of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.draft_heads import to_dflash2, to_dspark
from tests.support.tiny_checkpoints import VOCAB, make_draft

Config = dict[str, Any]
Change = Callable[[Config], Config]

MARKOV = (
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
TAPS = ("mask_token_id", "target_layer_ids")
LAYERS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip
GGUF = "GGUF"


def _flat(config: Config) -> Config:
    """Return a config whose drafting keys are all at the top."""
    flat = {key: value for key, value in config.items() if key != "dflash_config"}
    return flat | config.get("dflash_config", {})


def _without_head(config: Config) -> Config:
    """Return DFlash's config as the trainers of DSpark write it."""
    return {"markov_rank": 0, "enable_confidence_head": False, **config}


def _nested(config: Config, *keys: str) -> Config:
    """Return a config with drafting keys in `dflash_config`."""
    flat = _flat(config)
    inner = {key: flat.pop(key) for key in (*TAPS, *keys) if key in flat}
    return flat | {"dflash_config": inner}


def z_lab(config: Config) -> Config:
    flat = {key: value for key, value in _flat(config).items() if key != "num_anchors"}
    return _nested(flat, *SELECTOR) | {"architectures": ["DFlashDraftModel"]}


def deepspec(config: Config) -> Config:
    flat = _without_head(_flat(config))
    return flat | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}


def specforge(config: Config) -> Config:
    flat = _without_head(_flat(config))
    flat.pop("num_anchors", None)
    nested = _nested({**flat, "projector_type": "dspark"}, *MARKOV, "projector_type")
    return nested | {"architectures": ["DSparkDraftModel"]}


def modelopt(config: Config) -> Config:
    flat = _without_head(_flat(config))
    flat.pop("num_anchors", None)
    flat["use_confidence_head"] = flat.pop("enable_confidence_head")
    flat["shift_label"] = flat.pop("sample_from_anchor")
    nested = _nested(flat, *MARKOV, "use_confidence_head", "shift_label")
    return nested | {"architectures": ["Qwen3DSparkModel"]}


def speculators(config: Config) -> Config:
    flat = _flat(config)
    method = "dflash2" if SELECTOR[0] in flat else "dspark" if MARKOV[0] in flat else "dflash"
    layers = {key: flat[key] for key in LAYERS}
    layers["rope_parameters"] = {"rope_theta": flat["rope_theta"]}
    kept = ("block_size", "mask_token_id", "dtype", "sample_from_anchor", *MARKOV, *SELECTOR)
    return {
        **{key: flat[key] for key in kept if key in flat},
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": method,
        "speculators_config": {"algorithm": method},
        "aux_hidden_state_layer_ids": [layer + 1 for layer in flat["target_layer_ids"]],
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": layers,
    }


CHANGES: dict[str, Change] = {
    "z-lab": z_lab,
    "DeepSpec": deepspec,
    "SpecForge": specforge,
    "ModelOpt": modelopt,
    "speculators": speculators,
}
"""What makes the config of a dialect."""


def _dflash(path: Path) -> Path:
    return make_draft(path / "dflash", top={"sample_from_anchor": False})


def _dflash2(path: Path) -> Path:
    return to_dflash2(make_draft(path / "dflash"), path / "dflash2")


def _dspark(path: Path, kind: str) -> Path:
    source = make_draft(path / "dflash", block=7)
    return to_dspark(source, path / "dspark", kind=kind, sample_from_anchor=True)


HEADS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "DFlash": (_dflash, (*CHANGES, GGUF)),
    "DFlash2": (_dflash2, ("z-lab", "speculators", GGUF)),
    "DSpark, vanilla": (partial(_dspark, kind="vanilla"), (*CHANGES, GGUF)),
    "DSpark, gated": (partial(_dspark, kind="gated"), tuple(CHANGES)),
    "DSpark, recurrent": (partial(_dspark, kind="rnn"), tuple(CHANGES)),
}
"""What writes a drafter with a head, and the dialects in which such drafters are published."""
PAIRS = [(head, dialect) for head, (_, dialects) in HEADS.items() for dialect in dialects]


def write_dialect(source: Path, directory: Path, dialect: str) -> Path:
    """Write a drafter's copy in another dialect. Return its directory or file."""
    if dialect == GGUF:
        pytest.importorskip("gguf")
        from tests.support.gguf_drafters import to_gguf

        return to_gguf(source, directory.with_suffix(".gguf"))
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(CHANGES[dialect](config)))
    return directory
