"""How often an engine's process is started again, told by a clock that a test sets."""

from __future__ import annotations

import asyncio

import pytest

from strobe.config import EngineConfig
from strobe.server.engine_process.client import EngineClient
from strobe.server.engine_process.messages import Failed, Ready
from strobe.server.settings import LogSettings

READY = Ready(2048, 2, 2048, 15, ("dflash", "none"), {}, "float32", "cpu", 100)


def verdicts(*ends: tuple[float, bool], failed: bool = False, restart: bool = True) -> list[bool]:
    """Whether the process is started again after each of its ends: a time, and whether it could
    answer before."""
    client = EngineClient(EngineConfig(), LogSettings(), restart=restart)

    async def end(time: float, answered: bool) -> bool:
        loop = asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "time", lambda: time)
            client.facts = READY if answered else None
            client.failed = Failed("no", False) if failed else None
            client.restarting = client._may_restart()
        return client.restarting

    async def all_ends() -> list[bool]:
        return [await end(*end_args) for end_args in ends]

    return asyncio.run(all_ends())


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(0, True), (10, True), (59, True)], [True, True, False]),
        ([(0, True), (10, True), (61, True), (69, True)], [True, True, True, False]),
        ([(0, True), (100, True), (200, True), (300, True)], [True] * 4),
        ([(0, True), (100, False), (200, False)], [True, True, False]),
        ([(0, False)], [False]),
    ],
    ids=["third in a minute", "sliding minute", "rare", "never answers again", "first start"],
)
def test_third_end_within_a_minute_is_the_last(
    ends: list[tuple[float, bool]], expected: list[bool]
):
    assert verdicts(*ends) == expected


def test_engine_that_cannot_start_or_may_not_is_not_restarted():
    assert verdicts((0, True), failed=True) == [False]
    assert verdicts((0, True), restart=False) == [False]
