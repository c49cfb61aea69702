"""A lower bound of a step's time: bytes to move and operations to compute, over measured rates.

The modules of the models count their own weights, without memory for them. Only GEMMs, attention
and recurrent states count; activations, logits, the norms' arithmetic and the few embedding rows do
not.

Legend: c requests, n positions of context each, R rows verified per request (drafts + 1), B rows
and K drafts of the drafter's block, H hidden size, V vocabulary, L layers, Hq / Hkv query and
key-value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from strobe.kernels.kept_rows import SINGLE_ROWS
from strobe.models.architectures import make_target
from strobe.models.dflash_drafter import DFlash
from strobe.models.linear import LinearView
from strobe.models.model_config import DecoderConfig, DraftConfig, TargetConfig
from strobe.models.weight_counts import WeightCounts, count_weights


@dataclass(frozen=True)
class Work:
    """Bytes to read and write, and operations (a multiply-add is two) of the linear layers, which
    may run in FP8, and of head and attention, which do not."""

    bytes: float = 0.0
    linear: float = 0.0
    head_and_attention: float = 0.0

    @property
    def operations(self) -> float:
        return self.linear + self.head_and_attention


@dataclass(frozen=True)
class Rates:
    """The device's rates, measured in this run: bytes/s of a reduction over a large buffer and of
    a copy (read and written), operations/s of a square GEMM in the engine's dtype and in the
    linear layers' (the same unless they are in FP8)."""

    reduction: float
    copy: float
    matrix: float
    linear: float

    @property
    def bandwidth(self) -> float:
        return max(self.reduction, self.copy)

    def seconds(self, work: Work) -> float:
        """max(bytes / bandwidth, operations / matrix rate): reading and computing overlap."""
        return max(work.bytes / self.bandwidth, self._computing(work))

    def bound(self, work: Work) -> str:
        """Return which of the two limits the work, "bytes" or "operations"."""
        memory = work.bytes / self.bandwidth >= self._computing(work)
        return "bytes" if memory else "operations"

    def _computing(self, work: Work) -> float:
        return work.linear / self.linear + work.head_and_attention / self.matrix


@dataclass(frozen=True)
class Widths:
    """Bytes per value of the linear layers, the head, all other weights, keys and values, and
    experts, which by default are as linear layers. draft: of the drafter's linear layers, by
    default as the target's; draft_output: of the output layer that drafts pass through, by default
    as `draft`."""

    linear: float
    head: float
    rest: int
    kv: int
    experts: float | None = None
    draft: float | None = None
    draft_output: float | None = None


@dataclass(frozen=True)
class DrafterCounts:
    """A drafter's weights: of the layers and norms, of its own head besides the output layer, and
    those that the features of verified rows pass through."""

    layers: WeightCounts
    head: WeightCounts
    context: WeightCounts


