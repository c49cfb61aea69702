"""Responses that clients may come back to, held in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST_RESPONSES = 10_000


@dataclass(frozen=True)
class Held:
    """A response. owner: the API key that asked for it, by its digest, None where there are none;
    body: its JSON; items: the JSON of each input item, those of the responses before it included;
    output: the same of its output."""

    owner: bytes | None
    body: bytes
    items: tuple[bytes, ...]
    output: tuple[bytes, ...]

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """All items up to its end."""
        return self.items + self.output

    @property
    def num_bytes(self) -> int:
        """What it counts: items of a conversation count in each of its responses."""
        return len(self.body) + sum(map(len, self.conversation))


class ResponseMemory:
    """The newest responses, by id, up to MOST_RESPONSES and `most_bytes` of JSON: the oldest make
    room. Whoever has another key finds nothing."""

    def __init__(self, most_bytes: int):
        self.most_bytes, self.num_bytes = most_bytes, 0
        self._held: OrderedDict[tuple[bytes | None, str], Held] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def keep(self, name: str, held: Held) -> None:
        """Hold a response, in place of one that has its id."""
        self.drop(name, held.owner)
        self._held[held.owner, name] = held
        self.num_bytes += held.num_bytes
        while self.num_bytes > self.most_bytes or len(self) > MOST_RESPONSES:
            _, oldest = self._held.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def find(self, name: str, owner: bytes | None) -> Held | None:
        """The response of that id, None where it is not held for that owner."""
        return self._held.get((owner, name))

    def drop(self, name: str, owner: bytes | None) -> bool:
        """Forget a response; whether there was one."""
        held = self._held.pop((owner, name), None)
        if held is not None:
            self.num_bytes -= held.num_bytes
        return held is not None
