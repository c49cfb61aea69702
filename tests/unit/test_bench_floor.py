"""`strobe bench`'s counts match counts by hand and by torch. No time is asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from strobe.attention.mask import LayerMask
from strobe.models.architectures import load_draft_config, load_target_config, make_target
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DraftConfig, TargetConfig
from strobe.tools.bench import floor, published_shapes, rates, timeline

CPU = torch.device("cpu")


def pair_of(name: str) -> tuple[TargetConfig, DraftConfig]:
    with published_shapes.directories(name) as (target, draft):
        return load_target_config(Path(target)), load_draft_config(Path(draft))


def shapes_of(name: str, *, rows: int = 16, bytes: int = 2) -> floor.Shapes:
    return floor.Shapes(*pair_of(name), rows, floor.Widths(bytes, bytes, bytes, bytes))


def keys_and_values(name: str) -> int:
    """Return the values of a drafter's key and value layers, which count twice."""
    decoder = pair_of(name)[1].decoder
    return decoder.hidden_size * floor.kv_values(decoder)


def test_qwen3_8b_bytes_match_hand_count():
    plain = replace(shapes_of("qwen3-8b"), draft=None, rows=1)
    weights, row = 15_136_811_008, 147_456
    assert plain.verify(1, 0).bytes == weights + row
    assert plain.verify(8, 1000).bytes == weights + 8 * 1001 * row
    assert plain.drafting(8, 1000) == floor.Work()
    both = shapes_of("qwen3-8b")
    assert both.verify(1, 0).bytes == weights + 16 * row
    head, context_gemms = 151936 * 4096, 5 * 2 * 1024 * 4096
    drafter = 2 * (1_048_626_432 + head + context_gemms)
    assert both.drafting(1, 0).bytes == drafter + 16 * 20_480
    assert both.drafting(4, 300).bytes == drafter + 4 * 316 * 20_480
    assert (weights / 1e9, drafter / 1e9) == (pytest.approx(15.14, abs=0.01),
                                              pytest.approx(3.42, abs=0.01))  # fmt: skip


def test_own_heads_count_as_published():
    """Qwen3.8-27B's DFlash2 drafter has 3.85 GB, and RadixArk's DSpark 2.72 GB, in bfloat16."""
    for name, gigabytes in (("qwen3.8-27b", 3.85), ("qwen3.8-27b-dspark", 2.72)):
        counts = shapes_of(name).drafter_counts
        values = counts.layers.total + counts.head.total + counts.context.linear
        values -= keys_and_values(name)
        assert 2e-9 * values == pytest.approx(gigabytes, abs=0.005)


def test_own_heads_add_to_the_drafting_work():
    plain, heavy = shapes_of("qwen3-8b-dspark"), shapes_of("qwen3-8b-dspark")
    assert heavy.draft is not None
    bare = replace(heavy.draft, head=None, method="DFlash")
    plain = replace(plain, draft=bare)
    own = 256 * 151936 + 4096 + 256
    added = heavy.drafting(3, 0).bytes - plain.drafting(3, 0).bytes
    assert added == 2 * (own + 1)  # with the bias of the confidence
    added = heavy.drafting(3, 0).linear - plain.drafting(3, 0).linear
    assert added == 2 * 3 * 7 * own
    pruned = replace(
        heavy, draft=replace(heavy.draft, head=replace(heavy.draft.head, draft_topk=16))
    )
    added = pruned.drafting(3, 0).bytes - plain.drafting(3, 0).bytes
    assert added == 2 * (4096 + 256 + 1)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("qwen3-8b", 1_048_626_432),
        ("qwen3-4b", 537_427_200),
        ("qwen3-0.6b", None),
        ("llama-3.1-8b", None),
        ("qwen3-coder-30b-a3b", None),
        ("gpt-oss-20b", None),
        ("qwen3.5-9b", None),
        ("qwen3.5-35b-a3b", None),
        ("demo", None),
        ("qwen3-8b-dflash2", None),
        ("qwen3-8b-dspark", None),
        ("qwen3.8-27b", None),
        ("qwen3.8-27b-dspark", None),
    ],
)
def test_counted_values_match_the_modules(name: str, drafter: int | None):
    target, draft = pair_of(name)
    with torch.device("meta"):
        model = make_target(target, 1)
        drafting = DFlash(draft, model.embed_tokens.weight, model.output, 1)
    shapes = shapes_of(name)
    num_parameters = sum(p.numel() for p in model.parameters())
    table = target.decoder.vocab_size * target.decoder.hidden_size
    tables = table * (1 if target.tie_embeddings else 2)
    assert num_parameters == shapes.target_counts.total + tables
    num_parameters = sum(p.numel() for p in drafting.parameters())
    counts = shapes.drafter_counts
    counted = counts.layers.total + counts.head.total + counts.context.total
    assert num_parameters == counted - keys_and_values(name)
    assert drafter in (None, num_parameters)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("qwen3-coder-30b-a3b", 30.5, 3.3),
        ("gpt-oss-20b", 20.9, 3.6),
        ("gemma-4-26b-a4b", 25.2, 3.8),
    ],
)
def test_expert_counts_match_model_cards(name: str, billions: float, active: float):
    """In total and per token; gpt-oss's card leaves the embedding out of the latter."""
    target = pair_of(name)[0]
    decoder, table = target.decoder, floor.head_values(target.decoder)
    tables = table * (1 if target.tie_embeddings else 2)
    counts = shapes_of(name).target_counts
    assert (counts.total + tables) / 1e9 == pytest.approx(billions, abs=0.05)
    chosen = counts.linear + counts.experts * floor.active_share(decoder) + table
    chosen += table if name.startswith("qwen3") else 0
    assert chosen / 1e9 == pytest.approx(active, abs=0.1)


