"""Events of the prefix cache, as a router subscribes to them."""

from __future__ import annotations

import json
import random
import re
from multiprocessing import Pipe
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
import zmq

from strobe.config import EngineConfig
from strobe.kv.host_tier import HostRows, HostTier
from strobe.kv.kept_states import KeptStates
from strobe.kv.lease import Lease, reserve_all
from strobe.kv.pages import PagePool
from strobe.request import PageKeys
from strobe.server.engine_process import worker
from strobe.server.server_settings import LogSettings, ServerConfig
from strobe.server.telemetry.kv_events import KVEventPublisher, KVEventsConfig, number

SECONDS = 30_000  # ms


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """vLLM's newest event, also for the two others: maps in a batch that is an array."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Router:
    """Rebuilds a cache's content from events: each block's tokens and parent."""

    def __init__(self) -> None:
        self.blocks: dict[int | bytes, tuple[int | bytes | None, list[int]]] = {}

    def apply(self, batch: Batch) -> None:
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif isinstance(event, BlockRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                parent, size = event.parent_block_hash, event.block_size
                for i, block in enumerate(event.block_hashes):
                    assert block not in self.blocks
                    self.blocks[block] = parent, event.token_ids[i * size : (i + 1) * size]
                    parent = block


class Operations:
    """Random use of a pool by sequences with common prefixes, as a scheduler uses it."""

    def __init__(self, pool: PagePool):
        self.pool, self.rng = pool, random.Random(3)
        self.tokens_of: dict[bytes, list[int]] = {}
        self.held: list[tuple[Lease, list[int]]] = []

    def run(self) -> None:
        kind = self.rng.random()
        if kind < 0.5 and len(self.held) < 6:
            tokens = [self.rng.randrange(2) for _ in range(self.rng.randint(1, 20))]
            lease = Lease(self.pool, 40, PageKeys(self.rng.choice(("", "", "salt"))))
            lease.adopt(tokens)
            if reserve_all([(lease, len(tokens) - lease.length)]):
                lease.commit(len(tokens) - lease.length)
                lease.publish(tokens)
                self.held.append((lease, tokens))
                for i, key in enumerate(lease.keys):
                    self.tokens_of[key] = tokens[i * 4 : i * 4 + 4]
            else:
                lease.release()
        elif self.held and kind < 0.99:
            self.held.pop(self.rng.randrange(len(self.held)))[0].release()
        else:
            self.pool.clear_cache()


def test_router_rebuilds_the_cache_from_events_alone(tmp_path: Path):
    pool = PagePool(24, 4)
    addresses = {n: f"ipc://{tmp_path}/{n}" for n in ("endpoint", "replay_endpoint")}
    values: dict[str, Any] = {"enable_kv_cache_events": True, "topic": "kv", **addresses}
    config = KVEventsConfig(buffer_steps=10**6, **values)
    publisher, operations = KVEventPublisher(config), Operations(pool)
    publisher.start(pool)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    subscriber.connect(config.endpoint)
    subscriber.subscribe(b"kv")
    for _ in range(10_000):
        operations.run()
        publisher.flush()
    live = dict[int, bytes]()
    while not live:  # a subscriber is connected at some time after it asks
        operations.run()
        publisher.flush()
        while subscriber.poll(1):
            topic, sequence, payload = subscriber.recv_multipart()
            assert topic == b"kv"
            live[int.from_bytes(sequence, "big")] = payload

    publisher._batches.join()
    batches = replay(config, 0)
    assert list(batches) == list(range(len(batches)))
    router, late = Router(), Router()
    for sequence, payload in batches.items():
        router.apply(decode(payload))
        assert live.get(sequence, payload) == payload
    pages = pool._page_of
    assert router.blocks.keys() == {number(key) for key in pages}
    assert len(pages) > 5
    for key in pages:
        assert router.blocks[number(key)][1] == operations.tokens_of[key]
    for parent, _ in router.blocks.values():
        assert parent is None or isinstance(parent, int)
    missed = replay(config, len(batches) - 3)
    assert missed == dict(list(batches.items())[-3:])
    late.apply(decode(batches[0]))
    assert late.blocks == {}


def published(directory: Path, rank: int, salt: str) -> list[bytes]:
    """Return the batches of an engine that stores two pages in one step."""
    addresses = {n: f"ipc://{directory}/{n}" for n in ("endpoint", "replay_endpoint")}
    config = KVEventsConfig(enable_kv_cache_events=True, **addresses)
    publisher, pool = KVEventPublisher(config, rank), PagePool(4, 4)
    publisher.start(pool)
    lease = Lease(pool, 16, PageKeys(salt))
    assert reserve_all([(lease, 8)])
    lease.commit(8)
    lease.publish(list(range(8)))
    publisher.flush()
    publisher._batches.join()
    return list(replay(config.of_rank(rank), 0).values())


def test_events_name_the_medium_and_the_states(tmp_path: Path):
    addresses = {n: f"ipc://{tmp_path}/{n}" for n in ("endpoint", "replay_endpoint")}
    config = KVEventsConfig(enable_kv_cache_events=True, **addresses)
    publisher = KVEventPublisher(config)
    pool = PagePool(3, 4)
    kept = KeptStates(1, page_size=4)
    host = HostTier(pool, [HostRows(1)], kept=kept, states=HostRows(1))
    publisher.start(pool, kept=kept, host=host)
    for tokens in ([1] * 4, [2] * 4, [3] * 4):
        lease = Lease(pool, 8)
        assert reserve_all([(lease, 4)])
        lease.commit(4)
        lease.publish(tokens)
        lease.release()
        row = kept.take(lease.keys[0])
        assert row is not None
        kept.publish(row, lease.keys[0])
    publisher.flush()
    publisher._batches.join()
    batches = [decode(batch) for batch in replay(config.of_rank(0), 0).values()]
    pages = Router()
    seen: list[tuple[str, str | None, int | None]] = []
    for event in batches[-1].events:
        seen.append((type(event).__name__, event.medium, event.group_idx))
        if event.medium == "GPU" and event.group_idx is None:
            pages.apply(Batch(0.0, [event]))
        elif isinstance(event, BlockStored):
            assert (event.token_ids, event.parent_block_hash, event.block_size) == ([], None, 4)
            assert event.kv_cache_spec_kind == ("mamba" if event.group_idx else None)
    assert seen.count(("BlockStored", "GPU", None)) == 3
    assert seen.count(("BlockStored", "GPU", 1)) == 3
    assert seen.count(("BlockRemoved", "GPU", 1)) == 2
    assert seen.count(("BlockStored", "CPU", None)) == 1
    assert seen.count(("BlockStored", "CPU", 1)) == 2
    assert seen.count(("BlockRemoved", "CPU", 1)) == 1
    assert pages.blocks.keys() == {number(key) for key in pool._page_of}


def test_events_name_every_page_group_and_tier(tmp_path: Path):
    """A window's pages are removed from their group alone."""
    addresses = {n: f"ipc://{tmp_path}/{n}" for n in ("endpoint", "replay_endpoint")}
    config = KVEventsConfig(enable_kv_cache_events=True, **addresses)
    publisher = KVEventPublisher(config)
    window = PagePool(4, 4, window=4)
    pool = PagePool(9, 4, others=[window])
    host = HostTier(pool, [HostRows(4), HostRows(4)])
    publisher.start(pool, host=host)
    for first in (0, 50):
        tokens = list(range(first, first + 8))
        lease = Lease(pool, 16)
        assert reserve_all([(lease, 8)])
        lease.commit(8)
        lease.publish(tokens)
        lease.release()
    publisher.flush()
    publisher._batches.join()
    batches = [decode(batch) for batch in replay(config.of_rank(0), 0).values()]
    cached = {(medium, group): set[int | bytes]() for medium in ("GPU", "CPU") for group in (0, 1)}
    for event in batches[-1].events:
        assert not isinstance(event, AllBlocksCleared)
        assert event.medium is not None
        assert event.group_idx is not None
        blocks = cached[event.medium, event.group_idx]
        if isinstance(event, BlockRemoved):
            blocks -= set(event.block_hashes)
            continue
        assert len(event.token_ids) == (4 * len(event.block_hashes) if event.medium == "GPU" else 0)
        kind = event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window
        assert kind == (("sliding_window", 4) if event.group_idx else ("full_attention", None))
        blocks |= set(event.block_hashes)
    for number_of_group, group in enumerate(pool.groups):
        assert cached["GPU", number_of_group] == {number(key) for key in group._page_of}
        rows = host.pages[number_of_group]._row_of
        assert cached["CPU", number_of_group] == {number(key) for key in rows}
    assert cached["GPU", 0] > cached["GPU", 1]
    assert cached["CPU", 1], "the window's pool has lost a page"


