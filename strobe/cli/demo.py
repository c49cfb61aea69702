"""`strobe demo` on the command line; the demo is in `tools/demo_comparison.py`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar

from tyro.conf import OmitArgPrefixes, arg

from strobe.cli.flags import Debug, DemoFlags, Json, number
from strobe.config import EngineConfig


@dataclass(frozen=True)
class Demo:
    """Stream an answer, then compare plain decoding with DFlash: on held-out tasks of the demo
    models, or, with a target, on questions of a chat, on code and on rewriting."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe demo",
        "strobe demo --target smollm2",
    )

    prompts: Annotated[Any, arg(help="Prompts to compare on."), number("INT")] = 12
    max_tokens: Annotated[Any, arg(help="Maximum tokens per answer."), number("INT")] = 256
    repeats: Annotated[Any, arg(help="Timed runs; the fastest counts."), number("INT")] = 2
    json: Json = False
    debug: Debug = False
    engine: OmitArgPrefixes[DemoFlags] = field(default_factory=DemoFlags)

    def run(self) -> int:
        from strobe.tools.demo_comparison import run_demo

        return run_demo(
            EngineConfig(**asdict(self.engine)),
            prompts=self.prompts,
            max_tokens=self.max_tokens,
            repeats=self.repeats,
            as_json=self.json,
        )
