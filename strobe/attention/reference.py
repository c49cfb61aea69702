"""Attention over the paged cache in plain torch: the reference for kernels, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from strobe.attention.backend import Batch
from strobe.attention.groups import Group, groups_of
from strobe.attention.mask import LayerMask
from strobe.kv.kv_store import KVStore, SeenPages

GATHERED_BYTES = 2 << 20
"""Bytes of keys and values of one layer that a CPU gathers at once for each thread: attention then
reads them from its cache."""


class SeenKeys(NamedTuple):
    """Keys that the rows of G spans may see: positions [N], or [G, N] with a window. They are in
    one of three forms: slots [G, N]; in_place: each layer's keys and values, which need not be
    gathered; all rows then see as many keys as the last one, but for masks; or pages."""

    positions: Tensor
    slots: Tensor | None = None
    in_place: list[tuple[Tensor, Tensor]] | None = None
    pages: SeenPages | None = None


def _gathers_pages(batch: Batch, store: KVStore) -> bool:
    """Whether keys without a window are gathered by whole pages: on a CPU in float32. In bfloat16
    the tokens after them changed the rounding of sums, and with it an answer."""
    return batch.ids.device.type == "cpu" and store.spec.dtype == torch.float32


def _spans_at_once(batch: Batch, store: KVStore) -> int | None:
    """Return the maximum of spans whose keys are gathered at once; a power of two, so that groups
    repeat while contexts grow. None: no maximum."""
    if not _gathers_pages(batch, store):
        return None
    budget = GATHERED_BYTES * torch.get_num_threads()
    span = max(batch.bounds, default=0) * store.slot_bytes
    return 1 << max((budget // max(span, 1)).bit_length() - 1, 0)


class ReferencePlan:
    """Indices and masks of one forward, computed once for all layers."""

    def __init__(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]):
        self.batch = batch
        self.store = store
        self.masks = masks
        counts = tuple(batch.row_counts)
        self.groups = groups_of(counts, batch.ids.device, _spans_at_once(batch, store))
        self._bounds = [max([batch.bounds[i] for i in group.members]) for group in self.groups]
        self._keys: dict[tuple[int, int, int | None], SeenKeys] = {}
        self._bias: dict[tuple[int, LayerMask, bool], Tensor | None] = {}
        self._buffer: Tensor | None = None

    def _keys_of(self, index: int, layer: int) -> SeenKeys:
        """Return the keys that a layer reads for the spans of a group. No mask stops a NaN in
        another sequence's keys, so positions after the span's last row, and those beyond the
        context, which share one page among all sequences, get the slot of the span's first row."""
        page_group = self.store.spec.group_of(layer)
        window = self.masks[layer].window
        seen = self._keys.get((index, page_group, window))
        if seen is None:
            seen = self._find_keys(index, page_group, window)
            self._keys[index, page_group, window] = seen
        return seen

    def _find_keys(self, index: int, page_group: int, window: int | None) -> SeenKeys:
        batch = self.batch
        group = self.groups[index]
        bound = self._bounds[index]
        table = batch.tables[page_group]
        run = self._run_of(group, table) if window is None else None
        if run is not None:
            in_place = self.store.run(run.start, len(run))
            return SeenKeys(positions=torch.arange(len(run)), in_place=in_place)
        if window is None and _gathers_pages(batch, self.store):
            return self._all_pages(group, bound, table)
        if window is None:
            positions, slots = self._all_slots(group, bound, table)
        else:
            positions, slots = self._window_slots(group, bound, table, window)
        first = group.rows[:, :1]
        slots = slots.where(positions <= self._ends(group), batch.kv_slots[page_group][first])
        return SeenKeys(positions=positions, slots=slots)

    def _run_of(self, group: Group, table: Tensor) -> range | None:
        """Return the slots of all positions of a single span if they follow one another, so that
        its keys need not be gathered. On a CPU only, which reads the table without waiting."""
        batch = self.batch
        if len(group.members) != 1 or table.device.type != "cpu":
            return None
        if self.store.spec.dtype.itemsize == 1:  # converted, and thus copied
            return None
        last = int(batch.positions[group.rows[0, -1]])
        end = min(last, batch.limit - 1) + 1
        slot = int(batch.slots[group.members[0]])
        pages = table.numpy()[slot, : -(-end // batch.page_size)]
        first = int(pages.item(0))
        return range(first, first + end) if (pages == first).all() else None

    def _slots(self, group: Group) -> Tensor:
        slots = self.batch.slots
        return slots if len(self.groups) == 1 else slots[group.spans]

    def _ends(self, group: Group) -> Tensor:
        """Return the last position of each span that has a key, [G, 1]."""
        batch = self.batch
        return batch.positions[group.rows[:, -1:]].clamp(max=batch.limit - 1)

    def _all_pages(self, group: Group, bound: int, table: Tensor) -> SeenKeys:
        """Return the keys of the pages below `bound`."""
        size = self.batch.page_size
        columns = -(-bound // size)
        entries = table[:, :columns].index_select(0, self._slots(group))
        firsts = torch.arange(0, columns * size, size)
        positions = torch.arange(columns * size)
        unseen = (positions > self._ends(group)).view(-1).nonzero().view(-1)
        pages = (entries + firsts).floor_divide_(size)
        seen = SeenPages(pages=pages, size=size, unseen=unseen)
        return SeenKeys(positions=positions, pages=seen)

    def _all_slots(self, group: Group, bound: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions below `bound`, [N], and their slots [G, N]."""
        size = self.batch.page_size
        columns = -(-bound // size)
        entries = table[:, :columns].index_select(0, self._slots(group))
        positions = torch.arange(columns * size, device=entries.device).view(columns, size)
        slots = (entries[:, :, None] + positions).flatten(1)[:, :bound]
        return positions.view(-1)[:bound], slots

    def _window_slots(
        self, group: Group, bound: int, table: Tensor, window: int
    ) -> tuple[Tensor, Tensor]:
        """Return the positions from each span's first one that a row sees, [G, N], and their slots.
        Pages before these may belong to other sequences by now."""
        starts = self.batch.starts if len(self.groups) == 1 else self.batch.starts[group.spans]
        first = (starts - (window - 1)).clamp(min=0)
        count = min(bound, window - 1 + group.rows.shape[1])
        positions = first[:, None] + torch.arange(count, device=first.device)
        columns = (positions // self.batch.page_size).clamp(max=table.shape[1] - 1)
        return positions, table[self._slots(group)[:, None], columns] + positions

    def _bias_of(self, index: int, layer: int, dtype: torch.dtype, repeats: int) -> Tensor | None:
        """Return [G, 1, repeats * Q or 1, N]: 0 where a row sees a key, -inf elsewhere; None if
        every row sees every key."""
        mask = self.masks[layer]
        seen = self._keys_of(index, layer)
        key = index, mask, seen.in_place is not None
        if key not in self._bias:
            self._bias[key] = self._make_bias(index, mask, seen, dtype=dtype, repeats=repeats)
        return self._bias[key]

    def _make_bias(
        self, index: int, mask: LayerMask, seen: SeenKeys, *, dtype: torch.dtype, repeats: int
    ) -> Tensor | None:
        group = self.groups[index]
        batch = self.batch
        if seen.in_place is not None and (not mask.causal or group.rows.shape[1] == 1):
            return None
        key = seen.positions
        if key.dim() == 2:
            key = key[:, None]
        query = batch.positions[group.rows][:, :, None]
        if mask.causal:
            hidden = key > query
        else:
            ends = (batch.starts + batch.sizes)[group.spans]
            hidden = key >= ends[:, None, None]
        if mask.window is not None:
            hidden = hidden | (query - key >= mask.window)
            if not mask.causal:
                hidden = hidden | (key - query >= mask.window)
        bias = torch.zeros(hidden.shape, dtype=dtype, device=key.device)
        bias.masked_fill_(hidden, float("-inf"))
        if bias.shape[1] > 1:
            bias = bias.repeat(1, repeats, 1)
        return bias[:, None]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        self.store.write(layer, self.batch.kv_slots[self.store.spec.group_of(layer)], k, v)
        return self._attend(layer, q, sinks)

    def joined(self, layer: int, qkv: Tensor, q_heads: int, sinks: Tensor | None = None) -> Tensor:
        """As a call, with the heads of q, k and v in one tensor [T, Hq + 2 Hkv, D]."""
        slots = self.batch.kv_slots[self.store.spec.group_of(layer)]
        rows = qkv.view(qkv.shape[0], -1)
        self.store.write_joined(layer, slots, rows[:, q_heads * qkv.shape[2] :])
        return self._attend(layer, qkv[:, :q_heads], sinks)

    def _read(self, layer: int, seen: SeenKeys) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [G, Hkv, N, D], until the next call."""
        if seen.in_place is not None:
            return seen.in_place[layer]
        if seen.pages is None:
            assert seen.slots is not None
            return self.store.gather(layer, seen.slots)
        self._buffer = self.store.page_buffer(layer, seen.pages, self._buffer)
        return self.store.gather_pages(layer, seen.pages, self._buffer)

    def attend_spans(self, layer: int, q: Tensor, out: Tensor, *, more_rows_than: int) -> None:
        """Attend to keys and values that are stored, only for spans of more rows than this: q
        [T, Hq, D], whose results are written to out [T, Hq * D]."""
        for index, group in enumerate(self.groups):
            if group.rows.shape[1] > more_rows_than:
                rows = q[group.run or group.rows.flatten()]
                result = self._attend_group(index, layer, rows, None)
                self._place(group, result, out)

    def _attend(self, layer: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend to keys and values that are stored."""
        if len(self.groups) == 1 and self.groups[0].run is not None:
            return self._attend_group(0, layer, q, sinks)
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
        for index, group in enumerate(self.groups):
            rows = q[group.run or group.rows.flatten()]
            result = self._attend_group(index, layer, rows, sinks)
            self._place(group, result, out)
        return out

    @staticmethod
    def _place(group: Group, result: Tensor, out: Tensor) -> None:
        """Write a group's results to its rows of the batch."""
        out[group.run or group.target] = result if group.flat is None else result[group.flat]

    def _attend_group(self, index: int, layer: int, q: Tensor, sinks: Tensor | None) -> Tensor:
        """Attend from a group's rows q [G * Q, Hq, D] -> [G * Q, Hq * D]."""
        seen = self._keys_of(index, layer)
        keys, values = self._read(layer, seen)
        if keys.dtype != q.dtype:
            keys = keys.to(q.dtype)
            values = values.to(q.dtype)
        scale = self.store.scales[layer]
        spans, longest = self.groups[index].rows.shape
        heads, width = q.shape[1:]
        kv_heads = self.store.spec.shapes[layer][0]
        repeats = heads // kv_heads
        part = q
        if longest > 1:
            part = part.view(spans, longest, kv_heads, repeats, width).permute(0, 2, 3, 1, 4)
            part = part.reshape(spans, kv_heads, repeats * longest, width)
        else:
            part = part.view(spans, kv_heads, repeats, width)
        if scale.keys != 1.0:
            part = part * scale.keys
        bias = self._bias_of(index, layer, q.dtype, repeats)
        if sinks is None:
            result = F.scaled_dot_product_attention(part, keys, values, attn_mask=bias)
        else:
            column = sinks.to(q.dtype).view(kv_heads, repeats, 1).expand(-1, -1, longest)
            result = attend_with_sinks(
                part, keys=keys, values=values, bias=bias, sinks=column.flatten(1)
            )
        if scale.values != 1.0:
            result = result * scale.values
        if longest > 1:
            result = result.view(spans, kv_heads, repeats, longest, width)
            result = result.permute(0, 3, 1, 2, 4)
        return result.reshape(spans * longest, heads * width)


def attend_with_sinks(
    q: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, sinks: Tensor
) -> Tensor:
    """q [G, Hkv, M, D], keys, values [G, Hkv, N, D], bias [G, 1, M or 1, N], sinks [Hkv, M] ->
    [G, Hkv, M, D]: attention whose softmax has the sink as one more logit with value zero (as in
    gpt-oss's model card)."""
    scores = q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    extra = sinks[None, :, :, None].expand(q.shape[0], -1, -1, 1)
    return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1] @ values


class ReferenceBackend:
    """Gathers each span's keys and runs torch's attention with an explicit mask."""

    def plan(self, batch: Batch, store: KVStore, masks: Sequence[LayerMask]) -> ReferencePlan:
        return ReferencePlan(batch, store, masks)
