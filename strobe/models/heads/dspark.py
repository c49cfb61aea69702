"""DSpark's heads: a Markov head corrects each draft's logits by the token before it, and a
confidence head estimates whether the target accepts the draft."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from strobe.kernels.reference_candidates import EdgeTerms, before, join
from strobe.models.config_readers.fields import HINT, Fields
from strobe.models.heads.argmax import ArgmaxHead
from strobe.models.heads.head import Backbone, BlockRows, Drafts, Head, concat
from strobe.models.heads.walk import MAX_CANDIDATES, candidates, walk
from strobe.models.linear import Linear
from strobe.models.model_config import DraftConfig
from strobe.models.weight_counts import WeightCounts, count_weights
from strobe.sampling.sampler import MAX_MARGIN

MarkovKind = Literal["vanilla", "gated", "rnn"]


@dataclass(frozen=True)
class MarkovConfig:
    """The keys of DSpark. rank: of the Markov head, 0 without one; kind: its way to read the token
    before and the row; confidence: whether there is a confidence head; confidence_with_markov:
    whether that reads the token before, too; draft_topk: number of the best tokens that the Markov
    head corrects, None for all; logit_scale: factor of all logits."""

    rank: int
    kind: MarkovKind
    confidence: bool
    confidence_with_markov: bool
    draft_topk: int | None
    logit_scale: float

    def check(self, draft: DraftConfig, path: Path) -> None:
        """Raises ValueError if the keys do not fit the drafter."""
        if self.draft_topk is not None and self.draft_topk > draft.head_rows:
            raise ValueError(
                f"{path}: dspark_draft_topk is {self.draft_topk}, but the head knows only "
                f"{draft.head_rows} tokens; {HINT}"
            )


def read(fields: Fields) -> MarkovConfig:
    """Read the head's keys. Raises ValueError."""
    return MarkovConfig(
        rank=fields.integer("markov_rank", low=0),
        kind=_read_kind(fields),
        confidence=_read_confidence(fields),
        confidence_with_markov=fields.flag("confidence_head_with_markov"),
        draft_topk=_read_topk(fields),
        logit_scale=fields.number("logit_scale", 1.0),
    )


def _read_kind(fields: Fields) -> MarkovKind:
    kinds = get_args(MarkovKind)
    kind = fields.get("markov_head_type", kinds[0])
    if kind not in kinds:
        raise ValueError(
            f"{fields.path}: markov_head_type is {kind!r}, but must be one of {', '.join(kinds)}; "
            f"{HINT}"
        )
    return kind


def _read_confidence(fields: Fields) -> bool:
    """Read the flag, which has two names."""
    keys = ("enable_confidence_head", "use_confidence_head")
    values = {key: fields.flag(key) for key in keys if fields.get(key) is not None}
    if len(set(values.values())) > 1:
        named = " and ".join(f"{key} {value!r}" for key, value in values.items())
        raise ValueError(f"{fields.path}: {named} contradict each other; {HINT}")
    return any(values.values())


def _read_topk(fields: Fields) -> int | None:
    if fields.get("dspark_draft_topk") is None:
        return None
    count = fields.integer("dspark_draft_topk")
    if count > MAX_CANDIDATES:
        raise ValueError(
            f"{fields.path}: dspark_draft_topk is {count}, but at most {MAX_CANDIDATES} candidates "
            "are supported; set a smaller number, or leave it out to correct all logits."
        )
    return count


def make(config: DraftConfig) -> Head:
    return DSparkHead(config)


