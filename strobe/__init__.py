"""Strobe: an LLM inference engine built around DFlash block-diffusion speculative decoding."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from strobe.host.openmp import prepare

if TYPE_CHECKING:
    from strobe.config import EngineConfig
    from strobe.llm import LLM
    from strobe.sampling_params import SamplingParams, Speculation

__version__ = "0.2.0"
__all__ = ["LLM", "EngineConfig", "SamplingParams", "Speculation", "__version__"]

prepare()

_HOMES = {
    "LLM": "strobe.llm",
    "EngineConfig": "strobe.config",
    "SamplingParams": "strobe.sampling_params",
    "Speculation": "strobe.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import strobe` loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'strobe' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
