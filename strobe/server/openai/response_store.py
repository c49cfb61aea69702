"""Finished responses of /v1/responses, stored in memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_RESPONSES = 10_000


@dataclass(frozen=True)
class StoredResponse:
    """A stored response. owner: the digest of the client's API key, None without keys. body: its
    JSON. items: the JSON of each input item, including items of previous responses. output: the
    JSON of each output item."""

    owner: bytes | None
    body: bytes
    items: tuple[bytes, ...]
    output: tuple[bytes, ...]

    @property
    def conversation(self) -> tuple[bytes, ...]:
        """All items, input and output."""
        return self.items + self.output

    @property
    def num_bytes(self) -> int:
        """Size in bytes of body and items; shared items count in each response."""
        return len(self.body) + sum(map(len, self.conversation))


class ResponseStore:
    """The newest responses by owner and id, up to MAX_RESPONSES and `max_bytes` of JSON. The oldest
    are evicted. id_prefix: the beginning of the ids of responses stored here."""

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.id_prefix = "resp_"
        self._responses: OrderedDict[tuple[bytes | None, str], StoredResponse] = OrderedDict()

    def __len__(self) -> int:
        return len(self._responses)

    def put(self, name: str, response: StoredResponse) -> None:
        """Store a response, replacing one with the same id and owner."""
        self.delete(name, response.owner)
        self._responses[response.owner, name] = response
        self.num_bytes += response.num_bytes
        while self.num_bytes > self.max_bytes or len(self) > MAX_RESPONSES:
            _, oldest = self._responses.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def get(self, name: str, owner: bytes | None) -> StoredResponse | None:
        """Return the owner's response with that id, None if it is not stored."""
        return self._responses.get((owner, name))

    def delete(self, name: str, owner: bytes | None) -> bool:
        """Delete a response. Returns whether it was stored."""
        response = self._responses.pop((owner, name), None)
        if response is not None:
            self.num_bytes -= response.num_bytes
        return response is not None
