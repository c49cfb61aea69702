"""Tiny random checkpoints, engines over them, and runs that check every step."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bookkeeping import check_engine
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3ForCausalLM

from strobe.config import EngineConfig
from strobe.engine.build import Components, build, resolve
from strobe.engine.engine import Engine
from strobe.request import Request, TokenLogprob
from strobe.runner.decode_state import DecodeState
from strobe.sampling_params import SamplingParams
from strobe.speculation.acceptance import KNOTS
from strobe.speculation.draft_policy import BatchLoad, Candidate, DraftPlan, DraftPolicy
from strobe.speculation.proposer import Drafts, Proposer, ProposerSet
from strobe.step import Span, TokenEvent

VOCAB = 61
HIDDEN = 32
LAYERS = 5
MASK_TOKEN = VOCAB - 1
EOS_IDS = [7, 23]
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": EOS_IDS,
}
"""Defaults of every tiny target."""


def make_target(
    directory: Path,
    family: Any = Qwen3ForCausalLM,
    *,
    seed: int = 0,
    shards: str | None = None,
    wrapper: Mapping[str, Any] | None = None,
    embedding: float = 0.5,
    **changes: Any,
):
    """Write a random target with widely spread logits; return transformers' model of it.

    family: transformers' class. changes: fields of its config, or, with `wrapper` (the fields of an
    outer config), of its text_config. embedding: standard deviation of the embeddings. shards: a
    size such as "20KB" that splits the weights over several files.
    """
    values = {**SHAPE, "rope_theta": 10000.0, **changes}
    kind = family.config_class
    config = kind(**values) if wrapper is None else kind(text_config=values, **wrapper)
    model = family(config).float().eval()
    noise = torch.Generator().manual_seed(seed)
    normed = any("q_norm" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            scale = embedding if "embed" in name or "lm_head" in name else 0.3
            if not normed and ("q_proj" in name or "k_proj" in name):
                scale = 0.1  # else attention is so sharp that float32's own rounding shows
            parameter.data.normal_(0, scale, generator=noise)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5, generator=noise)
        else:
            parameter.data.normal_(0, 0.3, generator=noise)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5, generator=noise)
    model.generation_config.eos_token_id = config.get_text_config().eos_token_id
    options = {"max_shard_size": shards} if shards else {}
    model.save_pretrained(directory, **options)
    return model


LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-_+ \n'
MERGES = ("a b", "b a", "n o", "e s", "y es", '" :', '{ "', "t r", "u e")


def make_tokenizer(directory: Path) -> Path:
    """Write a tokenizer.json for the tiny vocabulary (characters, some words, three special tokens)
    and return its path."""
    special = {EOS_IDS[0]: "<|end|>", EOS_IDS[1]: "<|stop|>", MASK_TOKEN: "<|mask|>"}
    blank = LETTERS.replace(" ", "Ġ").replace("\n", "Ċ")
    texts = iter([*blank, *(merge.replace(" ", "") for merge in MERGES)])
    names = {special[i] if i in special else next(texts): i for i in range(VOCAB)}
    assert not list(texts), "the vocabulary is too small"
    merges = [tuple(merge.split()) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab=names, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def greedy(hf: Any, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """Return transformers' greedy output, its end token included."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)  # else token 0 counts as padding
    out = hf.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, **options
    )
    return out[0, ids.shape[1] :].tolist()


def join_experts(directory: Path) -> None:
    """Store every layer's experts as two tensors, as transformers 5 does, and also their FP8
    scales."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for end in ("", "_scale_inv"):
        last = f"_proj.weight{end}"
        for first in [name for name in tensors if name.endswith(f".experts.0.gate{last}")]:
            prefix = first.removesuffix(f"0.gate{last}")
            count = sum(n.startswith(prefix) and n.endswith(f"down{last}") for n in tensors)
            gate, up, down = (
                torch.stack([tensors.pop(f"{prefix}{e}.{name}{last}") for e in range(count)])
                for name in ("gate", "up", "down")
            )
            tensors[f"{prefix}gate_up_proj{end}"] = torch.cat([gate, up], 1)
            tensors[f"{prefix}down_proj{end}"] = down
    save_file(tensors, path)


def edit_json(path: Path, **changes: Any) -> None:
    """Change or, with None, delete keys of a JSON file."""
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def draft_tensors(
    *,
    layers: int,
    captured: int,
    seed: int,
    bias: bool = False,
    sinks: bool = False,
    width: int = 16,
) -> dict[str, torch.Tensor]:
    """Return random drafter weights under z-lab's names: 4 heads, 2 key-value heads."""
    noise = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise) * 0.3

    def scale(size: int) -> torch.Tensor:
        return torch.rand(size, generator=noise) + 0.5

    tensors = {
        "fc.weight": matrix(HIDDEN, captured * HIDDEN),
        "hidden_norm.weight": scale(HIDDEN),
        "norm.weight": scale(HIDDEN),
    }
    outs = {"q_proj": 4 * width, "k_proj": 2 * width, "v_proj": 2 * width}
    for i in range(layers):
        layer = f"layers.{i}."
        for name, rows in outs.items():
            tensors[f"{layer}self_attn.{name}.weight"] = matrix(rows, HIDDEN)
            if bias:
                tensors[f"{layer}self_attn.{name}.bias"] = matrix(rows)
        tensors[f"{layer}self_attn.o_proj.weight"] = matrix(HIDDEN, 4 * width)
        if bias:
            tensors[f"{layer}self_attn.o_proj.bias"] = matrix(HIDDEN)
        if sinks:
            tensors[f"{layer}self_attn.attention_sink_bias"] = matrix(4) * 5
        for name in ("q_norm", "k_norm"):
            tensors[f"{layer}self_attn.{name}.weight"] = scale(width)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{layer}mlp.{name}.weight"] = matrix(48, HIDDEN)
        tensors[f"{layer}mlp.down_proj.weight"] = matrix(HIDDEN, 48)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{name}.weight"] = scale(HIDDEN)
    return tensors


