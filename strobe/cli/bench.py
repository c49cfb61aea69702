"""`strobe bench` on the command line; the benchmarks themselves are in `bench`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from strobe.cli.flags import flags
from strobe.config import EngineConfig
from strobe.tools.bench.settings import DECIDED, OfflineSettings, StepSettings

if TYPE_CHECKING:
    BenchFlags = StepFlags = OfflineFlags = OneBench = Any
else:
    BenchFlags = flags(EngineConfig, "BenchFlags", omit=DECIDED, defaults=None)
    StepFlags = flags(StepSettings, "StepFlags", defaults=None)
    OfflineFlags = flags(OfflineSettings, "OfflineFlags", defaults=None)


@dataclass(frozen=True)
class Step:
    """Time engine steps by shapes alone, with random weights and a forced acceptance length,
    against the floor that the machine sets."""

    bench: OmitArgPrefixes[StepFlags] = field(default_factory=StepFlags)
    engine: OmitArgPrefixes[BenchFlags] = field(default_factory=BenchFlags)

    def run(self) -> int:
        from strobe.tools.bench.engine_step import run_step

        return run_step(StepSettings(**asdict(self.bench)), EngineConfig(**asdict(self.engine)))


@dataclass(frozen=True)
class Offline:
    """Answer real prompts with a real target and drafter, speculation off and on in turns."""

    bench: OmitArgPrefixes[OfflineFlags] = field(default_factory=OfflineFlags)
    engine: OmitArgPrefixes[BenchFlags] = field(default_factory=BenchFlags)

    def run(self) -> int:
        from strobe.tools.bench.offline import run_offline

        settings = OfflineSettings(**asdict(self.bench))
        return run_offline(settings, EngineConfig(**asdict(self.engine)))


BENCHES: dict[str, Any] = {"step": Step, "offline": Offline}
if not TYPE_CHECKING:
    OneBench = Annotated[Step, subcommand("step")] | Annotated[Offline, subcommand("offline")]


@dataclass(frozen=True)
class Bench:
    """Measure models on this machine: single steps, or whole answers."""

    which: OmitArgPrefixes[OmitSubcommandPrefixes[OneBench]]

    def run(self) -> int:
        return self.which.run()


def completed(arguments: list[str]) -> list[str]:
    """The arguments behind `strobe bench`, or --help for none. Raises ValueError for a benchmark
    that there is not."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in BENCHES:
        raise ValueError(f"{arguments[0]!r} is no benchmark; there are {', '.join(BENCHES)}.")
    return arguments or ["--help"]
