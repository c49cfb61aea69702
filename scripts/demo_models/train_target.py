"""Train the target of the demo pair within a time budget, save it, and measure it.

    python scripts/demo_models/train_target.py --minutes 8.5 --out OUT/target --log OUT/log.json

The forward pass here is Qwen3's, written for packed chats over the parameters of the transformers
model; it is compared with that model before training starts.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import shutil
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).resolve().parent)]

from training_data import IGNORED, Batch, BatchPool, Packing  # noqa: E402

from scripts.demo_models.tasks import HELDOUT_TEMPLATES, check, heldout  # noqa: E402

START = time.monotonic()
HEADS, KV_HEADS, HEAD_DIM, EPS, THETA = 4, 2, 64, 1e-6, 10000.0
ATTENTION = os.environ.get("ATTENTION", "aten")
TOKENIZER = ROOT / "strobe/demo_models/target"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Fresh fp32 weights; the projections back into the residual stream start smaller."""
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=16,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        rms_norm_eps=EPS,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.normal_(0.0, 0.02 / math.sqrt(2 * 16) if deep else 0.02)
    return model


# T tokens of packed chats, C hidden, H heads, D head size.


def norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMS norm over the last dimension, computed in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + EPS)
    return y.to(x.dtype) * weight.to(x.dtype)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding, first half against second half."""
    a, b = x_THD.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_THD.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int) -> Tensor:
    """Causal attention inside each chat; a plain mask on the CPU."""
    if q.is_cuda and ATTENTION == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
        return varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0))
    if q.is_cuda:
        return torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, True, False
        )[0]
    index = torch.arange(len(q))
    chat = torch.bucketize(index, bounds, right=True)
    mask = (chat[:, None] == chat[None]) & (index[:, None] >= index[None])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def block(h: Tensor, layer: torch.nn.Module, place: tuple[Any, ...]) -> Tensor:
    """One decoder layer on packed tokens; weights are cast to the type of `h`."""
    cos, sin, bounds, longest = place
    attention, mlp = layer.self_attn, layer.mlp

    def linear(x: Tensor, projection: torch.nn.Module) -> Tensor:
        return F.linear(x, projection.weight.to(x.dtype))

    x = norm(h, layer.input_layernorm.weight)
    q = norm(linear(x, attention.q_proj).view(-1, HEADS, HEAD_DIM), attention.q_norm.weight)
    k = norm(linear(x, attention.k_proj).view(-1, KV_HEADS, HEAD_DIM), attention.k_norm.weight)
    v = linear(x, attention.v_proj).view(-1, KV_HEADS, HEAD_DIM)
    mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, bounds, longest)
    h = h + linear(mixed.reshape(len(h), HEADS * HEAD_DIM), attention.o_proj)
    x = norm(h, layer.post_attention_layernorm.weight)
    return h + linear(F.silu(linear(x, mlp.gate_proj)) * linear(x, mlp.up_proj), mlp.down_proj)


def place_of(positions: Tensor, bounds: Tensor, longest: int) -> tuple[Any, ...]:
    """Rotary tables [T, 1, D/2] and the bounds of the chats."""
    steps = torch.arange(0, HEAD_DIM, 2, device=positions.device).float() / HEAD_DIM
    angle = positions.float()[:, None, None] * (THETA**-steps)
    return angle.cos(), angle.sin(), bounds, longest


def head_loss(h: Tensor, final: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy over the labelled tokens."""
    logits = F.linear(norm(h, final), embedding.to(h.dtype)).float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED)


class Step:
    """Forward pass and loss of a batch, compiled layer by layer on a GPU."""

    def __init__(self, model: Qwen3ForCausalLM, packing: Packing, *, compiled: bool):
        self.model, self.packing = model, packing
        self.block, self.head = block, head_loss
        if compiled:
            torch._dynamo.config.inline_inbuilt_nn_modules = True
            self.block = torch.compile(block, dynamic=False)
            self.head = torch.compile(head_loss, dynamic=False)

    def hidden(self, ids: Tensor, positions: Tensor, bounds: Tensor, dtype: torch.dtype) -> Tensor:
        """The residual stream after the last layer, [T, C]."""
        body = self.model.model
        place = place_of(positions, bounds, self.packing.length)
        h = F.embedding(ids, body.embed_tokens.weight).to(dtype)
        for layer in body.layers:
            h = self.block(h, layer, place)
        return h

    def loss(self, arrays: Arrays) -> Tensor:
        """Mean loss of the answers of a batch on the device."""
        dtype = torch.bfloat16 if arrays.ids.is_cuda else torch.float32
        h = self.hidden(arrays.ids, arrays.positions, arrays.bounds, dtype)
        body = self.model.model
        return self.head(h, body.norm.weight, body.embed_tokens.weight, arrays.labels)