class MarkovHead(nn.Module):
    """Vectors [r] whose products with `markov_w2` [V', r] correct logits: of the token before, by
    `markov_w1` [V, r], on its own; times a gate that reads the row, too; or of a state that runs
    along the block."""

    def __init__(self, hidden_size: int, vocab_size: int, rows: int, config: MarkovConfig):
        """rows: of the output layer."""
        super().__init__()
        rank = config.rank
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = Linear(rank, rows, fixed=True)
        self.gate_proj: Linear | None = None
        self.joint_proj: Linear | None = None
        if config.kind == "gated":
            self.gate_proj = Linear(hidden_size + rank, rank, bias=True, fixed=True)
        elif config.kind == "rnn":
            self.joint_proj = Linear(2 * rank + hidden_size, 3 * rank, bias=True, fixed=True)
        self.reads_candidates = config.draft_topk is not None and self.joint_proj is None

    def weight_counts(self) -> WeightCounts:
        """Count `markov_w2` as a table where only candidates are corrected; see `count_weights`."""
        counts = WeightCounts(tables=self.markov_w1.weight.numel())
        for linear in (self.gate_proj, self.joint_proj):
            if linear is not None:
                counts += count_weights(linear)
        if self.reads_candidates:
            return counts + WeightCounts(tables=self.markov_w2.weight.numel())
        return counts + count_weights(self.markov_w2)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens -> their vectors [..., r]."""
        return self.markov_w1.weight[tokens]

    def gated(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Rows hidden [..., H] and vectors of the tokens before [..., r] -> gated vectors."""
        if self.gate_proj is None:
            return embedded
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded

    def step(self, state: Tensor, hidden: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """State [S, r], rows [S, H] and vectors of the tokens before [S, r] -> the next state, and
        the vectors that correct this draft."""
        if self.joint_proj is None:
            return state, self.gated(hidden, embedded)
        joint = self.joint_proj(torch.cat([state, embedded, hidden], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return state, torch.tanh(output)


class ConfidenceHead(nn.Module):
    """The probability that the target accepts a draft if it accepts all drafts before."""

    def __init__(self, inputs: int):
        super().__init__()
        self.proj = Linear(inputs, 1, bias=True, fixed=True)

    def margins(self, x: Tensor) -> Tensor:
        """Rows and vectors of the tokens before [S, D, n] -> evidence [S, D] float32: -log(1 - p),
        which like a margin starts at 0, and for large p is the logit of p."""
        assert self.proj.bias is not None
        logits = F.linear(x.float(), self.proj.weight.float(), self.proj.bias.float())
        return F.softplus(logits[..., 0]).clamp(max=MAX_MARGIN)


class DSparkHead(Head):
    """Each draft's logits are corrected by the token before it. All logits are scaled, and capped
    after the correction."""

    def __init__(self, config: DraftConfig):
        super().__init__()
        keys: MarkovConfig = config.head
        decoder = config.decoder
        hidden = decoder.hidden_size
        self.logit_scale = keys.logit_scale
        self.config = keys
        self.plain = ArgmaxHead()
        self.markov_head: MarkovHead | None = None
        self.confidence_head: ConfidenceHead | None = None
        if keys.rank:
            self.markov_head = MarkovHead(hidden, decoder.vocab_size, config.head_rows, keys)
            self.reads_anchor = keys.kind == "rnn" and not config.anchor_first
        if keys.confidence:
            self.confidence_head = ConfidenceHead(hidden + self._confidence_rank)

    @property
    def _confidence_rank(self) -> int:
        return self.config.rank if self.config.confidence_with_markov else 0

    def forward(self, model: Backbone, block: BlockRows) -> Drafts:
        wants_margins = block.margins
        if self.confidence_head is not None:
            block = block._replace(margins=False)
        # The rows that the output layer reads, [S, D, H].
        rows = model.normed(block.hidden.flatten(0, 1)).unflatten(0, block.hidden.shape[:2])
        drafts = self._drafts(model, block, rows)
        if self.confidence_head is None or not wants_margins:
            return drafts
        assert drafts.tokens is not None
        if self._confidence_rank:
            assert self.markov_head is not None
            previous = torch.cat([block.anchor[:, None], drafts.tokens[:, :-1].clamp(min=0)], 1)
            rows = torch.cat([rows, self.markov_head.embed(previous)], -1)
        return drafts._replace(margins=self.confidence_head.margins(rows))

    def _drafts(self, model: Backbone, block: BlockRows, rows: Tensor) -> Drafts:
        head = self.markov_head
        if head is None:
            return self.plain(model, block)
        if self.config.draft_topk is None or head.joint_proj is not None:
            return self._drafts_in_turn(model, block, rows, head)
        return self._walk(model, block, rows, head, self.config.draft_topk)

    def _walk(
        self, model: Backbone, block: BlockRows, rows: Tensor, head: MarkovHead, count: int
    ) -> Drafts:
        """Choose among the candidates that are best without correction, or lead the race."""
        shape = rows.shape[:2]
        values, places = candidates(model, block, rows.flatten(0, 1), count)
        ids = model.tokens_of(places).unflatten(0, shape)
        places = places.unflatten(0, shape)
        unary = (values * model.multiplier).unflatten(0, shape)
        if head.gate_proj is None:
            terms = EdgeTerms(
                unary=unary,
                ids=ids,
                anchor=block.anchor,
                left=head.markov_w1.weight,
                right=head.markov_w2.weight,
                scale=model.multiplier,
                rows=places,
            )
            edges = model.ops.edges(terms)
        else:
            embedded = head.embed(before(block.anchor, ids))
            left = head.gated(rows[:, :, None].expand(-1, -1, ids.shape[2], -1), embedded)
            edges = join(left, head.markov_w2.weight[places], unary, model.multiplier)
        if model.logit_softcap is not None:
            capped = model.ops.gates.softcapped(edges.flatten(0, 2), model.logit_softcap)
            edges = capped.view(edges.shape)
        return walk(model.ops, edges, ids, block)

    def _drafts_in_turn(
        self, model: Backbone, block: BlockRows, rows: Tensor, head: MarkovHead
    ) -> Drafts:
        """Choose draft after draft by the corrected logits of all tokens."""
        shape = rows.shape[:2]
        raw = model.raw_logits(rows.flatten(0, 1))
        left_out = self._left_out(model, block, raw)
        raw = raw.unflatten(0, shape)
        previous = block.anchor
        state = rows.new_zeros(shape[0], head.rank)
        if block.anchor_hidden is not None:  # in training the state runs along all rows
            state, _ = head.step(state, model.normed(block.anchor_hidden), head.embed(previous))
        chosen = list[Drafts]()
        for k in range(shape[1]):
            state, vectors = head.step(state, rows[:, k], head.embed(previous))
            logits = model.finish_logits(raw[:, k] + model.ops.linear(vectors, head.markov_w2))
            if left_out is not None:
                logits = logits.masked_fill(left_out.view(raw.shape)[:, k], -torch.inf)
            drafts = block.choose(model.spread(logits)[:, None], k)
            assert drafts.tokens is not None
            previous = drafts.tokens[:, 0].clamp(min=0)
            chosen.append(drafts)
        return concat(chosen)

    def _left_out(self, model: Backbone, block: BlockRows, raw: Tensor) -> Tensor | None:
        """Return which tokens are not among the candidates of raw [R, V'], if others are not
        chosen."""
        count = self.config.draft_topk
        if count is None:
            return None
        if block.lead is None:
            _, rows = model.ops.best_of(raw, count)
        else:
            _, rows = block.lead(model.outputs(raw), count)
        return torch.ones_like(raw, dtype=torch.bool).scatter_(1, rows, False)
