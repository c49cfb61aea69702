"""docs/checkpoints.md has the tables that scripts/checkpoints_page.py makes."""

from __future__ import annotations

from pathlib import Path

from scripts.checkpoints_page import PAGE, checkpoint_name, rejecting, tables, with_tables
from tests.support.published_configs import names


def test_checkpoints_page_is_current():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run python scripts/checkpoints_page.py --write"


def test_tables_have_every_published_config():
    for kind, table in tables().items():
        assert len(table.splitlines()) == 2 + len(names(kind))
        assert table in Path(PAGE).read_text(encoding="utf-8")


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