@dataclass(frozen=True)
class Shapes:
    """A target, its drafter if there is one, and the rows that each request verifies."""

    target: TargetConfig
    draft: DraftConfig | None
    rows: int
    widths: Widths

    @cached_property
    def target_counts(self) -> WeightCounts:
        """The weights of the target's layers and norms."""
        with torch.device("meta"):
            model = make_target(self.target, 1)
        return count_weights(model.layers) + count_weights(model.norm)

    @cached_property
    def drafter_counts(self) -> DrafterCounts:
        """The drafter's weights."""
        assert self.draft is not None
        with torch.device("meta"):
            empty = torch.empty(0)
            model = DFlash(self.draft, empty, LinearView(weight=empty), 1)
        norms = count_weights(model.norm) + count_weights(model.hidden_norm)
        return DrafterCounts(
            layers=count_weights(model.layers) + norms,
            head=count_weights(model.draft_head),
            context=model.context_weight_counts(),
        )

    def verify(self, requests: float, context: float) -> Work:
        """Return the work of the target's forward over c x R rows: its parts together."""
        parts = self.verify_parts(requests, context).values()
        return Work(
            sum(part.bytes for part in parts),
            sum(part.linear for part in parts),
            sum(part.head_and_attention for part in parts),
        )

    def verify_parts(self, requests: float, context: float) -> dict[str, Work]:
        """Return the work of each part of the target's forward over c x R rows.

        A row multiplies each value of the linear layers, of its own experts and of the head once;
        expert weights are read if any row is expected to use them. Keys and values are read for the
        context and written for the rows; states are read and written, and each row takes four
        multiply-adds per value of a state.
        """
        decoder = self.target.decoder
        rows = requests * self.rows
        widths = self.widths
        counts = self.target_counts
        head = head_values(decoder)
        experts = counts.experts * touched_share(decoder, rows)
        keys = rows * kv_values(decoder) * widths.kv
        keys += self.context_bytes(decoder, requests, context)
        states = 0 if self.target.states is None else self.target.states.values
        expert_width = widths.linear if widths.experts is None else widths.experts
        active = counts.experts * active_share(decoder)
        return {
            "experts": Work(experts * expert_width, 2 * rows * active),
            "other linear layers": Work(counts.linear * widths.linear, 2 * rows * counts.linear),
            "head": Work(head * widths.head, 0, 2 * rows * head),
            "keys and values": Work(
                keys,
                0,
                requests * attention_operations(decoder, self.rows, context),
            ),
            "recurrent states": Work(
                requests * state_bytes(states, self.rows),
                0,
                8 * rows * states,
            ),
            "norms and biases": Work(counts.small * widths.rest),
        }

    def drafting(self, requests: float, context: float) -> Work:
        """Return the work of the drafter's block and of its context K/V for the verified rows; none
        without a drafter.

        The output layer, its own head's weights and the layers' k and v are read at different
        times, and count each time. The B rows of a block pass through the layers, its K drafts
        through the head, and R rows through the context's weights.
        """
        if self.draft is None:
            return Work()
        decoder = self.draft.decoder
        rows = requests * self.rows
        widths = self.widths
        counts = self.drafter_counts
        block = self.draft.block_size
        drafts = self.draft.block_drafts
        output = decoder.hidden_size * decoder.own_rows(self.draft.head_rows)
        head = output + counts.head.linear
        own = counts.layers.linear + counts.context.linear + counts.head.linear
        width = widths.linear if widths.draft is None else widths.draft
        output_width = width if widths.draft_output is None else widths.draft_output
        small = counts.layers.small + counts.head.small + counts.context.small
        stored = rows * kv_values(decoder) * widths.kv
        return Work(
            own * width
            + output * output_width
            + small * widths.rest
            + self.context_bytes(decoder, requests, context)
            + stored,
            2 * requests * (block * counts.layers.linear + drafts * head)
            + 2 * rows * counts.context.linear,
            requests * attention_operations(decoder, block, context),
        )

    def seconds(self, rates: Rates, requests: float, context: float) -> float:
        """Return the lower bound of one step: drafting, then verification."""
        parts = self.drafting(requests, context), self.verify(requests, context)
        return sum(rates.seconds(part) for part in parts)

    def prefill_operations(self, prompts: int, tokens: int) -> float:
        """Return the operations of the linear layers over whole prompts: the layers for every
        token, the head for each prompt's last one, and a drafter's fc and context GEMMs."""
        decoder = self.target.decoder
        counts = self.target_counts
        values = counts.linear + counts.experts * active_share(decoder)
        if self.draft is not None:
            values += self.drafter_counts.context.linear
        return 2.0 * prompts * (tokens * values + head_values(decoder))

    def context_bytes(self, decoder: DecoderConfig, requests: float, context: float) -> float:
        """Return the bytes of keys and values that the requests' rows read."""
        values = sum(
            min(context, mask.window or context) * layer_kv_values(decoder, i)
            for i, mask in enumerate(decoder.masks)
        )
        return requests * values * self.widths.kv


def active_share(decoder: DecoderConfig) -> float:
    """Return k / E, the share of a layer's E experts that each row uses; on each of several ranks,
    the same share of its own on average."""
    shape = decoder.experts
    return 0.0 if shape is None else shape.top_k / shape.count


def touched_share(decoder: DecoderConfig, rows: float) -> float:
    """Return 1 - (1 - k / E)^rows, the expected share of a layer's E experts that at least one row
    uses if each row uses k. Exact for uniform, independent routing (linearity of expectation); real
    routers are less even and touch fewer."""
    return 1 - (1 - active_share(decoder)) ** rows


def head_values(decoder: DecoderConfig) -> int:
    """H V, of the rows that a rank holds."""
    return decoder.hidden_size * decoder.own_rows(decoder.vocab_size)


def kv_values(decoder: DecoderConfig) -> int:
    """2 L Hkv D: keys and values of one position in all L attention layers."""
    return sum(layer_kv_values(decoder, i) for i in range(len(decoder.masks)))


def layer_kv_values(decoder: DecoderConfig, layer: int) -> int:
    """2 Hkv D."""
    shape = decoder.shape_of(layer)
    return 2 * shape.num_kv_heads * shape.head_dim


def state_bytes(values: int, rows: int) -> float:
    """Bytes of a sequence's states, in fp32, that a forward of so many of its rows reads and writes
    on average: single rows write them once in SINGLE_ROWS forwards. Two or three rows may write
    less than is counted."""
    return 4 * values * (1 + (1 / SINGLE_ROWS if rows == 1 else 1))


def attention_operations(decoder: DecoderConfig, rows: int, context: float) -> float:
    """Count 4 Hq D operations per row, visible key and layer of one request, whose `rows` rows
    follow its context.

    A causal row i sees n + i + 1 keys and a row of a block n + rows. With a window, a row sees at
    most the window's width before it and, in a block, at most the window's width after it.
    """
    total = 0.0
    for layer, mask in enumerate(decoder.masks):
        window = mask.window or float("inf")
        width = decoder.shape_of(layer).head_dim
        for i in range(rows):
            following = 0 if mask.causal else rows - 1 - i
            total += width * (min(context + i + 1, window) + min(following, window - 1))
    return 4 * decoder.num_heads * total