@dataclass(frozen=True)
class Arrays:
    """A batch on the device."""

    ids: Tensor
    labels: Tensor
    positions: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, batch: Batch, device: str) -> Arrays:
        """Copies of the arrays of a batch."""
        sources = (batch.ids, batch.labels.astype("int64"), batch.positions, batch.bounds)
        return cls(*(torch.from_numpy(source).to(device) for source in sources))

    def fill(self, batch: Batch) -> None:
        """Overwrite these arrays with another batch."""
        sources = (batch.ids, batch.labels.astype("int64"), batch.positions, batch.bounds)
        targets = (self.ids, self.labels, self.positions, self.bounds)
        for target, source in zip(targets, sources, strict=True):
            tensor = torch.from_numpy(source)
            target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


class Update:
    """One optimizer step; on a GPU captured as one graph that is replayed."""

    def __init__(
        self, step: Step, optimizer: torch.optim.Optimizer, arrays: Arrays, *, captured: bool
    ):
        self.step, self.optimizer, self.arrays = step, optimizer, arrays
        self.graph: torch.cuda.CUDAGraph | None = None
        if not captured:
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.loss, self.length = self._run(clear=False)
        self.graph = graph

    def _run(self, *, clear: bool = True) -> tuple[Tensor, Tensor]:
        if clear:
            self.optimizer.zero_grad(set_to_none=True)
        loss = self.step.loss(self.arrays)
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(self.step.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach(), length.detach()

    def __call__(self, rate: float) -> tuple[Tensor, Tensor]:
        """Loss and gradient norm of the batch now in `arrays`, after the step."""
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graph is None:
            return self._run()
        self.graph.replay()
        return self.loss, self.length


def compare_with_transformers(
    model: Qwen3ForCausalLM, packing: Packing, batch: Batch, device: str
) -> float:
    """Largest relative difference of the hidden states to the transformers model, on two chats.

    Uses a copy with larger weights, in which attention matters more than after initialisation.
    """
    model = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.model.layers.parameters():
            weight.mul_(6.0 if weight.dim() == 2 else 1.0)
    step = Step(model, packing, compiled=False)
    ids, positions, bounds = (
        torch.from_numpy(array).to(device) for array in (batch.ids, batch.positions, batch.bounds)
    )
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    worst = 0.0
    with torch.no_grad():
        ours = step.hidden(ids, positions, bounds, dtype).float()
        for i in (0, 2):
            a, b = int(bounds[i]), int(bounds[i + 1])
            theirs = model.model(ids[None, a:b].long()).last_hidden_state[0].float()
            mine = norm(ours[a:b], model.model.norm.weight)
            worst = max(worst, float((mine - theirs).norm() / theirs.norm()))
    return worst


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """bf16 weights, configuration, and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).cpu().to(torch.bfloat16).save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    for name in ("rope_parameters", "dtype", "layer_types", "transformers_version"):
        config.pop(name, None)
    config |= {"rope_theta": THETA, "rope_scaling": None, "torch_dtype": "bfloat16"}
    config |= {"architectures": ["Qwen3ForCausalLM"], "use_cache": True}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    generation = {
        "do_sample": True,
        "eos_token_id": [2, 0],
        "pad_token_id": 0,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.95,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        if out.resolve() != TOKENIZER.resolve():
            shutil.copy(TOKENIZER / name, out / name)


def schedule(done: float, step: int, warmup: int) -> float:
    """Share of the peak rate: linear warmup by steps, then cosine to zero by the time budget."""
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def train(options: argparse.Namespace, log: dict[str, Any]) -> Qwen3ForCausalLM:
    """Train until the time is up; fills `log`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    packing = Packing(options.rows, options.length)
    pool = BatchPool(
        seed=options.seed, folder=str(TOKENIZER), packing=packing, workers=options.workers
    )
    model = new_model(options.seed).to(device)
    log["parameters"] = sum(weight.numel() for weight in model.parameters())
    step = Step(model, packing, compiled=device == "cuda")
    source = pool.batches()
    first = next(source)
    log["difference_to_transformers"] = compare_with_transformers(model, packing, first, device)
    print(f"difference to transformers {log['difference_to_transformers']:.2e}", flush=True)
    # Measured 6e-7 on a CPU in fp32.
    assert log["difference_to_transformers"] < (0.08 if device == "cuda" else 1e-4)
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    vectors = [weight for weight in model.parameters() if weight.dim() < 2]
    captured = device == "cuda" and not options.eager
    optimizer = torch.optim.AdamW(
        [
            {"params": group, "weight_decay": decay, "lr": torch.tensor(0.0, device=device)}
            for group, decay in ((matrices, options.weight_decay), (vectors, 0.0))
        ],
        betas=(0.9, 0.98),
        fused=device == "cuda",
        capturable=captured,
    )
    arrays = Arrays.of(first, device)
    update = Update(step, optimizer, arrays, captured=captured)
    if not captured:
        update(0.0)
    begin = time.monotonic()
    deadline = START + 60 * options.minutes
    log["seconds_before_training"] = round(begin - START, 1)
    print(f"ready after {begin - START:.0f} s", flush=True)
    curve: list[dict[str, float]] = []
    steps, tokens, waited = 0, 0, 0.0
    while (now := time.monotonic()) < deadline:
        rate = options.rate * schedule((now - begin) / (deadline - begin), steps, options.warmup)
        batch = next(source)
        waited += time.monotonic() - now
        arrays.fill(batch)
        loss, length = update(rate)
        steps, tokens = steps + 1, tokens + batch.used
        if steps % options.every == 0:
            seconds = time.monotonic() - begin
            entry = {
                "step": steps,
                "seconds": round(seconds, 1),
                "tokens": tokens,
                "loss": round(float(loss), 5),
                "gradient": round(float(length), 4),
                "rate": rate,
                "waited": round(waited, 1),
            }
            curve.append(entry)
            if steps % (5 * options.every) == 0:
                print(f"{entry} {tokens / seconds / 1e6:.2f} M tokens/s", flush=True)
    pool.stop()
    seconds = time.monotonic() - begin
    log |= {"steps": steps, "tokens": tokens, "seconds": round(seconds, 1), "curve": curve}
    log["tokens_per_second"] = round(tokens / seconds)
    log["seconds_waited_for_data"] = round(waited, 1)
    return model


def evaluate(folder: Path, count: int, seed: int, device: str) -> dict[str, Any]:
    """Greedy accuracy of the saved bf16 weights, per family, mode, and side of the split."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    right: dict[str, list[int]] = defaultdict(list)
    lengths: dict[str, list[int]] = defaultdict(list)
    failures: list[dict[str, Any]] = []
    groups = [heldout(count, seed=seed, thinking=mode) for mode in (False, True)]
    for examples in groups:
        prompts = [
            tokenizer.apply_chat_template(
                list(example.messages),
                tools=list(example.tools) or None,
                add_generation_prompt=True,
                enable_thinking=example.thinking,
                tokenize=False,
            )
            for example in examples
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            out = model.generate(
                input_ids=inputs.input_ids.to(device),
                attention_mask=inputs.attention_mask.to(device),
                max_new_tokens=360,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
            )
        new = out[:, inputs.input_ids.shape[1] :].cpu()
        for example, ids in zip(examples, new, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            good = check(example, text)
            mode = "thinking" if example.thinking else "direct"
            side = "new wording" if example.template in HELDOUT_TEMPLATES else "known wording"
            for key in (
                "all", mode, side, example.family, f"{example.family} / {mode}",
                f"{example.family} / {side}", f"{example.family} / {mode} / {side}",
            ):  # fmt: skip
                right[key].append(good)
            lengths[f"{example.family} / {mode}"].append(int((ids != 0).sum()))
            if not good:
                failures.append({
                    "template": example.template,
                    "thinking": example.thinking,
                    "prompt": example.messages[-1]["content"],
                    "text": text[-600:],
                    "reference": repr(example.reference)[:300],
                })  # fmt: skip
    return {
        "examples": sum(len(group) for group in groups),
        "accuracy": {key: round(sum(v) / len(v), 4) for key, v in sorted(right.items())},
        "answer_tokens": {key: round(sum(v) / len(v), 1) for key, v in sorted(lengths.items())},
        "failures": failures,
    }


def main() -> None:
    """Train, save, measure, write the log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=8.5, help="until training ends")
    parser.add_argument("--out", type=Path, default=ROOT / "strobe/demo_models/target")
    parser.add_argument("--log", type=Path, default=ROOT / "docs/demo_models/target_training.json")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=6e-3)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=500)
    parser.add_argument("--every", type=int, default=20, help="steps between loss readings")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--heldout", type=int, default=200, help="test tasks per family and mode")
    parser.add_argument("--eager", action="store_true", help="no graph capture on the GPU")
    parser.add_argument("--evaluate-only", action="store_true")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "log")}
    log: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
        "settings": settings,
    }  # fmt: skip
    options.log.parent.mkdir(parents=True, exist_ok=True)
    if not options.evaluate_only:
        model = train(options, log)
        save(model, options.out)
        options.log.write_text(json.dumps(log, indent=1) + "\n")
        print(f"saved after {time.monotonic() - START:.0f} s", flush=True)
    log["evaluation"] = result = evaluate(options.out, options.heldout, 0, device)
    options.log.write_text(json.dumps(log, indent=1) + "\n")
    shown: dict[str, int] = defaultdict(int)
    for failure in result["failures"]:
        kind = failure["template"].split("/")[0]
        shown[kind] += 1
        if shown[kind] <= 4:
            print(json.dumps(failure)[:900])
    for key, value in result["accuracy"].items():
        print(f"{value:7.4f}  {key}")
    summary = {k: v for k, v in log.items() if k not in ("curve", "evaluation")}
    print(json.dumps(summary), json.dumps(result["answer_tokens"]))
    print(f"done after {time.monotonic() - START:.0f} s")


if __name__ == "__main__":
    main()