def make_draft(
    directory: Path,
    *,
    layer_types: Sequence[str] | None = None,
    window: int | None = None,
    block: int = 8,
    layer_ids: Sequence[int] = (0, 1, 3),
    mask_token: int = MASK_TOKEN,
    target_layers: int = LAYERS,
    seed: int = 1,
    bias: bool = False,
    sinks: bool = False,
    width: int = 16,
    top: Mapping[str, Any] | None = None,
    nested: Mapping[str, Any] | None = None,
) -> Path:
    """Write a random DFlash drafter in z-lab's format. width: a head's size; top, nested: extra
    keys of the config."""
    layers = len(layer_types) if layer_types else 2
    directory.mkdir(parents=True, exist_ok=True)
    tensors = draft_tensors(
        layers=layers, captured=len(layer_ids), seed=seed, bias=bias, sinks=sinks, width=width
    )
    save_file(tensors, directory / "model.safetensors")
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "block_size": block,
        "num_target_layers": target_layers,
        "dflash_config": {
            "mask_token_id": mask_token,
            "target_layer_ids": list(layer_ids),
            **({"attention_sink_bias": True} if sinks else {}),
            **(nested or {}),
        },
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": width,
        "attention_bias": bias,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "max_position_embeddings": 512,
        **({"layer_types": list(layer_types)} if layer_types else {}),
        **({"sliding_window": window, "use_sliding_window": True} if window else {}),
        **(top or {}),
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def pool_bytes(pages: int, page_size: int, *, drafter_layers: int = 0, width: int = 16) -> int:
    """Return the kv_cache_memory of a tiny pair that fits `pages` pages and the reserved one."""
    per_token = 2 * 2 * width * 4 * (LAYERS + drafter_layers)
    return (pages + 1) * page_size * per_token


def make_engine(
    config: EngineConfig,
    replace: Callable[[Components, str], Proposer] | None = None,
    *,
    names: Sequence[str] = (),
    **options: Any,
) -> Engine:
    """Build an engine; replace(parts, name) makes the proposer that replaces each of `names`."""
    resolved = resolve(config)
    parts = build(resolved)
    if replace is not None:
        put(parts, {name: replace(parts, name) for name in names})
    return watched(Engine(resolved, components=parts, **options))


def put(parts: Components, proposers: Mapping[str, Any]) -> None:
    """Replace the proposers of these names."""
    old = parts.proposers
    parts.proposers = ProposerSet({**old.by_name, **proposers}, old.device, old.composites)


def watched(engine: Engine) -> Engine:
    """Give scripted proposers their engine, where they look up the requests of slots."""
    for proposer in engine.proposers.on_device.values():
        if isinstance(proposer, Scripted):
            proposer.engine = engine
    return engine


class Lengths(DraftPolicy):
    """A policy that limits each request on its own: length(request, max_drafts) -> num_verified."""

    def __init__(self, length: Callable[[Request, int], int]):
        self.length = length

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        return DraftPlan([self.length(c.request, c.max_drafts) for c in candidates])


class RandomRows(DraftPolicy):
    """A policy that changes at random each step: all drafts, some of each request's, or a number of
    rows in all, chosen by a random confidence."""

    def __init__(self, seed: str):
        self.rng = random.Random(seed)

    def plan(self, candidates: Sequence[Candidate], load: BatchLoad) -> DraftPlan:
        rng, kind = self.rng, self.rng.randrange(4)
        limits = [c.max_drafts if kind < 2 else rng.randint(0, c.max_drafts) for c in candidates]
        chained = [
            bool(c.chain.tokens) and (not c.on_device or rng.random() < 0.5) for c in candidates
        ]
        if kind % 2 == 0:
            return DraftPlan(limits, use_chain=chained)
        rates = tuple([tuple([rng.random() for _ in range(KNOTS)]) for _ in range(max(limits))])
        return DraftPlan(limits, rng.randint(0, sum(limits) + 2), rates, chained)


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    each_step: Callable[[list[Request]], None] | None = None,
    max_steps: int = 3000,
) -> list[list[int]]:
    """Run all prompts together; return their outputs, siblings one after another.

    After every step the engine checks itself, and the events so far must add up to the outputs; at
    the end the engine must be idle with every page free.
    """
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    requests: list[Request] = []
    for prompt, sampled in zip(prompts, params, strict=True):
        requests += engine.add_prompt(prompt, sampled)
    drain(engine, requests, each_step=each_step, max_steps=max_steps)
    return [request.output_ids for request in requests]


