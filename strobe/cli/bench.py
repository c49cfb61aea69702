"""`strobe bench` on the command line; the benchmarks are in `tools/bench`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from strobe.cli.flags import flags
from strobe.config import EngineConfig
from strobe.tools.bench.bench_settings import (
    DECIDED,
    LoadSettings,
    OfflineSettings,
    RecordSettings,
    StepSettings,
)

if TYPE_CHECKING:
    BenchFlags = StepFlags = OfflineFlags = LoadFlags = RecordFlags = OneBench = Any
    RecordEngineFlags = Any
else:
    BenchFlags = flags(EngineConfig, "BenchFlags", omit=DECIDED, defaults=None)
    StepFlags = flags(StepSettings, "StepFlags", defaults=None)
    OfflineFlags = flags(OfflineSettings, "OfflineFlags", defaults=None)
    LoadFlags = flags(LoadSettings, "LoadFlags", defaults=None)
    RecordFlags = flags(RecordSettings, "RecordFlags", defaults=None)
    RecordEngineFlags = flags(
        EngineConfig, "RecordEngineFlags", omit=(*DECIDED, "adaptive", "overlap"), defaults=None
    )


@dataclass(frozen=True)
class Step:
    """Time engine steps of given shapes, with random weights and a forced acceptance length, and
    compare them with the machine's floor."""

    bench: OmitArgPrefixes[StepFlags] = field(default_factory=StepFlags)
    engine: OmitArgPrefixes[BenchFlags] = field(default_factory=BenchFlags)

    def run(self) -> int:
        from strobe.tools.bench.engine_step import run_step

        return run_step(StepSettings(**asdict(self.bench)), EngineConfig(**asdict(self.engine)))


@dataclass(frozen=True)
class Offline:
    """Answer real prompts with a real target and drafter, with and without speculation."""

    bench: OmitArgPrefixes[OfflineFlags] = field(default_factory=OfflineFlags)
    engine: OmitArgPrefixes[BenchFlags] = field(default_factory=BenchFlags)

    def run(self) -> int:
        from strobe.tools.bench.offline import run_offline

        settings = OfflineSettings(**asdict(self.bench))
        return run_offline(settings, EngineConfig(**asdict(self.engine)))


@dataclass(frozen=True)
class Load:
    """Send many requests at once or at a rate, with random weights and drafts accepted as in
    recorded traces, and compare plain decoding, fixed and adaptive numbers of drafts."""

    bench: OmitArgPrefixes[LoadFlags] = field(default_factory=LoadFlags)
    engine: OmitArgPrefixes[BenchFlags] = field(default_factory=BenchFlags)

    def run(self) -> int:
        settings = LoadSettings(**asdict(self.bench))
        engine = EngineConfig(**asdict(self.engine))
        if settings.break_even:
            from strobe.tools.bench.break_even import run_break_even

            return run_break_even(settings, engine)
        from strobe.tools.bench.request_load import run_load

        return run_load(settings, engine)


@dataclass(frozen=True)
class Record:
    """Record traces of a real target and drafter on real prompts, for strobe bench load."""

    bench: OmitArgPrefixes[RecordFlags] = field(default_factory=RecordFlags)
    engine: OmitArgPrefixes[RecordEngineFlags] = field(default_factory=RecordEngineFlags)

    def run(self) -> int:
        from strobe.tools.bench.record import run_record

        settings = RecordSettings(**asdict(self.bench))
        return run_record(settings, EngineConfig(**asdict(self.engine)))


KINDS = ("step", "offline", "load", "record")
NOUN = "a benchmark"
if not TYPE_CHECKING:
    OneBench = Step | Offline | Load | Record


@dataclass(frozen=True)
class Bench:
    """Measure models on this machine: single steps, whole answers, or load."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe bench step --help",
        "strobe bench offline --target Qwen/Qwen3-8B --draft auto",
    )

    which: OmitArgPrefixes[OmitSubcommandPrefixes[OneBench]]

    def run(self) -> int:
        return self.which.run()
