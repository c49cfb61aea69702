"""`strobe eval` on the command line; the evaluation is in `tools/eval`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes

from strobe.cli.flags import flags
from strobe.config import EngineConfig
from strobe.tools.bench.bench_settings import DECIDED
from strobe.tools.eval.eval_settings import EvalSettings

if TYPE_CHECKING:
    EvalFlags = EvalEngineFlags = OneEvaluation = Any
else:
    EvalFlags = flags(EvalSettings, "EvalFlags", defaults=None)
    EvalEngineFlags = flags(EngineConfig, "EvalEngineFlags", omit=DECIDED, defaults=None)


@dataclass(frozen=True)
class _Evaluation:
    settings: OmitArgPrefixes[EvalFlags] = field(default_factory=EvalFlags)
    engine: OmitArgPrefixes[EvalEngineFlags] = field(default_factory=EvalEngineFlags)

    def run(self) -> int:
        from strobe.tools.eval.evaluate import evaluate

        settings = EvalSettings(**asdict(self.settings))
        config = asdict(self.engine)
        return evaluate(type(self).__name__.lower(), settings, EngineConfig(**config))


@dataclass(frozen=True)
class Acceptance(_Evaluation):
    """Acceptance length, rate by position and histogram, compared with the published figures."""


@dataclass(frozen=True)
class Accuracy(_Evaluation):
    """Share of correct answers without and with speculation, for data sets with answers."""


@dataclass(frozen=True)
class Speed(_Evaluation):
    """Tokens per second without and with speculation, and the speed-up by data set and load."""


KINDS = ("acceptance", "accuracy", "speed")
NOUN = "an evaluation"
if not TYPE_CHECKING:
    OneEvaluation = Acceptance | Accuracy | Speed


@dataclass(frozen=True)
class Eval:
    """Measure acceptance, accuracy or speed on data sets, with a report and plots."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe eval acceptance --target Qwen/Qwen3-8B --draft auto",
        "strobe eval speed --target smollm2 --draft auto",
    )

    which: OmitArgPrefixes[OmitSubcommandPrefixes[OneEvaluation]]

    def run(self) -> int:
        return self.which.run()
