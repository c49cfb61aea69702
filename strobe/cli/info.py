"""`strobe info` on the command line; the facts come from `tools/checkpoint_info.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from tyro.conf import FlagCreatePairsOff, Positional, arg

from strobe.cli.flags import Json, note
from strobe.config import DEMO_MODELS, EngineConfig


@dataclass(frozen=True)
class Info:
    """Describe a checkpoint and what it takes to run, and check whether a drafter fits it."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe info smollm2",
        "strobe info Qwen/Qwen3-8B --draft auto",
        "strobe info config.json",
    )

    model: Annotated[
        Positional[str],
        note(
            "Directory, hub name or config.json of a target or a drafter; without one, the demo "
            "models.",
            "NAME",
        ),
    ] = ""
    draft: Annotated[
        str | None,
        note("A drafter to check against the target; auto takes the published one.", "TEXT"),
    ] = None
    tensor_parallel_size: Annotated[
        int, arg(help="Also show what each of this many ranks holds.", metavar="INT")
    ] = 1
    draft_tensor_parallel_size: Annotated[
        int | None,
        arg(help="Ranks that the drafter is split over: all of them, or 1.", metavar="INT"),
    ] = None
    enable_expert_parallel: FlagCreatePairsOff[
        Annotated[bool, arg(help="Give each rank whole experts, not parts of all.")]
    ] = False
    json: Json = False

    def run(self) -> int:
        from strobe.hub.locate import find_pair
        from strobe.parallel.split import Split
        from strobe.tools.checkpoint_info import describe, show
        from strobe.tools.config_info import is_config

        config = EngineConfig(
            tensor_parallel_size=self.tensor_parallel_size,
            draft_tensor_parallel_size=self.draft_tensor_parallel_size,
            enable_expert_parallel=self.enable_expert_parallel,
        )
        model = self.model
        draft = self.draft
        if is_config(model):
            return self._describe_config()
        if not model:
            model = str(DEMO_MODELS / "target")
            draft = draft or str(DEMO_MODELS / "draft")
        else:
            model, draft = find_pair(model, draft)
        if draft is None and self.draft_tensor_parallel_size is not None:
            raise ValueError(
                f"draft_tensor_parallel_size is {self.draft_tensor_parallel_size}, but there is no "
                "drafter; name one with --draft, or leave it out."
            )
        split = Split.of(config, 0)
        facts = describe(Path(model), Path(draft) if draft is not None else None, split)
        print(json.dumps(facts)) if self.json else show(facts)
        return 0

    def _describe_config(self) -> int:
        """Describe a config alone; return 1 if its checkpoint cannot load."""
        from strobe.hub.download import is_hub_name
        from strobe.tools.checkpoint_info import show
        from strobe.tools.config_info import describe_config, loads

        if self.draft is not None and (self.draft == "auto" or is_hub_name(self.draft)):
            raise ValueError(
                f"draft is {self.draft!r}, but {self.model} is a config alone; name the drafter's "
                "config.json or directory."
            )
        for name in ("tensor_parallel_size", "draft_tensor_parallel_size"):
            if getattr(self, name) not in (None, 1):
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but {self.model} is a config alone; name "
                    "the checkpoint's directory to see what each rank holds."
                )
        facts = describe_config(Path(self.model), Path(self.draft) if self.draft else None)
        print(json.dumps(facts)) if self.json else show(facts)
        return 0 if loads(facts) else 1
