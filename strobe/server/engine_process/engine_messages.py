"""Messages between the server and the engine process. Imports no torch.

server  -> engine    Submit, Finish, Release, Stop
engine  -> server    Ready | Failed, once; then Rejected, StepEvents, Grammars
"""

from __future__ import annotations

from typing import Any, NamedTuple

from strobe.request import DEFAULT_SCHEDULING, FinishReason, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.speculation.shadow.speed_up import ShadowCosts
from strobe.step import TokenEvent


class Submit(NamedTuple):
    """Generate `params.n` answers to a prompt. key: the key of its events."""

    key: int
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING


class Finish(NamedTuple):
    """End one answer of a prompt, or with sibling None all that still run."""

    key: int
    sibling: int | None
    reason: FinishReason


class Release(NamedTuple):
    """Clear the prefix cache, except pages that running requests hold."""


class Stop(NamedTuple):
    """End the process at once, aborting all requests."""


class Ready(NamedTuple):
    """The engine is ready. sampling: the checkpoint's recommended sampling parameters; methods:
    the available drafting methods, the default first; kv_bytes: size of both KV caches;
    shadow_costs: of steps, as shadow mode's report needs them."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_drafts: int
    methods: tuple[str, ...]
    sampling: dict[str, Any]
    dtype: str
    device: str
    pages: int
    kv_bytes: int = 0
    shadow_costs: ShadowCosts | None = None


class Failed(NamedTuple):
    """The engine cannot start. user_error: because of its settings."""

    error: str
    user_error: bool


class Rejected(NamedTuple):
    """A rejected prompt and the reason. user_error: because of the request itself."""

    key: int
    error: str
    user_error: bool = True


class Grammars(NamedTuple):
    """Sent when the grammar compiler fails or recovers. fault: why it fails, None if it works."""

    fault: str | None


class StepEvents(NamedTuple):
    """The events of one engine step. snapshot: sent a few times a second, else None. ended: when
    the step's result was available, by time.monotonic of the engine process."""

    events: list[TokenEvent]
    snapshot: EngineSnapshot | None
    ended: float = 0.0


FromServer = Submit | Finish | Release | Stop
FromEngine = Ready | Failed | Rejected | StepEvents | Grammars
