"""`strobe serve --tensor-parallel-size 2` on the demo models."""

from __future__ import annotations

import os
import signal

import pytest

from tests.server.support.http_client import CHAT, Talk
from tests.server.support.polling import PATIENCE, until
from tests.server.support.server_process import Served
from tests.support.processes import children_of, has_ended

MESSAGES = [{"role": "user", "content": "Sort these words: pear kiwi apple fig"}]
BODY = {"messages": MESSAGES, "max_tokens": 60, "temperature": 0}
LONG = {**BODY, "max_tokens": 900, "ignore_eos": True}


def followers(served: Served) -> list[int]:
    """Return the process ids of the other ranks."""
    return children_of(served.engine_pid, "follower")


def text(served: Served) -> str:
    with Talk(served.url, CHAT, BODY) as talk:
        return talk.json()["choices"][0]["message"]["content"]


@pytest.mark.full
def test_killed_rank_fails_open_requests_and_the_group_starts_again():
    """Also if no request is open. SIGTERM ends all ranks."""
    served = Served("--no-adaptive", "--tensor-parallel-size=2", "--max-model-len=1024")
    try:
        answer = text(served)
        (rank,) = followers(served)
        with Talk(served.url, CHAT, {**LONG, "stream": True}) as talk:
            events = talk.events()
            next(events)
            os.kill(rank, signal.SIGKILL)
            *_, last, done = events
        assert "send the request again" in last["error"]["message"]
        assert done == "[DONE]"
        assert "Rank 1 has ended in step" in served.log
        assert "(exit code -9)" in served.log
        until(lambda: "the engine can answer again" in served.log, "the group has started again")
        assert text(served) == answer != ""
        os.kill(*followers(served), signal.SIGKILL)  # of an idle engine
        until(lambda: served.log.count("the engine can answer again") == 2, "and once more")
        (rank,) = followers(served)
        assert served.stop() == 0
        assert "Traceback" not in served.log
        until(lambda: has_ended(rank), "the other rank has ended")
    finally:
        served.process.kill()
        served.process.wait(PATIENCE)
