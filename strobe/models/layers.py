"""Decoder layers, defined once as calls of `strobe.models.ops`.

A layer is called with (ops, x, rows) and adds to the residual stream x. An MLP, or its replacement,
is called with (ops, x, norm, rows), where norm is the norm before it. Legend: T rows, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from strobe.models.linear import Linear
from strobe.models.model_config import DecoderConfig
from strobe.models.modules import Attention, RMSNorm, RotaryTable
from strobe.models.ops.torch_ops import Attend, BlockKernels, ForwardRows, Residual, TorchOps


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one linear layer."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        size = config.hidden_size
        inner = config.intermediate_size
        bias = config.mlp_bias
        self.gate_up_proj = Linear(size, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = Linear(inner, size, bias=bias, split="inputs")

    def forward(self, ops: TorchOps, x: Residual, norm: RMSNorm, rows: ForwardRows) -> None:
        inner = ops.norm_linear(x, norm, self.gate_up_proj, "silu")
        ops.add_linear(x, inner, self.down_proj)


class Layer(nn.Module):
    """A decoder layer. input_layernorm: its first norm, which reads the residual stream."""

    input_layernorm: RMSNorm


class DecoderLayer(Layer):
    """Attention and an MLP, each after a norm. mlp: replaces the MLP."""

    def __init__(self, config: DecoderConfig, layer: int, mlp: nn.Module | None = None):
        super().__init__()
        self.input_layernorm = RMSNorm.of_stream(config)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = RMSNorm.of_stream(config)
        self.mlp = mlp or MLP(config)

    def forward(self, ops: TorchOps, x: Residual, rows: ForwardRows) -> None:
        attention = self.self_attn
        qkv = ops.norm_linear(x, self.input_layernorm, attention.qkv_proj)
        mixed = ops.attention(qkv, attention, rows)
        ops.add_linear(x, mixed, attention.o_proj, next_norm=self.post_attention_layernorm)
        self.mlp(ops, x, self.post_attention_layernorm, rows)


class BlockConvolutions(nn.Module):
    """The two convolutions along a block's rows around a sub-layer: of its input, and of its
    output. A row's kernels are `base_kernel` [2, taps, H] plus a linear function of the normed
    input; `group` neighboring channels share the latter. At first both return their input."""

    def __init__(self, hidden_size: int, taps: int, group: int):
        super().__init__()
        identity = torch.zeros(2, taps, hidden_size)
        identity[:, 0] = 1.0
        self.base_kernel = nn.Parameter(identity)
        self.kernel_projection = Linear(hidden_size, 2 * taps * (hidden_size // group))
        nn.init.zeros_(self.kernel_projection.weight)

    def before(
        self, ops: TorchOps, x: Residual, norm: RMSNorm, rows: ForwardRows
    ) -> tuple[Tensor, BlockKernels]:
        """Return the sub-layer's input [T, H], and the kernels for `after`."""
        y = ops.norm(x.value, norm)
        kernels = ops.block_kernels(self.base_kernel, ops.linear(y, self.kernel_projection))
        return ops.convolve(y, kernels, 0, rows), kernels

    def after(
        self, ops: TorchOps, x: Residual, y: Tensor, kernels: BlockKernels, rows: ForwardRows
    ) -> None:
        """Add the sub-layer's output y [T, H] to the residual stream."""
        x.value = ops.convolve(y, kernels, 1, rows, onto=x.value)


class ConvolvedLayer(DecoderLayer):
    """A layer of blocks' rows with convolutions around attention and MLP. Keys and values of the
    context are not convolved."""

    mlp: MLP

    def __init__(self, config: DecoderConfig, layer: int, *, taps: int, group: int):
        super().__init__(config, layer)
        self.attention_conv = BlockConvolutions(config.hidden_size, taps, group)
        self.mlp_conv = BlockConvolutions(config.hidden_size, taps, group)

    def forward(self, ops: TorchOps, x: Residual, rows: ForwardRows) -> None:
        attention = self.self_attn
        y, kernels = self.attention_conv.before(ops, x, self.input_layernorm, rows)
        y = ops.attention(ops.linear(y, attention.qkv_proj), attention, rows)
        y = ops.linear(y, attention.o_proj)
        self.attention_conv.after(ops, x, y, kernels, rows)
        y, kernels = self.mlp_conv.before(ops, x, self.post_attention_layernorm, rows)
        y = ops.linear(y, self.mlp.gate_up_proj, "silu")
        y = ops.linear(y, self.mlp.down_proj)
        self.mlp_conv.after(ops, x, y, kernels, rows)


class Decoder(nn.Module):
    """Embedding, layers and head, as far as they are common to targets and drafters.

    skipped: prefixes of checkpoint tensors that are not used; a family adds its own, such as
    "visual.".
    """

    def __init__(self, decoder: DecoderConfig, layers: Sequence[Layer], max_positions: int):
        super().__init__()
        self.ops = TorchOps()
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm.of_stream(decoder)
        shapes = [decoder.shape_of(i) for i in range(len(decoder.masks))]
        tables = {
            (head_dim, rope): RotaryTable(head_dim, rope, max_positions)
            for head_dim, rope in dict.fromkeys((shape.head_dim, shape.rope) for shape in shapes)
        }
        self.rope = nn.ModuleList(tables.values())
        self.tables = [tables[shape.head_dim, shape.rope] for shape in shapes]
        # A list, since modules would be registered twice.
        self._next_norms = [*(layer.input_layernorm for layer in layers[1:]), None]
        self.skipped: tuple[str, ...] = ()

    def embed(self, ids: Tensor) -> Tensor:
        """ids [T] -> embeddings [T, H], scaled as the config says."""
        raise NotImplementedError

    def head_part(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> this rank's columns of the logits."""
        raise NotImplementedError

    def head(self, x: Tensor) -> Tensor:
        """Residual stream [R, H] -> logits [R, V]."""
        return self.ops.whole(self.head_part(x))

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: Attend,
        capture: tuple[int, ...] = (),
        *,
        offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """ids, positions [T] -> (residual stream [T, H], features [T, len(capture) * H] or None).

        capture: numbers of finished layers; the features are the residual streams after them, in
        this order. offsets: see `ForwardRows`.
        """
        ops = self.ops
        stream = self.ops.residual(self.embed(ids), capture)
        rows = ForwardRows(positions, attend, self.tables, offsets)
        pairs = zip(self.layers, self._next_norms, strict=True)
        for done, (layer, norm) in enumerate(pairs, start=1):
            stream.begin(done, norm)
            layer(ops, stream, rows)
            stream.end(done)
        return stream.value, stream.features()
