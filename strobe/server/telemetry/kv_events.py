"""Changes of the prefix cache, published by ZeroMQ as vLLM publishes them, so that routers know
which server has which prefix. Needs strobe[kv-events].

A message has three frames: the topic, a sequence number (8 bytes, big-endian) and a batch in
msgpack, the array [ts, events, data_parallel_rank]. Events are maps with a "type": BlockStored,
BlockRemoved and AllBlocksCleared, which is the first event of an engine. Their medium is GPU for
the device, CPU for host memory. If the pages form several groups, events name theirs; states of
recurrent layers are the group after them. The replay socket answers a sequence number with all
batches kept from there on, and the number -1.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import Field

from strobe.kv.host_tier import HostRows, HostTier
from strobe.kv.kept_states import KeptStates
from strobe.kv.pages import PagePool
from strobe.validation import MAX_INT, brief, option, settings

_END = (-1).to_bytes(8, "big", signed=True)
_POLL = 0.1
"""Seconds between two looks at the replay socket."""

Positive = Annotated[int, Field(ge=1, le=MAX_INT)]


@settings
class KVEventsConfig:
    """vLLM's KVEventsConfig. Raises ValueError."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = option(None, "By default zmq if events are enabled.")
    endpoint: str = option("tcp://*:5557", "Bound if it names * or ipc, else connected to.")
    replay_endpoint: str | None = option(None, "Bound, for subscribers that missed messages.")
    buffer_steps: Positive = option(10_000, "Batches kept for them.")
    hwm: Positive = option(100_000, "Messages queued per subscriber, beyond which they are lost.")
    max_queue_size: Positive = option(100_000, "Batches that wait to be published.")
    topic: str = ""

    @staticmethod
    def of(text: str) -> KVEventsConfig | None:
        """Parse a JSON object; return None if it enables nothing. Raises ValueError."""
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ValueError(
                f"kv_events_config is {brief(text)}, but must be a JSON object, such as "
                '{"enable_kv_cache_events": true}.'
            )
        try:
            config = KVEventsConfig(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(f"kv_events_config: {error}") from None
        is_on = config.enable_kv_cache_events and config.publisher != "null"
        return config if is_on else None

    def of_rank(self, rank: int) -> KVEventsConfig:
        """Return the settings of one of several engines, with endpoints of its own as in vLLM: the
        port plus `rank`, or a name that ends with the rank."""
        replay = self.replay_endpoint
        return replace(
            self,
            endpoint=_endpoint_of(self.endpoint, rank),
            replay_endpoint=None if replay is None else _endpoint_of(replay, rank),
        )

    @property
    def binds(self) -> bool:
        return any(part in self.endpoint for part in ("*", "::", "ipc://", "inproc://"))

    def check_ports(self, count: int) -> None:
        """Raise ValueError if two sockets of `count` engines would have the same port."""
        texts = [text.rpartition(":")[2] for text in (self.endpoint, self.replay_endpoint or "")]
        if not self.binds or not all(text.isdecimal() for text in texts):
            return
        first, replay = map(int, texts)
        if abs(first - replay) < count:
            raise ValueError(
                f"kv_events_config: the ports of endpoint and replay_endpoint, {first} and "
                f"{replay}, overlap, since each of {count} engines adds its number to them; leave "
                f"at least {count} between them."
                if count > 1
                else f"kv_events_config: endpoint and replay_endpoint have the same port, {first}; "
                "give two."
            )


def _endpoint_of(endpoint: str, rank: int) -> str:
    address, _, port = endpoint.rpartition(":")
    if rank and port.isdecimal():
        return f"{address}:{int(port) + rank}"
    return f"{endpoint}_dp{rank}" if rank else endpoint


def check_kv_events(text: str) -> str:
    """Return the text of a config. Raises ValueError if it is invalid or ZeroMQ is missing."""
    if KVEventsConfig.of(text) is not None:
        missing = [name for name in ("zmq", "msgspec") if find_spec(name) is None]
        if missing:
            raise ValueError(
                f"kv_events_config enables events, but {missing[0]} is not installed; install "
                "strobe[kv-events], or leave the option out."
            )
    return text


class KVEventPublisher:
    """Records changes of a pool's index, and publishes each step's changes from a thread."""

    def __init__(self, config: KVEventsConfig, rank: int = 0):
        """Open the sockets. rank: the number of the engine among a server's, added to its ports.
        Raises ValueError for an endpoint that cannot be used."""
        import msgspec
        import zmq

        self._rank = rank
        self._block_size = 0
        config = config.of_rank(rank)
        self._topic = config.topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        context = zmq.Context.instance()
        self._socket = context.socket(zmq.PUB)
        self._replay = None
        self._socket.set_hwm(config.hwm)
        use = self._socket.bind if config.binds else self._socket.connect
        _open(use, "endpoint", config.endpoint)
        if config.replay_endpoint is not None:
            self._replay = context.socket(zmq.ROUTER)
            self._replay.set_hwm(0)  # a socket drops what is above
            _open(self._replay.bind, "replay_endpoint", config.replay_endpoint)
        self._events: list[dict[str, Any]] = [{"type": "AllBlocksCleared"}]
        self._batches = queue.Queue[list[Any]](config.max_queue_size)
        self._sent = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)

    def start(
        self, pool: PagePool, kept: KeptStates | None = None, host: HostTier | None = None
    ) -> None:
        """Publish the changes of a pool from now on, and of kept states and host memory, if there
        are any."""
        self._block_size = pool.page_size
        groups = [_fields_of(pool, number) for number in range(len(pool.groups))]
        states = {"group_idx": len(groups), "kv_cache_spec_kind": "mamba"}
        for group, fields in zip(pool.groups, groups, strict=True):
            group.on_stored = partial(self._stored, fields)
            group.on_removed = partial(self._removed, "GPU", fields)
        if kept is not None:
            self._watch(kept, "GPU", states)
        if host is not None:
            for rows, fields in zip(host.pages, groups, strict=True):
                self._watch(rows, "CPU", fields)
            self._watch(host.states, "CPU", states)
        self.flush()
        threading.Thread(target=self._publish, daemon=True, name="strobe-kv-events").start()

    def _stored(
        self,
        group: Mapping[str, object],
        key: bytes,
        parent: bytes | None,
        root: bytes,
        tokens: Sequence[int],
    ) -> None:
        """Record a page. Pages of one sequence and group, one after another, are one event."""
        last: dict[str, Any] = self._events[-1] if self._events else {"type": ""}
        is_stored = last["type"] == "BlockStored" and last.get("group_idx") == group.get(
            "group_idx"
        )
        is_stored = is_stored and last["medium"] == "GPU" and bool(last["token_ids"])
        if parent is not None and is_stored and last["block_hashes"][-1] == number(parent):
            last["block_hashes"].append(number(key))
            last["token_ids"] += tokens
            if last["extra_keys"] is not None:
                last["extra_keys"].append(None)  # readers expect an entry for each block
            return
        extra_keys = [[root.hex()]] if root and parent is None else None
        event = self._stored_event(key, "GPU", group)
        event["parent_block_hash"] = None if parent is None else number(parent)
        self._events.append({**event, "token_ids": list(tokens), "extra_keys": extra_keys})

    def _removed(self, medium: str, group: Mapping[str, object], key: bytes) -> None:
        event = {"type": "BlockRemoved", "block_hashes": [number(key)], "medium": medium}
        group_idx = {name: value for name, value in group.items() if name == "group_idx"}
        self._events.append({**event, **group_idx})

    def _watch(
        self, index: KeptStates | HostRows, medium: str, group: Mapping[str, object]
    ) -> None:
        """Record the changes of an index. As vLLM does for such tiers, events name blocks by their
        hashes alone; whoever needs the tokens has them from the pool's events."""

        def stored(key: bytes) -> None:
            self._events.append(self._stored_event(key, medium, group))

        index.on_stored = stored
        index.on_removed = partial(self._removed, medium, group)

    def _stored_event(self, key: bytes, medium: str, group: Mapping[str, object]) -> dict[str, Any]:
        """Return the event of a block without its tokens."""
        return {
            "type": "BlockStored",
            "block_hashes": [number(key)],
            "parent_block_hash": None,
            "token_ids": [],
            "block_size": self._block_size,
            "lora_id": None,
            "medium": medium,
            "lora_name": None,
            "extra_keys": None,
            **group,
        }

    def flush(self) -> None:
        """Publish what was recorded since the last call; wait if the queue is full."""
        if not self._events:
            return
        batch = [time.time(), self._events, self._rank]
        self._events = []
        self._batches.put(batch)

    def _publish(self) -> None:
        for number_sent in count():
            while True:
                self._answer_replays()
                try:
                    batch = self._batches.get(timeout=_POLL)
                    break
                except queue.Empty:
                    continue
            frames = number_sent.to_bytes(8, "big"), self._encode(batch)
            self._sent.append(frames)
            self._socket.send_multipart((self._topic, *frames))
            self._batches.task_done()

    def _answer_replays(self) -> None:
        while self._replay is not None and self._replay.poll(0):
            client, *_, start = self._replay.recv_multipart()
            for sequence, payload in self._sent:
                if sequence >= start:
                    self._replay.send_multipart((client, b"", sequence, payload))
            self._replay.send_multipart((client, b"", _END, b""))


def _fields_of(pool: PagePool, group: int) -> dict[str, object]:
    """Return what vLLM's events say of a page group; nothing if it is the only one."""
    window = pool.groups[group].window
    if len(pool.groups) == 1:
        return {}
    if window is None:
        return {"group_idx": group, "kv_cache_spec_kind": "full_attention"}
    return {
        "group_idx": group,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": window,
    }


def number(key: bytes) -> int:
    """Return a page's key as vLLM's events name blocks: 64 bits of it."""
    return int.from_bytes(key, "big") & 0xFFFFFFFFFFFFFFFF


def _open(use: Callable[[str], object], name: str, endpoint: str) -> None:
    import zmq

    try:
        use(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"kv_events_config: {name} is {endpoint!r}, which cannot be used ({error}); name "
            "another."
        ) from None
