"""The engines' own counters as metrics. A new one is a line of `METRICS` in outputs.py."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from strobe.counters import EngineStats
from strobe.outputs import METRICS
from strobe.server.engine_process.snapshot import EngineSnapshot

IDLE = EngineSnapshot(running=0, waiting=0, kv_used=0.0, stats=EngineStats())

OWN_LABELS = ("model_name", "engine")
"""Labels of every metric except the process's and HTTP's."""


class EngineTotals:
    """An engine's totals: its latest snapshot's plus those before a restart. own: its labels."""

    def __init__(self, own: tuple[str, str]):
        self.own = own
        self._before = EngineStats()
        self.snapshot = IDLE

    def restart(self) -> None:
        """Keep the totals of an engine that has ended, since the next one counts from 0."""
        self._before.merge(self.snapshot.stats)
        self.snapshot = IDLE

    @property
    def stats(self) -> EngineStats:
        stats = EngineStats()
        stats.merge(self._before)
        stats.merge(self.snapshot.stats)
        return stats


class TotalsCollector(Collector):
    """The totals of all engines."""

    def __init__(self) -> None:
        self.engines: list[EngineTotals] = []

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        totals = [(engine.own, engine.stats) for engine in self.engines]
        for attribute, name, help in METRICS:
            value_of = attrgetter(attribute)
            by_position = isinstance(value_of(totals[0][1]), list)
            labels = [*OWN_LABELS, "position"] if by_position else OWN_LABELS
            family = CounterMetricFamily(name, help, labels=labels)
            for own, stats in totals:
                for position, count in enumerate(
                    value_of(stats) if by_position else [value_of(stats)]
                ):
                    family.add_metric([*own, *[str(position)] * by_position], count)
            yield family
        for column, name in ((2, "slope"), (3, "intercept")):
            gauge = GaugeMetricFamily(
                f"strobe:spec_decode_confidence_{name}",
                f"A draft's chance, about sigmoid(slope * evidence + intercept): the {name}.",
                labels=[*OWN_LABELS, "block_drafts", "position"],
            )
            for engine in self.engines:
                for row in engine.snapshot.confidence:
                    gauge.add_metric([*engine.own, str(row[0]), str(row[1])], row[column])
            yield gauge
