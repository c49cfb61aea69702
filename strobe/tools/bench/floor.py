"""A lower bound of a step's time: bytes to move and operations to compute, over measured rates.

Legend: c requests, n positions of context each, R rows verified per request (drafts + 1), B the
drafter's block, H hidden size, I intermediate size, V vocabulary, L layers, Hq / Hkv query and
key-value heads, D head size. Only GEMMs count; activations, logits, the norms' arithmetic and the
few embedding rows do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from strobe.kernels.kept_rows import SINGLE_ROWS
from strobe.models.heads.head import HeadValues
from strobe.models.model_config import DecoderConfig, DraftConfig, ExpertShape, TargetConfig


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
    experts, which by default are as linear layers."""

    linear: float
    head: float
    rest: int
    kv: int
    experts: float | None = None


@dataclass(frozen=True)
class Shapes:
    """A target, its drafter if there is one, and the rows that each request verifies."""

    target: TargetConfig
    draft: DraftConfig | None
    rows: int
    widths: Widths

    def verify(self, requests: float, context: float) -> Work:
        """Return the work of the target's forward over c x R rows.

        bytes = linear + head + norms + c (n + R) KV; operations = 2 c R (linear + H V) + attention;
        plus the states of recurrent layers. Expert weights are read if any row is expected to use
        them; operations count the top-k experts of each row.
        """
        decoder = self.target.decoder
        rows = requests * self.rows
        touched = touched_experts(decoder, rows)
        widths = self.widths
        read, small = layer_values(self.target, touched)
        packed = 0.0 if widths.experts is None else widths.experts - widths.linear
        values, _ = layer_values(self.target, active_experts(decoder))
        state_values = 0 if self.target.states is None else self.target.states.values
        # Each row takes four multiply-adds per value of a state.
        stored = rows * kv_values(decoder) * self.widths.kv
        stored += requests * state_bytes(state_values, self.rows)
        return Work(
            self._weights(read, small, head_values(decoder))
            + packed * expert_values(decoder, touched)
            + self.context_bytes(decoder, requests, context)
            + stored,
            2 * rows * values,
            2 * rows * (head_values(decoder) + 4 * state_values)
            + requests * attention_operations(decoder, self.rows, context),
        )

    def drafting(self, requests: float, context: float) -> Work:
        """Return the work of the drafter's block and of its context K/V for the verified rows; none
        without a drafter.

        bytes = linear + fc + context GEMMs + head + norms + c (n + R) KV. The head and the layers'
        k and v count again, since block and context read them at different times. The head has the
        linear layers' dtype: in FP8 the drafter has its own copy.
        operations = 2 c B linear + 2 c D H V + 2 c R (fc + context) + attention, with D drafts per
        block. A head's own weights count as `draft_head_values` says, and are read once.
        """
        if self.draft is None:
            return Work()
        decoder = self.draft.decoder
        rows = requests * self.rows
        values = linear_values(decoder)
        head = decoder.hidden_size * self.draft.head_rows
        block = self.draft.block_size
        observed = observe_values(self.draft)
        own = draft_head_values(self.draft)
        small = small_values(decoder) + decoder.hidden_size + own.small
        drafts = self.draft.block_drafts
        stored = rows * kv_values(decoder) * self.widths.kv
        return Work(
            # the head has the layers' dtype
            self._weights(values + observed + head + own.of_rows + own.of_drafts, small, 0)
            + self.context_bytes(decoder, requests, context)
            + stored,
            2 * requests * (block * (values + own.of_rows) + drafts * (head + own.of_drafts))
            + 2 * rows * observed,
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
        values, _ = layer_values(self.target, active_experts(decoder))
        if self.draft is not None:
            values += observe_values(self.draft)
        return 2.0 * prompts * (tokens * values + head_values(decoder))

    def _weights(self, linear: float, small: int, head: int) -> float:
        widths = self.widths
        return linear * widths.linear + small * widths.rest + head * widths.head

    def context_bytes(self, decoder: DecoderConfig, requests: float, context: float) -> float:
        """Return the bytes of keys and values that the requests' rows read."""
        values = sum(
            min(context, mask.window or context) * layer_kv_values(decoder, i)
            for i, mask in enumerate(decoder.masks)
        )
        return requests * values * self.widths.kv


def linear_values(decoder: DecoderConfig, experts: float | None = None) -> float:
    """Count L (H D (Hq + 2 Hkv) + Hq D H + 3 H I) values: q, k, v, o, gate, up and down.

    Layers with E experts of size J have H E for the router and 3 H J for each of `experts` of them
    (default: all), instead of 3 H I or in addition to a shared MLP. Only attention layers have q,
    k, v and o: no v if keys serve as values, and Hq more heads for an output gate.
    """
    shape = decoder.experts
    sparse = sum(shape.layers) if shape is not None else 0
    values: float = (decoder.num_layers - sparse) * 3 * decoder.intermediate_size
    for layer in map(decoder.shape_of, range(len(decoder.masks))):
        heads = (2 + decoder.output_gate) * decoder.num_heads
        heads += (1 + layer.own_values) * layer.num_kv_heads
        values += heads * layer.head_dim
    if shape is not None:
        num_experts = shape.count * held_share(shape) if experts is None else experts
        values += sparse * (
            shape.count + 3 * shape.shared + 3 * shape.moe_intermediate_size * num_experts
        )
    return values * decoder.hidden_size


def expert_values(decoder: DecoderConfig, experts: float) -> float:
    """Count the 3 H J values of so many experts of size J in each layer that has them."""
    shape = decoder.experts
    if shape is None:
        return 0.0
    return sum(shape.layers) * 3 * decoder.hidden_size * shape.moe_intermediate_size * experts


def held_share(shape: ExpertShape) -> float:
    """Return the share of a layer's experts that a rank holds."""
    return 1.0 if shape.held is None else shape.held[1] / shape.count


def active_experts(decoder: DecoderConfig) -> float:
    """Return the number of experts that each row uses, on average on each rank."""
    shape = decoder.experts
    return 0.0 if shape is None else shape.top_k * held_share(shape)


def touched_experts(decoder: DecoderConfig, rows: float) -> float:
    """Return E (1 - (1 - k / E)^rows), the expected number of a layer's E experts that at least
    one row uses if each row uses k. Exact for uniform, independent routing (linearity of
    expectation); real routers are less even and touch fewer. Of these, a rank's share."""
    shape = decoder.experts
    if shape is None:
        return 0.0
    return held_share(shape) * shape.count * (1 - (1 - shape.top_k / shape.count) ** rows)


def layer_values(target: TargetConfig, experts: float | None = None) -> tuple[float, int]:
    """Return the linear and small values of a target. Each recurrent layer adds H (C + 2 Hv Dv +
    2 Hv) linear ones (input of the convolution, gates, decay, output) and the small ones of
    convolution, decay and norm."""
    decoder = target.decoder
    states = target.states
    linear = linear_values(decoder, experts)
    small = small_values(decoder)
    if states is not None:
        wide = states.channels + 2 * states.heads * (states.value_dim + 1)
        linear += states.layers * decoder.hidden_size * wide
        state_rows = states.channels * states.kernel + 2 * states.heads + states.value_dim
        small += states.layers * state_rows
    return linear, small


def small_values(decoder: DecoderConfig) -> int:
    """Count the norms, L (2 H + 2 D) + H (without 2 D if queries and keys are not normalized), and
    the biases. Gemma's extra norms and the gates of Qwen3.5's shared experts, about 0.01 % of the
    bytes that one row reads, are left out."""
    each = 2 * decoder.hidden_size
    heads = 2 * decoder.head_dim * decoder.qk_norm * len(decoder.masks)
    if decoder.attention_bias:
        wide = (decoder.num_heads + 2 * decoder.num_kv_heads) * decoder.head_dim
        each += wide + decoder.hidden_size * decoder.output_bias
    if decoder.mlp_bias:
        each += 2 * decoder.intermediate_size + decoder.hidden_size
    if decoder.sinks:
        each += decoder.num_heads
    if (shape := decoder.experts) is not None and shape.bias:
        each += shape.count * (
            1 + 2 * shape.moe_intermediate_size + decoder.hidden_size
        )  # every layer has experts
    return decoder.num_layers * each + heads + decoder.hidden_size


def head_values(decoder: DecoderConfig) -> int:
    """H V."""
    return decoder.hidden_size * decoder.vocab_size


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


def fc_values(draft: DraftConfig) -> int:
    """m Ht H for m captured layers of a target of size Ht."""
    hidden_size = draft.decoder.hidden_size
    return len(draft.capture) * (draft.target_hidden_size or hidden_size) * hidden_size


def draft_head_values(draft: DraftConfig) -> HeadValues:
    """Return the values of a drafter's own head besides H V."""
    return HeadValues() if draft.head is None else draft.head.values(draft)


def observe_values(draft: DraftConfig) -> int:
    """fc, and the key and value GEMMs of every layer, 2 L H Hkv D."""
    return fc_values(draft) + draft.decoder.hidden_size * kv_values(draft.decoder)


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
