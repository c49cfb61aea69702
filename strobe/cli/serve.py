"""`strobe serve` on the command line; the server is in `server`."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, field
from typing import Annotated

from tyro.conf import OmitArgPrefixes, Positional, arg

from strobe.cli.flags import ServedFlags, ServerFlags
from strobe.config import EngineConfig
from strobe.server.settings import ServerConfig


@dataclass(frozen=True)
class Serve:
    """Serve a model through OpenAI's API, with a page to try it; without a model, the demo
    models. It also takes the options of `vllm serve` and SGLang's server."""

    target: Annotated[
        Positional[str],
        arg(
            help="Directory or hub name of the target model.",
            metavar="TARGET",
            help_behavior_hint="",
        ),
    ] = ""
    server: OmitArgPrefixes[ServerFlags] = field(default_factory=ServerFlags)
    engine: OmitArgPrefixes[ServedFlags] = field(default_factory=ServedFlags)

    def run(self) -> int:
        from strobe.server.launch import serve

        config = EngineConfig(**asdict(self.engine), target=self.target)
        status = serve(config, ServerConfig(**asdict(self.server)))
        logging.shutdown()
        os._exit(status)  # sys.exit would wait for threads that still encode a request's text
