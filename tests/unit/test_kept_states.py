"""The index of kept states alone: which rows are found, written and evicted."""

from __future__ import annotations

from strobe.kernels import reference_recurrent
from strobe.kv.kept_states import CHUNK, KeptState, KeptStates, border_interval

KEYS = [bytes([i]) for i in range(64)]
"""Keys of a sequence's pages of 16 tokens, each found at its number plus one."""


def kept_at(kept: KeptStates, border: int) -> int:
    """Keep a state at a border; return its row."""
    key = kept.key_before(border, KEYS)
    row = kept.take(key)
    assert row is not None
    kept.publish(row, key)
    return row


def test_borders_end_chunks_and_pages():
    assert CHUNK == reference_recurrent.CHUNK
    assert [border_interval(size) for size in (1, 16, 48, 64, 100)] == [64, 64, 192, 64, 1600]


def test_longest_state_within_the_cached_pages_is_found():
    kept = KeptStates(4, page_size=16)
    first = kept_at(kept, 64)
    second = kept_at(kept, 192)
    assert kept.find(KEYS[:3]) is None
    assert kept.find(KEYS[:4]) == KeptState(row=first, length=64)
    assert kept.find(KEYS[:11]) == KeptState(row=first, length=64)
    assert kept.find(KEYS[:12]) == KeptState(row=second, length=192)
    other = [*KEYS[:6], *[b"other"] * 10]
    assert kept.find(other) == KeptState(row=first, length=64)


def test_state_is_found_once_it_is_published():
    kept = KeptStates(1, page_size=16)
    row = kept.take(KEYS[3])
    assert row is not None
    assert kept.find(KEYS) is None
    assert kept.take(KEYS[7]) is None, "the only row is being written"
    kept.give_up(row)
    assert kept.find(KEYS) is None
    assert kept_at(kept, 128) == row


def test_least_recently_used_state_is_evicted_after_those_without_pages():
    gone: set[bytes] = set()
    kept = KeptStates(3, page_size=16, has_page=lambda key: key not in gone)
    rows = {border: kept_at(kept, border) for border in (64, 128, 192)}
    kept.find(KEYS[:4])  # uses the oldest
    gone.add(KEYS[11])
    assert kept_at(kept, 256) == rows[192]
    assert kept_at(kept, 320) == rows[128]
    kept.hold(rows[64])
    assert kept_at(kept, 384) == rows[192]
    kept.clear()
    assert kept.find(KEYS) == KeptState(row=rows[64], length=64)
    kept.release(rows[64])
    kept.clear()
    assert kept.find(KEYS) is None


def test_row_of_an_earlier_border_goes_before_others():
    kept = KeptStates(2, page_size=16)
    oldest = kept_at(kept, 64)
    own = kept_at(kept, 128)
    assert kept.take(before=KEYS[7]) == own
    kept.publish(own, KEYS[11])
    assert kept.find(KEYS) == KeptState(row=own, length=192)
    kept.hold(own)
    assert kept.take(before=KEYS[11]) == oldest, "a state that is read is not overwritten"


def test_borders_of_a_prompt():
    kept = KeptStates(8, page_size=16)
    keys = [bytes([i % 256, i // 256]) for i in range(2000)]
    assert kept.borders(keys, start=0, end=64, num_cached=0) == []
    assert kept.borders(keys, start=0, end=65, num_cached=0) == [64]
    assert kept.borders(keys, start=0, end=1000, num_cached=300) == [256, 960]
    assert kept.borders(keys, start=256, end=1000, num_cached=300) == [960]
    assert kept.borders(keys, start=0, end=20_000, num_cached=0) == [9984, 19968]