def test_touched_experts_match_simulation():
    decoder = pair_of("qwen3-coder-30b-a3b")[0].decoder
    assert 128 * floor.touched_share(decoder, 1) == pytest.approx(8)
    noise = torch.Generator().manual_seed(0)
    drawn = torch.rand(400, 16, 128, generator=noise).topk(8).indices.flatten(1)
    mean = sum(len(rows.unique()) for rows in drawn) / len(drawn)
    assert 128 * floor.touched_share(decoder, 16) == pytest.approx(mean, rel=0.01)
    assert floor.touched_share(decoder, 1e9) == 1
    shapes = replace(shapes_of("qwen3-coder-30b-a3b"), draft=None)
    few, many = shapes.verify(1, 0), shapes.verify(2, 0)
    more = 128 * (floor.touched_share(decoder, 32) - floor.touched_share(decoder, 16))
    row = 16 * floor.kv_values(decoder) * 2
    assert many.bytes - few.bytes - row == pytest.approx(48 * 3 * 768 * 2048 * 2 * more)
    assert many.operations == pytest.approx(2 * few.operations)


def test_recurrent_states_are_read_and_written():
    """Single rows write them in one of four steps."""
    plain = replace(shapes_of("qwen3.5-9b"), draft=None, rows=1)
    weights, row, state = 2 * (8_953_803_264 - 248320 * 4096), 32_768, 24 * 32 * 128 * 128
    assert plain.verify(1, 0).bytes == weights + row + 5 * state
    assert plain.verify(8, 1000).bytes == weights + 8 * (1001 * row + 5 * state)
    block = replace(plain, rows=16)
    assert block.verify(1, 0).bytes == weights + 16 * row + 8 * state


def test_biases_are_counted(draft: Callable[..., Path]):
    plain, biased = [load_draft_config(draft(bias=bias)) for bias in (False, True)]
    decoder = biased.decoder
    widths = floor.Widths(2, 2, 2, 2)
    counts = [
        floor.Shapes(pair_of("demo")[0], config, 1, widths).drafter_counts.layers
        for config in (plain, biased)
    ]
    assert counts[0].linear == counts[1].linear
    heads = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
    added = decoder.num_layers * (heads + decoder.hidden_size)
    assert counts[1].small - counts[0].small == added


@torch.inference_mode()
def test_operations_match_torch_count():
    """The models run without attention."""
    counts = shapes_of("demo")
    config, draft = counts.target, counts.draft
    assert draft is not None
    model = make_target(config, 64)
    drafter = DFlash(draft, model.embed_tokens.weight, model.output, 64)

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q.flatten(1)

    def run(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        positions = torch.zeros(rows, dtype=torch.int64)
        return positions, positions

    requests, block = 3, draft.block_size
    with FlopCounterMode(display=False) as verified:
        x, features = model(*run(requests * 16), attend, draft.capture)
        model.head(x)
    with FlopCounterMode(display=False) as drafted:
        x, _ = drafter(*run(requests * block), attend)
        drafter.head(x[: requests * (block - 1)])
        drafter.context_kv(features, run(requests * 16)[1])
    attention = requests * floor.attention_operations(config.decoder, 16, 0)
    assert verified.get_total_flops() == counts.verify(requests, 0).operations - attention
    attention = requests * floor.attention_operations(draft.decoder, block, 0)
    assert drafted.get_total_flops() == counts.drafting(requests, 0).operations - attention
    with FlopCounterMode(display=False) as prefilled:
        x, features = model(*run(2 * 40), attend, draft.capture)
        model.head(x[:2])
        drafter.context_kv(features, run(2 * 40)[1])
    assert prefilled.get_total_flops() == counts.prefill_operations(2, 40)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 11, 40])
