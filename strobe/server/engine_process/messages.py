"""What the server and the engine's process say to each other. Imports no torch.

server  -> engine    Submit, Finish, Forget, Stop
engine  -> server    Ready | Failed, once; then Refused, Step, Grammars
"""

from __future__ import annotations

from typing import Any, NamedTuple

from strobe.request import DEFAULT_SCHEDULING, FinishReason, SchedulingOptions
from strobe.sampling_params import SamplingParams
from strobe.server.engine_process.snapshot import EngineSnapshot
from strobe.step import TokenEvent


class Submit(NamedTuple):
    """Answer a prompt, `params.n` times. key: what its events are called by."""

    key: int
    prompt_ids: list[int]
    params: SamplingParams
    request_id: str
    scheduling: SchedulingOptions = DEFAULT_SCHEDULING


class Finish(NamedTuple):
    """End one answer of a prompt, or all that still run: a stop string, or nobody waits."""

    key: int
    sibling: int | None
    reason: FinishReason


class Release(NamedTuple):
    """Cached prefixes that no running request holds."""


class Stop(NamedTuple):
    """Leave at once; whatever runs is given up."""


class Ready(NamedTuple):
    """The engine can answer. sampling: what the checkpoint recommends; methods: those it can draft
    with, the default first."""

    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    num_drafts: int
    methods: tuple[str, ...]
    sampling: dict[str, Any]
    dtype: str
    device: str
    pages: int


class Failed(NamedTuple):
    """The engine cannot start, and why; user_error: the settings are to blame."""

    error: str
    user_error: bool


class Rejected(NamedTuple):
    """A prompt that cannot be answered, and the sentence that says why; user_error: the request is
    to blame."""

    key: int
    error: str
    user_error: bool = True


class Grammars(NamedTuple):
    """Why no grammar can be compiled, None where they can; sent when that changes."""

    fault: str | None


class StepEvents(NamedTuple):
    """The events of one engine step, their keys those of the prompts; snapshot: now and then.
    ended: when the step's result was in, by time.monotonic of the engine's process."""

    events: list[TokenEvent]
    snapshot: EngineSnapshot | None
    ended: float = 0.0


FromServer = Submit | Finish | Release | Stop
FromEngine = Ready | Failed | Rejected | StepEvents | Grammars