def drain(
    engine: Engine,
    requests: Sequence[Request],
    *,
    each_step: Callable[[list[Request]], None] | None = None,
    max_steps: int = 3000,
) -> dict[Request, list[TokenLogprob]]:
    """Step until the engine is idle and check each step; return the log probabilities."""
    by_key = {(request.key, request.sibling): request for request in requests}
    reported: dict[Request, list[int]] = {request: [] for request in requests}
    logprobs: dict[Request, list[TokenLogprob]] = {request: [] for request in requests}
    begun: set[Request] = set()
    ended: set[Request] = set()
    steps = 0
    while engine.has_work:
        for event in engine.step():
            request = by_key[event.key, event.sibling]
            assert (event.start is not None) == (not reported[request] and request not in begun)
            begun.add(request)
            assert request not in ended, "an event of a request after its end"
            reported[request] += event.tokens
            assert reported[request] == request.output_ids
            assert request.finish_reason == event.finish_reason
            check_event(request, event)
            logprobs[request] += event.logprobs
            if event.finish_reason is not None:
                ended.add(request)
        check_engine(engine)
        if each_step is not None:
            each_step(list(requests))
        steps += 1
        assert steps < max_steps, "the engine never becomes idle"
    assert all(request in ended for request in requests)
    assert engine.components.pool.available == engine.components.pool.capacity
    return logprobs


def check_event(request: Request, event: TokenEvent) -> None:
    """Check an event's counts and log probabilities against its tokens."""
    sampling, tokens = request.sampling, event.tokens
    assert 0 <= event.num_accepted <= min(event.num_verified, len(tokens))
    assert event.num_verified <= request.num_drafts
    if sampling.logprobs is None:
        assert not event.logprobs
        return
    assert [entry.token for entry in event.logprobs] == tokens
    assert {len(entry.top) for entry in event.logprobs} <= {sampling.logprobs}


def cursor(state: DecodeState, slot: int) -> tuple[int, int]:
    """Return (positions with K/V, last token) of a slot, as the device has them."""
    length, tail = state.cursor[slot].tolist()
    return length, tail


class Scripted:
    """A proposer that knows the answers and proposes them as changed by `mangle`.

    answers: a request's whole sequence, prompt included, as the target alone would generate it.
    mangle(request, start, drafts): the drafts to propose, where `drafts` are the right ones after
    position `start`. It reads the device's lengths, so it works with any number of steps in flight.
    """

    engine: Engine

    def __init__(
        self,
        state: DecodeState,
        num_drafts: int,
        mangle: Callable[[Request, int, list[int]], list[int]],
    ):
        self.state, self.num_drafts, self.mangle = state, num_drafts, mangle
        self.capture: tuple[int, ...] = ()
        self.margins = False  # none that an adaptive policy should learn from
        self.answers: dict[Request, list[int]] = {}

    def requests(self, spans: Sequence[Span]) -> list[Request]:
        """Return the requests of these spans."""
        running = {record.slot: record.request for record in self.engine.scheduler.running}
        return [running[span.slot] for span in spans]

    def propose(self, spans: Sequence[Span]) -> Drafts:
        rows: list[list[int]] = []
        for span, request in zip(spans, self.requests(spans), strict=True):
            start, _ = cursor(self.state, span.slot)
            answer = self.answers.get(request, [])
            true = answer[start + 1 : start + 1 + self.num_drafts]
            true = true + [0] * (self.num_drafts - len(true))
            rows.append(self.mangle(request, start, true))
        drafts = torch.tensor(rows, device=self.state.device)
        margins = (drafts * 7 % 13).float()
        size = len(rows), self.num_drafts
        return Drafts(drafts.view(size), margins.view(size))

    def widths_for(self, max_drafts: int) -> tuple[list[int], list[int]]:
        return [max_drafts], [1 + max_drafts]

    def observe(self, batch: Any, hidden: Any) -> None:
        pass


def oracle(request: Request, start: int, drafts: list[int]) -> list[int]:
    """All drafts right."""
    return drafts


def adversary(request: Request, start: int, drafts: list[int]) -> list[int]:
    """All drafts wrong."""
    return [(token + 1) % VOCAB for token in drafts]


def wavering(request: Request, start: int, drafts: list[int]) -> list[int]:
    """Right except at one position, which changes from step to step."""
    wrong = (start * 7 + request.num_prompt * 3) % (len(drafts) + 2)
    return [(t + 1) % VOCAB if i == wrong else t for i, t in enumerate(drafts)]
