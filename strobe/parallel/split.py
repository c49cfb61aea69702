"""The part of a model's configs that one of several ranks holds.

Query heads, intermediate sizes, recurrent heads and experts' sizes or numbers are divided by the
number of ranks. Key-value heads are, too, or copied if there are fewer of them. Embedding and head
are split by vocabulary, whose last part may be smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from strobe.config import EngineConfig
from strobe.models.checkpoint import Checkpoint
from strobe.models.dflash_drafter import DFlash
from strobe.models.model_config import DecoderConfig, DraftConfig, TargetConfig
from strobe.models.ops.compiled_ops import CompiledOps
from strobe.models.ops.torch_ops import TorchOps
from strobe.models.target import Target
from strobe.models.weight_loading import Open
from strobe.parallel.group import Group, RankFailed
from strobe.parallel.rank_compiled_ops import RankCompiledOps
from strobe.parallel.rank_ops import RankOps, make_rank_ops
from strobe.parallel.rank_sampling import RankRows
from strobe.parallel.shards import ShardedCheckpoint
from strobe.sampling.sampling_ops import SamplingOps
from strobe.sampling.sampling_state import SamplingState

Config = TypeVar("Config", TargetConfig, DraftConfig)


@dataclass(frozen=True)
class Split:
    """One rank's part. size: number of ranks; draft_size: number of ranks that the drafter's layers
    are split over; whole_experts: whether a rank has some of the experts, not a part of each;
    group: the ranks, once they have met. Raises ValueError."""

    rank: int
    size: int
    draft_size: int
    whole_experts: bool = False
    group: Group | None = None

    def __post_init__(self):
        if self.draft_size not in (1, self.size):
            raise ValueError(
                f"draft_tensor_parallel_size is {self.draft_size}; ask for 1 or for "
                f"tensor_parallel_size, which is {self.size}."
            )

    @staticmethod
    def of(config: EngineConfig, rank: int) -> Split:
        size = config.tensor_parallel_size
        whole_experts = config.enable_expert_parallel
        if whole_experts and size == 1:
            raise ValueError(
                "enable_expert_parallel is set, but tensor_parallel_size is 1; leave it out, or "
                "ask for several ranks."
            )
        return Split(
            rank=rank,
            size=size,
            draft_size=config.draft_tensor_parallel_size or size,
            whole_experts=whole_experts,
        )

    def opener(self, load_format: str) -> Open:
        """Return what opens a checkpoint as the rank sees it; None for random weights."""
        if load_format != "auto":
            return None
        if self.size == 1:
            return Checkpoint
        return partial(
            ShardedCheckpoint,
            rank=self.rank,
            size=self.size,
            whole_experts=self.whole_experts,
        )

    def ops(self, ops: TorchOps, model: Target | DFlash, *, kernels: bool) -> TorchOps:
        """Return the operations that compute the rank's part of the model as `ops` do. kernels:
        whether those are `TritonOps`."""
        if self.group is None:
            return ops
        kind = RankOps
        if isinstance(ops, CompiledOps):
            kind = RankCompiledOps
        if kernels:
            from strobe.parallel.rank_triton_ops import RankTritonOps as kind
        size = self.size if isinstance(model, Target) else self.draft_size
        return make_rank_ops(kind, ops, model, self.group, layers_split=size > 1)

    def sampling(
        self, num_slots: int, vocab_size: int, device: torch.device, ops: SamplingOps
    ) -> SamplingState:
        """Make the sampler's state."""
        ranks = None if self.group is None else RankRows(self.group, vocab_size)
        return SamplingState(num_slots, vocab_size, device, ops, ranks=ranks)

    def require_group(self) -> None:
        """Raise ValueError if the rank's model is useless because the other ranks are missing."""
        if self.size > 1 and self.group is None:
            raise ValueError(
                f"tensor_parallel_size is {self.size}, but this command runs one rank; leave it "
                "out."
            )

    def fewest(self, pages: int, device: torch.device) -> int:
        """Return the smallest number of pages of all ranks."""
        if self.group is None:
            return pages
        return int(self.group.join(torch.tensor([[pages]], device=device)).min())

    def fail(self, error: BaseException) -> None:
        """End the group: after a failed step, ranks may have run different parts of it."""
        if self.group is not None and self.group.failure is None:
            self.group.failure = RankFailed(f"A step failed on the first rank: {error}")

    def end_step(self) -> None:
        """Record that a step is launched in whole."""
        if self.group is not None:
            self.group.end_step()

    def check(self) -> None:
        """Raise RankFailed if another rank has ended."""
        if self.group is not None:
            self.group.check()

    def split(
        self, target: TargetConfig, draft: DraftConfig | None
    ) -> tuple[TargetConfig, DraftConfig | None]:
        """Return the configs of the rank's parts. Raises ValueError for a size that the number of
        ranks does not divide."""
        heads = [("target", target.decoder.vocab_size)]
        if draft is not None:
            heads.append(("drafter", draft.head_rows))
        for model, rows in heads:
            if rows <= (self.size - 1) * -(-rows // self.size):
                _divide(model, "vocab_size", rows, self.size)
        if self.whole_experts and target.decoder.experts is None:
            raise ValueError(
                "enable_expert_parallel is set, but the target has no experts; leave it out."
            )
        decoder = _split("target", target.decoder, self.size, self.whole_experts)
        states = target.states
        if states is not None:
            heads = _divide("target", "linear_num_value_heads", states.heads, self.size)
            keys = _divide("target", "linear_num_key_heads", states.key_heads, self.size)
            states = replace(states, heads=heads, key_heads=keys)
        target = replace(target, decoder=decoder, states=states)
        if draft is not None:
            draft = replace(draft, decoder=_split("drafter", draft.decoder, self.draft_size))
        return self.of_rank(target), draft and self.of_rank(draft)

    def split_draft(self, target: TargetConfig, draft: DraftConfig) -> DraftConfig:
        """Return the config of the rank's part of a drafter; see `split`."""
        part = self.split(target, draft)[1]
        assert part is not None
        return part

    def of_rank(self, config: Config) -> Config:
        """Complete a config of parts with this rank's vocabulary and experts."""
        decoder = replace(config.decoder, vocab_part=(self.rank, self.size))
        experts = decoder.experts
        if self.whole_experts and experts is not None:
            count = experts.count // self.size
            decoder = replace(decoder, experts=replace(experts, held=(self.rank * count, count)))
        return replace(config, decoder=decoder)


ALONE = Split(rank=0, size=1, draft_size=1)


def _has_mlp(config: DecoderConfig) -> bool:
    """Whether layers have an MLP that is no expert."""
    experts = config.experts
    return experts is None or experts.shared > 0 or not all(experts.layers)


def _divide(model: str, name: str, value: int, size: int) -> int:
    if value % size:
        raise ValueError(
            f"tensor_parallel_size is {size}, which does not divide the {model}'s {name} {value}; "
            f"ask for a number that does."
        )
    return value // size


def _split(
    model: str, config: DecoderConfig, size: int, whole_experts: bool = False
) -> DecoderConfig:
    """Return the config of one of `size` equal parts of the layers."""

    def kv_heads(count: int) -> int:
        if count < size:  # ranks share a head
            _divide(model, "num_attention_heads", config.num_heads, size)
            if size % count:
                _divide(model, "num_key_value_heads", count, size)
            return 1
        return _divide(model, "num_key_value_heads", count, size)

    experts = config.experts
    inner = config.intermediate_size
    if experts is not None:
        inner_size = experts.moe_intermediate_size
        if whole_experts:
            _divide(model, "num_experts", experts.count, size)
        else:
            inner_size = _divide(model, "moe_intermediate_size", inner_size, size)
        shared = _divide(model, "shared_expert_intermediate_size", experts.shared, size)
        experts = replace(experts, moe_intermediate_size=inner_size, shared=shared)
    if _has_mlp(config):
        inner = _divide(model, "intermediate_size", inner, size)
    return replace(
        config,
        num_heads=_divide(model, "num_attention_heads", config.num_heads, size),
        num_kv_heads=kv_heads(config.num_kv_heads),
        layer_shapes=tuple(
            replace(shape, num_kv_heads=kv_heads(shape.num_kv_heads))
            for shape in config.layer_shapes
        ),
        intermediate_size=inner,
        experts=experts,
    )
