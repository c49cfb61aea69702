"""What `LLM.get_metrics()` returns, for scripts that ask which kind a metric is."""

from __future__ import annotations

from strobe.engine.stats import Counter, Metric, Vector

__all__ = ["Counter", "Metric", "Vector"]
