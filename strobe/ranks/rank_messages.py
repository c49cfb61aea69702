"""Messages between the first rank and the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from strobe.engine.build import ResolvedConfig
from strobe.engine.engine import Engine
from strobe.parallel.group import RankFailed
from strobe.step import Plan

Prepare = Callable[[nn.Module], None]
Make = Callable[..., Engine]


class Start(NamedTuple):
    """The settings of a rank. make: `Engine` or a subclass; options: of it. prepare: changes the
    target once it is loaded. port: of the store where ranks meet, None if they share memory."""

    resolved: ResolvedConfig
    make: Make
    options: dict[str, Any]
    prepare: Prepare | None
    port: int | None


class Launch(NamedTuple):
    """A plan to run: the number of its step, and of the steps that were in flight before it."""

    step: int
    in_flight: int
    plan: Plan


class Failure(NamedTuple):
    """Why a rank has ended. user_error: whether its settings are at fault."""

    error: str
    user_error: bool

    def exception(self) -> Exception:
        return ValueError(self.error) if self.user_error else RankFailed(self.error)