def test_engine_of_several_names_its_rank(tmp_path: Path):
    cleared, _ = published(tmp_path, 3, "")
    assert decode(cleared).data_parallel_rank == 3


@pytest.mark.parametrize("salt", ["", "salt"])
def test_llm_d_and_dynamo_read_batches(tmp_path: Path, salt: str):
    """Both read the batch by position and the events by name. llm-d rejects hashes that are no
    unsigned 64-bit integers, and both read extra_keys beside block_hashes."""

    class Positional(msgspec.Struct, array_like=True):
        ts: float
        events: list[msgspec.Raw]
        rank: Annotated[int, msgspec.Meta(ge=0, lt=2**32)]

    cleared, stored = (
        msgspec.msgpack.decode(b, type=Positional) for b in published(tmp_path, 0, salt)
    )
    assert [cleared.rank, stored.rank] == [0, 0]
    assert stored.ts >= cleared.ts > 1e9
    assert [msgspec.msgpack.decode(event) for event in cleared.events] == [
        {"type": "AllBlocksCleared"}
    ]
    (event,) = [msgspec.msgpack.decode(event) for event in stored.events]
    assert event["type"] == "BlockStored"
    assert all(0 <= block < 2**64 for block in event["block_hashes"])
    assert event["token_ids"] == list(range(8))
    assert (event["parent_block_hash"], event["block_size"], event["medium"]) == (None, 4, "GPU")
    keys = event["extra_keys"]
    assert keys is None if not salt else (len(keys), keys[1:]) == (2, [None])


