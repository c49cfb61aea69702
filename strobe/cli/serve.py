"""`strobe serve` on the command line; the server is in `server`."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, ClassVar

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from strobe.cli.flags import ServedFlags, ServerFlags, Target, note
from strobe.config import EngineConfig
from strobe.server.server_settings import ServerConfig


@dataclass(frozen=True)
class Serve:
    """Serve a model through the APIs of OpenAI, Anthropic and Ollama, with a page to try it at
    http://127.0.0.1:8000/. Most servers need a target, such as smollm2, a --port and a --host; a
    drafter makes answers faster. It also takes the options of `vllm serve` and SGLang's server."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe serve smollm2",
        "strobe serve smollm2 --port 11434    (where clients of Ollama look)",
        "strobe serve Qwen/Qwen3-8B --draft auto --host 0.0.0.0 --api-key KEY",
    )

    model: Target = ""
    ray: FlagCreatePairsOff[
        Annotated[
            bool,
            note(
                "Serve on a Ray cluster: the running one, else one of this machine alone; "
                "--data-parallel-size is the number of replicas. Needs strobe[ray]."
            ),
        ]
    ] = False
    server: OmitArgPrefixes[ServerFlags] = field(default_factory=ServerFlags)
    engine: OmitArgPrefixes[ServedFlags] = field(default_factory=ServedFlags)

    def run(self) -> int:
        config = EngineConfig(**asdict(replace(self.engine, target=self.model)))
        settings = ServerConfig(**asdict(self.server))
        if self.ray:
            from strobe.integrations import serve_on_ray as serve
        else:
            from strobe.server.launch import serve
        status = serve(config, settings)
        logging.shutdown()
        os._exit(status)  # sys.exit would wait for threads that still encode a request's text
