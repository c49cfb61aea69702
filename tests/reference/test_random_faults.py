"""Faults at random stages, briefly; `make soak` injects 10,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.random_faults import inject, make_faulty_engine


@pytest.mark.parametrize("overlap", [1, pytest.param(2, marks=pytest.mark.full)])
def test_faults_at_random_stages_change_no_token(overlap: int, tmp_path: Path):
    injected = inject(make_faulty_engine(tmp_path, "qwen3", overlap), 40, seed=overlap)
    assert sum(count > 0 for count in injected.values()) >= 6, "most stages failed"