def test_attention_counts_every_visible_key(causal: bool, window: int | None):
    decoder = pair_of("demo")[1].decoder
    decoder = replace(decoder, num_layers=1, masks=(LayerMask(causal, window),))
    start, rows = 9, 6
    seen = sum(
        (key <= start + i or not causal)
        and (window is None or abs(start + i - key) < window)
        for i in range(rows)
        for key in range(start + rows)
    )  # fmt: skip
    assert floor.attention_operations(decoder, rows, start) == 4 * 4 * 64 * seen


def test_window_bounds_reads_and_fp8_halves_them():
    counts = shapes_of("demo")
    assert counts.draft is not None
    masks = (LayerMask(False), LayerMask(True, 10), LayerMask(True, 10))
    windowed = replace(
        counts, draft=replace(counts.draft, decoder=replace(counts.draft.decoder, masks=masks))
    )
    row = 2 * 2 * 64 * 2  # of one layer
    saved = counts.drafting(2, 100).bytes - windowed.drafting(2, 100).bytes
    assert saved == 2 * row * 2 * (100 - 10)
    halved = replace(counts, widths=floor.Widths(linear=1, head=2, rest=2, kv=1))
    saved = counts.verify(3, 50).bytes - halved.verify(3, 50).bytes
    values = counts.target_counts.linear + 3 * 66 * 2 * 16 * 2 * 64
    assert saved == values


def test_floor_is_the_slower_of_bandwidth_and_compute():
    counts = shapes_of("qwen3-8b")
    slow = floor.Rates(reduction=4e12, copy=3e12, matrix=1e30, linear=1e30)
    assert slow.bandwidth == 4e12
    parts = counts.drafting(1, 256), counts.verify(1, 256)
    assert counts.seconds(slow, 1, 256) == pytest.approx(sum(p.bytes for p in parts) / 4e12)
    busy = replace(slow, matrix=1e9, linear=1e9)
    assert counts.seconds(busy, 1, 256) == pytest.approx(sum(p.operations for p in parts) / 1e9)
    assert [slow.bound(parts[0]), busy.bound(parts[0])] == ["bytes", "operations"]
    work = counts.verify(1, 256)
    fp8 = replace(busy, linear=4e9)
    assert fp8.seconds(work) == pytest.approx(work.linear / 4e9 + work.head_and_attention / 1e9)
    between = floor.Rates(
        4e12, 3e12, 7e14, 7e14
    )  # 32 requests: the drafter reads, the target computes
    parts = counts.drafting(8, 256), counts.verify(64, 256)
    assert [between.bound(part) for part in parts] == ["bytes", "operations"]


def test_timeline_splits_the_selected_steps(monkeypatch: pytest.MonkeyPatch):
    clock: Iterator[float] = iter([0.0, 1.0, 3.0, 10.0, 12.0, 13.0, 14.0, 15.0, 16.0, 20.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    line = timeline.Timeline(CPU)
    for _ in range(3):
        for name in ("start", "draft", "verify"):
            line.mark(name)
    line.stop()
    split = line.split()
    assert split is not None
    assert (split.steps, split.median) == (3, 6000)
    assert split.draft == pytest.approx(1e3 * 4 / 3)
    assert split.verify == pytest.approx(1e3 * 4 / 3)
    assert split.whole == pytest.approx(1e3 * 20 / 3)
    assert line.split([1]) == timeline.Split(1, 2000, 1000, 1000, 4000)
    assert line.split([]) is None


def test_rates_are_measured_on_a_cpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rates, "_CPU", (1 << 20, 64))
    fp32 = rates.measure(CPU, torch.float32)
    assert min(fp32.reduction, fp32.copy, fp32.matrix) > 0
    assert fp32.linear == fp32.matrix
    fp8 = rates.measure(CPU, torch.float32, fp8=True)
    assert fp8.linear > 0
    assert fp8.linear != fp8.matrix
