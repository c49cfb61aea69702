"""DFlash2's head: a walk over each row's best tokens, in which two low-rank codebooks score which
candidate follows which. Its layers have convolutions along the block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from strobe.kernels.reference_candidates import EdgeTerms
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.heads.head import Backbone, BlockRows, Drafts, Head
from strobe.models.heads.walk import MAX_CANDIDATES, candidates, walk
from strobe.models.layers import ConvolvedLayer
from strobe.models.linear import Linear
from strobe.models.model_config import DecoderConfig, DraftConfig
from strobe.models.weight_counts import WeightCounts, count_weights


@dataclass(frozen=True)
class SelectorConfig:
    """The keys of DFlash2. conv_kernel_size: taps of the convolutions around attention and MLP;
    conv_group_size: channels that share a dynamic kernel; selector_rank: width of the codebooks;
    selector_top_k: candidates of each draft."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int

    def check(self, draft: DraftConfig, path: Path) -> None:
        """Raises ValueError if the keys do not fit the drafter."""
        hidden = draft.decoder.hidden_size
        if hidden % self.conv_group_size:
            raise ValueError(
                f"{path}: conv_group_size is {self.conv_group_size}, but must divide hidden_size, "
                f"{hidden}; {HINT}"
            )
        if self.selector_top_k > draft.head_rows:
            raise ValueError(
                f"{path}: selector_top_k is {self.selector_top_k}, but the head knows only "
                f"{draft.head_rows} tokens; {HINT}"
            )


def read(fields: Fields) -> SelectorConfig:
    """Read the four keys. Raises ValueError."""
    config = SelectorConfig(
        conv_kernel_size=fields.integer("conv_kernel_size"),
        conv_group_size=fields.integer("conv_group_size"),
        selector_rank=fields.integer("selector_rank"),
        selector_top_k=fields.integer("selector_top_k"),
    )
    if config.selector_top_k > MAX_CANDIDATES:
        raise ValueError(
            f"{fields.path}: selector_top_k is {config.selector_top_k}, but at most "
            f"{MAX_CANDIDATES} candidates are supported; {HINT}"
        )
    return config


def make(config: DraftConfig) -> SelectorHead:
    return SelectorHead(config.decoder, config.head)


class CandidateSelector(nn.Module):
    """The vectors of edges: of a token before, times a linear function of the row; and of a
    candidate. Both codebooks have a row for each token."""

    def __init__(self, hidden_size: int, vocab_size: int, rank: int):
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = Linear(hidden_size, rank, fixed=True)
        nn.init.normal_(self.predecessor_codebook, std=rank**-0.5)

    def weight_counts(self) -> WeightCounts:
        """Count the codebooks as tables; see `count_weights`."""
        tables = self.predecessor_codebook.numel() + self.successor_codebook.numel()
        return WeightCounts(tables=tables) + count_weights(self.hidden_projection)


class SelectorHead(Head):
    """Scores are capped before the edges are added."""

    def __init__(self, decoder: DecoderConfig, config: SelectorConfig):
        super().__init__()
        self.config = config
        self.candidate_selector = CandidateSelector(
            decoder.hidden_size, decoder.vocab_size, config.selector_rank
        )

    def make_layer(self, decoder: DecoderConfig, layer: int) -> ConvolvedLayer:
        return ConvolvedLayer(
            decoder,
            layer,
            taps=self.config.conv_kernel_size,
            group=self.config.conv_group_size,
        )

    def forward(self, model: Backbone, block: BlockRows) -> Drafts:
        selector = self.candidate_selector
        shape = block.hidden.shape[:2]
        rows = model.normed(block.hidden.flatten(0, 1))
        values, places = candidates(model, block, rows, self.config.selector_top_k)
        ids = model.tokens_of(places).unflatten(0, shape)
        factors = model.ops.linear(rows, selector.hidden_projection)
        terms = EdgeTerms(
            unary=model.finish_logits(values).unflatten(0, shape),
            ids=ids,
            anchor=block.anchor,
            left=selector.predecessor_codebook,
            right=selector.successor_codebook,
            hidden=factors.unflatten(0, shape),
        )
        return walk(model.ops, model.ops.edges(terms), ids, block)
