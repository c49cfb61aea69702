"""`strobe run-batch` on the command line; the work is in `server/batches/batch_file.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import OmitArgPrefixes, arg

from strobe.cli.flags import EngineFlags, ServerFlags
from strobe.config import EngineConfig
from strobe.server.server_settings import ServerConfig


@dataclass(frozen=True)
class RunBatch:
    """Answer a file of requests as OpenAI's batch API does. Requests that the output file already
    answers are skipped, so a stopped run resumes."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe run-batch -i requests.jsonl -o answers.jsonl --target smollm2",
    )

    input_file: Annotated[
        str,
        arg(
            aliases=["-i"],
            help="Requests, one per line: custom_id, method POST, url and body.",
            metavar="FILE",
            help_behavior_hint="(required)",
        ),
    ] = ""
    output_file: Annotated[
        str,
        arg(
            aliases=["-o"],
            help="Answers, one per line in the order in which they end, appended to a file of "
            "answers; any other existing file is left unchanged.",
            metavar="FILE",
            help_behavior_hint="(required)",
        ),
    ] = ""
    server: OmitArgPrefixes[ServerFlags] = field(default_factory=ServerFlags)
    engine: OmitArgPrefixes[EngineFlags] = field(default_factory=EngineFlags)

    def run(self) -> int:
        from strobe.server.batches.batch_file import run_batch

        for name, value in (("input", self.input_file), ("output", self.output_file)):
            if not value:
                raise ValueError(f"No {name} file was given; name it with --{name}-file.")
        config = EngineConfig(**asdict(self.engine))
        settings = ServerConfig(**asdict(self.server))
        return run_batch(config, settings, Path(self.input_file), Path(self.output_file))