def replay(config: KVEventsConfig, start: int) -> dict[int, bytes]:
    """Ask for the batches from a sequence number on; return their payloads."""
    socket = zmq.Context.instance().socket(zmq.DEALER)
    socket.set_hwm(0)
    assert config.replay_endpoint is not None
    socket.connect(config.replay_endpoint)
    socket.send_multipart((b"", start.to_bytes(8, "big")))
    batches = dict[int, bytes]()
    while socket.poll(SECONDS):
        _, sequence, payload = socket.recv_multipart()
        found = int.from_bytes(sequence, "big", signed=True)
        if found == -1:
            socket.close()
            return batches
        batches[found] = payload
    raise AssertionError("the replay does not end")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("5", "kv_events_config is '5', but must be a JSON object"),
        ("{", "kv_events_config is '{', but must be a JSON object"),
        ('{"endpoint": 3}', "kv_events_config: endpoint is 3, but must be a text"),
        ('{"publisher": "kafka"}', "kv_events_config: publisher is 'kafka', but must be"),
        ('{"port": 5557}', "kv_events_config: KVEventsConfig has no field 'port'"),
        ('{"hwm": 0}', "kv_events_config: hwm is 0, but must be at least 1"),
    ],
)
def test_invalid_configs_are_named(text: str, part: str):
    with pytest.raises(ValueError, match=f"^{re.escape(part)}"):
        ServerConfig(kv_events_config=text)


@pytest.mark.parametrize("values", [{}, {"enable_kv_cache_events": True, "publisher": "null"}])
def test_events_are_off_unless_enabled(values: dict[str, Any]):
    assert ServerConfig(kv_events_config=json.dumps(values)).kv_events is None


@pytest.mark.parametrize(
    ("count", "endpoint", "replay", "part"),
    [
        (1, "tcp://*:5557", "tcp://*:5558", None),
        (1, "tcp://*:5557", "tcp://*:5557", "have the same port, 5557; give two."),
        (2, "tcp://*:5557", "tcp://*:5558", "5557 and 5558, overlap, since each of 2 engines"),
        (4, "tcp://*:5557", "tcp://*:5554", "leave at least 4 between them."),
        (4, "tcp://*:5557", "tcp://*:5561", None),
        (4, "tcp://router:5557", "tcp://*:5558", None),
        (4, "ipc:///run/kv", "ipc:///run/replay", None),
    ],
)
def test_ports_that_overlap_are_named(count: int, endpoint: str, replay: str, part: str | None):
    values = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    text = json.dumps(values)
    if part is None:
        assert ServerConfig(kv_events_config=text, data_parallel_size=count).kv_events is not None
        return
    with pytest.raises(ValueError, match=re.escape(part)):
        ServerConfig(kv_events_config=text, data_parallel_size=count)


def test_endpoint_in_use_is_named_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "start_engine", lambda config: pytest.fail("weights were read"))
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr(LogSettings, "configure", lambda settings: None)
    address = f"ipc://{tmp_path}/missing/socket"
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=address)
    server, engine = Pipe()
    worker.run_engine(engine, EngineConfig(), LogSettings(), config)
    failed = server.recv()
    assert failed.user_error
    assert f"endpoint is '{address}', which cannot be used" in failed.error
