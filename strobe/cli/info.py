"""`strobe info` on the command line; the facts come from `tools/info.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from strobe.cli.flags import Json
from strobe.config import DEMO_MODELS


@dataclass(frozen=True)
class Info:
    """Describe a checkpoint and what it takes to run, and check whether a drafter fits it."""

    model: Annotated[
        Positional[str],
        arg(
            help="Directory or hub name of a target or a DFlash drafter; without one, the demo "
            "models.",
            metavar="NAME",
            help_behavior_hint="",
        ),
    ] = ""
    draft: Annotated[
        str | None,
        arg(
            help="A drafter to check against the target; auto takes the published one.",
            metavar="TEXT",
            help_behavior_hint="",
        ),
    ] = None
    json: Json = False

    def run(self) -> int:
        from strobe.hub.locate import find_pair
        from strobe.tools.info import describe, show

        model, draft = self.model, self.draft
        if not model:
            model, draft = str(DEMO_MODELS / "target"), draft or str(DEMO_MODELS / "draft")
        else:
            model, draft = find_pair(model, draft)
        facts = describe(Path(model), Path(draft) if draft is not None else None)
        print(json.dumps(facts)) if self.json else show(facts)
        return 0
