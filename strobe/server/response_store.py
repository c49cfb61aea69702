"""Responses that clients may come back to, held in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_RESPONSES = 10_000


@dataclass(frozen=True)
class StoredResponse:
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


class ResponseStore:
    """The newest responses, by id, up to MOST_RESPONSES and `max_bytes` of JSON: the oldest make
    room. Whoever has another key finds nothing."""

    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._responses: OrderedDict[tuple[bytes | None, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, name: str, response: StoredResponse) -> None:
        """Hold a response, in place of one that has its id."""
        self.delete(name, response.owner)
        self._responses[response.owner, name] = response
        self.num_bytes += response.num_bytes
        while self.num_bytes > self.max_bytes or len(self) > MAX_RESPONSES:
            _, oldest = self._responses.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def get(self, name: str, owner: bytes | None) -> StoredResponse | None:
        """The response of that id, None where it is not held for that owner."""
        return self._responses.get((owner, name))

    def delete(self, name: str, owner: bytes | None) -> bool:
        """Forget a response; whether there was one."""
        response = self._responses.pop((owner, name), None)
        if response is not None:
            self.num_bytes -= response.num_bytes
        return response is not None
