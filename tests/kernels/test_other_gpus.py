"""Kernels compile for GPUs that are not there, and fit their shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
"""Bytes that a program may use, by compute capability (CUDA's programming guide)."""
NIGHTLY = (80, 89, 90)
"""They rarely show more than 120, which has the tightest limit; what runs on 90 is also compiled by
`make test-gpu`."""


@pytest.mark.full
@pytest.mark.parametrize(
    "capability",
    [
        pytest.param(capability, marks=pytest.mark.nightly if capability in NIGHTLY else ())
        for capability in SHARED_MEMORY
    ],
)
def test_kernels_compile_and_fit_the_shared_memory(capability: int, tmp_path: Path):
    shared = SHARED_MEMORY[capability]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_kernels", str(capability), str(shared)],
        cwd=ROOT,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({kernel["kernel"] for kernel in kernels}) > 20
    assert [kernel for kernel in kernels if kernel["shared"] > shared] == []
