"""`strobe verify` on the command line; the verification is in `tools/verify`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from tyro.conf import OmitArgPrefixes, Positional

from strobe.cli.flags import Json, flags, note
from strobe.config import SERVED_OPTIONS, EngineConfig
from strobe.tools.verify.verify_settings import VerifySettings

DECIDED = ("target", "draft", "adaptive", *SERVED_OPTIONS)
"""Engine settings that are arguments, or that a verification sets itself."""

if TYPE_CHECKING:
    VerifyFlags = VerifyEngineFlags = Any
else:
    VerifyFlags = flags(VerifySettings, "VerifyFlags", defaults=None)
    VerifyEngineFlags = flags(EngineConfig, "VerifyEngineFlags", omit=DECIDED, defaults=None)


@dataclass(frozen=True)
class Verify:
    """Prove that speculation gives the target's own output, on this checkpoint and machine; exit
    status 1 means a fault, 2 that nothing was decided."""

    examples: ClassVar[tuple[str, ...]] = (
        "strobe verify",
        "strobe verify Qwen/Qwen3-8B DRAFT --tokens 30000",
        "strobe verify Qwen/Qwen3-8B DRAFT --against http://localhost:8000",
    )

    target: Annotated[Positional[str], note("The target model.", "TARGET")] = ""
    draft: Annotated[Positional[str], note("The drafter.", "DRAFT")] = ""
    json: Json = False
    settings: OmitArgPrefixes[VerifyFlags] = field(default_factory=VerifyFlags)
    engine: OmitArgPrefixes[VerifyEngineFlags] = field(default_factory=VerifyEngineFlags)

    def run(self) -> int:
        from strobe.tools.verify.verify import run_verify

        config = EngineConfig(**asdict(self.engine), target=self.target, draft=self.draft or None)
        settings = VerifySettings(**asdict(self.settings))
        return run_verify(config, settings, as_json=self.json)
