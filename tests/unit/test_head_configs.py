"""The keys of drafters' heads are read with their defaults, and wrong values are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from strobe.models.config_readers.fields import Fields
from strobe.models.heads import dflash2, dspark
from strobe.models.heads.dflash2 import SelectorConfig
from strobe.models.heads.dspark import MarkovConfig

SELECTOR = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}


def fields(values: dict[str, Any]) -> Fields:
    return Fields(values, Path("config.json"))


def test_dflash2_reads_its_four_keys():
    assert dflash2.read(fields(SELECTOR)) == SelectorConfig(2, 16, 256, 16)


@pytest.mark.parametrize("key", SELECTOR)
@pytest.mark.parametrize("value", [None, 0, "2", True])
def test_dflash2_names_a_wrong_value(key: str, value: Any):
    with pytest.raises(ValueError, match=f"config.json: {key} is {value!r}, but must be a whole"):
        dflash2.read(fields({**SELECTOR, key: value}))


def test_dflash2_names_too_many_candidates():
    with pytest.raises(ValueError, match="selector_top_k is 64, but at most 32 candidates"):
        dflash2.read(fields({**SELECTOR, "selector_top_k": 64}))


@pytest.mark.parametrize(
    ("values", "config"),
    [
        ({"markov_rank": 0}, MarkovConfig(0, "vanilla", False, False, None, 1.0)),
        (
            {
                "markov_rank": 256,
                "markov_head_type": "rnn",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
                "dspark_draft_topk": 16,
                "logit_scale": 0.5,
            },
            MarkovConfig(256, "rnn", True, True, 16, 0.5),
        ),
        (
            {"markov_rank": 8, "markov_head_type": "gated", "use_confidence_head": True},
            MarkovConfig(8, "gated", True, False, None, 1.0),
        ),
    ],
)
def test_dspark_reads_its_keys(values: dict[str, Any], config: MarkovConfig):
    assert dspark.read(fields(values)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"markov_rank": None}, "markov_rank is None, but must be a whole number of at least 0"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_head_type": "mlp"}, "markov_head_type is 'mlp', but must be one of vanilla, ga"),
        ({"enable_confidence_head": 1}, "enable_confidence_head is 1, but must be true or false"),
        (
            {"enable_confidence_head": True, "use_confidence_head": False},
            "enable_confidence_head True and use_confidence_head False contradict each other",
        ),
        ({"dspark_draft_topk": 0}, "dspark_draft_topk is 0"),
        ({"dspark_draft_topk": 64}, "dspark_draft_topk is 64, but at most 32 candidates"),
        ({"logit_scale": -1}, "logit_scale is -1, but must be a positive number"),
    ],
)
def test_dspark_names_a_wrong_value(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        dspark.read(fields({"markov_rank": 8, **changes}))
