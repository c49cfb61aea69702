"""The pages have the tables that scripts/checkpoints_page.py makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.checkpoints_page import PAGES, checkpoint_name, rejecting, tables, with_tables
from strobe.hub.gguf_file import TYPES
from strobe.hub.pairs import PAIRS
from tests.support import tested_formats
from tests.support.published_configs import names
from tests.support.stored_weights import FORMATS as STORED
from tests.support.tested_formats import DRAFTERS, GGUF_TYPES, IN_KERNELS, STORED_FAMILIES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_of_pages_are_current(page: Path):
    text = page.read_text(encoding="utf-8")
    assert with_tables(text) == text, "run python scripts/checkpoints_page.py --write"


def test_tables_have_every_published_config_and_pair():
    made = tables()
    for kind in ("drafters", "targets"):
        assert len(made[kind].splitlines()) == 2 + len(names(kind))
    assert len(made["pairs"].splitlines()) == 2 + len(PAIRS)
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert all(table in text for table in made.values())


def test_every_tested_format_has_a_row():
    """Formats that tests run but no row names would be missing from the table."""
    rows = tested_formats.FORMATS.values()
    recorded = Path(__file__).parents[1] / "recorded"
    checkpoints = sorted(path.parent.name for path in recorded.glob("*/config.json"))
    assert checkpoints == tested_formats.RECORDED
    assert {name for row in rows for name in row.written} == set(STORED) == set(DRAFTERS)
    assert {name for row in rows for name in row.kernels} == set(IN_KERNELS)
    assert {name for row in rows for name in row.families} == set(STORED_FAMILIES)
    in_gguf = [name for row in rows for name in row.gguf]
    assert sorted(in_gguf) == sorted(GGUF_TYPES)
    assert set(GGUF_TYPES) == {name for name, _, _ in TYPES.values()}


def test_uncertain_names_are_marked():
    entry = {"source": "a test", "note": "The repository's name is inferred from the shape."}
    assert checkpoint_name("a__b", entry) == "`a/b` (name inferred)"
    assert checkpoint_name("a__b", {"source": "a test"}) == "`a/b`"


def test_reason_of_a_rejection_is_told_apart():
    entry = {"config": {"architectures": ["OtherForCausalLM"]}}
    answer = {"reason": "OtherForCausalLM", "sentence": "not a supported target"}
    assert rejecting(answer, entry) == "its architecture"
    answer = {"reason": "AWQ in 4 bits", "sentence": "the weights are quantized by AWQ in 4 bits"}
    assert rejecting(answer, entry) == "its format of weights"
    answer = {"reason": "key", "sentence": "key is 1", "method": "DFlash"}
    assert rejecting(answer, entry) == "`key`"
