"""Restarts of the engine process, with a simulated clock."""

from __future__ import annotations

import asyncio

import pytest

from strobe.config import EngineConfig
from strobe.server.engine_process.client import EngineClient
from strobe.server.engine_process.messages import Failed, Ready
from strobe.server.settings import LogSettings

READY = Ready(2048, 2, 2048, 15, ("dflash", "none"), {}, "float32", "cpu", 100)


def verdicts(*ends: tuple[float, bool], failed: bool = False, restart: bool = True) -> list[bool]:
    """Return whether the process is restarted after each end. ends: (time, whether the engine was
    ready)."""
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
def test_engine_is_restarted_until_the_third_end_within_a_minute(
    ends: list[tuple[float, bool]], expected: list[bool]
):
    assert verdicts(*ends) == expected


def test_engine_is_not_restarted_after_failed_start_or_if_disabled():
    assert verdicts((0, True), failed=True) == [False]
    assert verdicts((0, True), restart=False) == [False]
