"""`strobe doctor` on the command line; the doctor is in `tools/doctor`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import OmitArgPrefixes, Positional

from strobe.cli.flags import Json, flags, note
from strobe.config import SERVED_OPTIONS, EngineConfig

DECIDED = (
    "target", "draft", "method", "max_num_seqs", "cuda_graphs", "enable_prefix_caching",
    "ngram_max", "ngram_min", "seed", "load_format", *SERVED_OPTIONS,
)  # fmt: skip
"""Engine settings that the doctor sets itself."""

if TYPE_CHECKING:
    DoctorFlags = Any
else:
    DoctorFlags = flags(EngineConfig, "DoctorFlags", omit=DECIDED, defaults=None)


@dataclass(frozen=True)
class Doctor:
    """Check whether a drafter fits its target, measure acceptance, and explain it if it is low;
    without names, for the demo models. strobe verify shows that the output stays the target's, and
    strobe serve --shadow what drafters bring on your own traffic."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe doctor",
        "strobe doctor Qwen/Qwen3-8B DRAFT --json",
    )

    target: Annotated[Positional[str], note("The target model.", "TARGET")] = ""
    draft: Annotated[Positional[str], note("The drafter.", "DRAFT")] = ""
    data: Annotated[
        str,
        note("A file of JSON lines with prompt, messages or turns; without it, eight built in."),
    ] = ""
    json: Json = False
    engine: OmitArgPrefixes[DoctorFlags] = field(default_factory=DoctorFlags)

    def run(self) -> int:
        from strobe.tools.doctor.run import run_doctor

        config = EngineConfig(**asdict(self.engine), target=self.target, draft=self.draft or None)
        return run_doctor(config, data=self.data, as_json=self.json)
