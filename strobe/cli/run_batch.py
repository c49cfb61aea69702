"""`strobe run-batch`; the work is in `server/batch.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from tyro.conf import OmitArgPrefixes, arg

from strobe.cli.flags import EngineFlags, ServerFlags
from strobe.config import EngineConfig
from strobe.server.settings import ServerConfig


@dataclass(frozen=True)
class RunBatch:
    """Answer a file of requests as OpenAI's batch API does. What the output file answers already is
    not asked again, so that a run that was stopped goes on where it was."""

    input_file: Annotated[
        str,
        arg(
            aliases=["-i"],
            help="Requests, one a line: custom_id, method POST, url and body.",
            metavar="FILE",
            help_behavior_hint="(required)",
        ),
    ] = ""
    output_file: Annotated[
        str,
        arg(
            aliases=["-o"],
            help="Answers, one a line in the order in which they end. Lines are added to a file of "
            "answers; any other file is left alone.",
            metavar="FILE",
            help_behavior_hint="(required)",
        ),
    ] = ""
    server: OmitArgPrefixes[ServerFlags] = field(default_factory=ServerFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        from strobe.server.batch import run_batch

        for name, value in (("input", self.input_file), ("output", self.output_file)):
            if not value:
                raise ValueError(f"No {name} file was given; name it with --{name}-file.")
        config, settings = EngineConfig(**asdict(self.engine)), ServerConfig(**asdict(self.server))
        return run_batch(config, settings, Path(self.input_file), Path(self.output_file))
