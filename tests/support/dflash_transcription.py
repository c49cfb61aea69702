"""DFlash once more, transcribed from the paper and the checkpoint format into plain torch.

It reads the checkpoint itself and shares nothing with the engine: no paging, no batching, no fused
kernels. A target is transformers' model; its features are taken with hooks on layer outputs.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """Give a config of the speculators library z-lab's keys; return others unchanged."""
    if "transformer_layer_config" not in config:
        return config
    config = {"rms_norm_eps": 1e-6, **config, **config["transformer_layer_config"]}
    config["target_layer_ids"] = [i - 1 for i in config["aux_hidden_state_layer_ids"]]
    if config.get("sliding_window_non_causal", True):
        config["is_causal"] = False
    return config


class Transcription:
    """One drafter with its target, for one sequence at a time."""

    def __init__(self, directory: Path, target: Any):
        self.config = flattened(json.loads((directory / "config.json").read_text()))
        self.nested = self.config.get("dflash_config", {})
        self.target = target
        shared = {
            "embed_tokens.weight": target.model.embed_tokens.weight,
            "lm_head.weight": target.lm_head.weight,
        }
        self.w: dict[str, Tensor] = {**shared, **load_file(directory / "model.safetensors")}
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.width, self.eps = self.config["head_dim"], self.config["rms_norm_eps"]
        self.layers = range(self.config["num_hidden_layers"])
        self.block: int = self.value("block_size")
        self.swa: bool = self.value("use_swa", False)
        sinks = ("attention_sink_bias", "add_swa_attention_sink_bias")
        self.sinks = any(self.value(key, False) for key in sinks)
        is_deepspec = self.config["architectures"] == ["Qwen3DSparkModel"]
        self.anchor_first = self.value("sample_from_anchor", is_deepspec)

    def value(self, key: str, default: Any = None) -> Any:
        return self.nested.get(key, self.config.get(key, default))

    @torch.no_grad()
    def run_target(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Return (logits [T, V], features [T, n * H], the outputs of the listed 0-based layers)."""
        out: dict[int, Tensor] = {}

        def keep(index: int) -> Any:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                out[index] = (output if torch.is_tensor(output) else output[0])[0]

            return hook

        layers = self.target.model.layers
        hooks = [layer.register_forward_hook(keep(i)) for i, layer in enumerate(layers)]
        logits = self.target(torch.tensor([tokens])).logits[0]
        for hook in hooks:
            hook.remove()
        return logits, torch.cat([out[i] for i in self.value("target_layer_ids")], -1)

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [T, heads, D] by position, pairs as complex numbers; values outside of pairs are
        kept. A pair is (i, i + W / 2) of the W rotated values, or two neighbours. The real parts of
        all pairs come first, as scores do not depend on the order."""
        rope = self.config.get("rope_parameters") or self.config
        mimo = self.swa or self.sinks
        width = int(self.width * self.value("partial_rotary_factor", 1.0) if mimo else self.width)
        speed = torch.tensor([rope["rope_theta"] ** (-2 * i / width) for i in range(width // 2)])
        size = 1.0
        if rope.get("rope_type", "default") != "default":
            names = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
            fields = {name: self.config[name] for name in names}
            parameters = {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
            config = Qwen3Config(**fields, rope_parameters=parameters)
            speed, size = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        angle = positions[:, None].double() * speed.double()
        turn = torch.polar(torch.full_like(angle, size), angle)[:, None]
        head, still = x[..., :width].double(), x[..., width:].double()
        neighbours = not self.value("is_neox_style", True)
        pairs = (head[..., ::2], head[..., 1::2]) if neighbours else head.chunk(2, -1)
        z = torch.cat([torch.complex(*pairs) * turn, torch.complex(*still.chunk(2, -1))], -1)
        return torch.cat([z.real, z.imag], -1).float()

    def keys_values(self, layer: int, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Project x [T, H] to keys and values [T, Hkv, D]."""
        name = f"layers.{layer}.self_attn"
        k = self.linear(x, f"{name}.k_proj").view(-1, self.kv_heads, self.width)
        v = self.linear(x, f"{name}.v_proj").view(-1, self.kv_heads, self.width)
        v = v * self.value("attention_value_scale", 1.0)
        return self.rotated(rms(k, self.w[f"{name}.k_norm.weight"], self.eps), positions), v

    def context(self, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return every layer's context keys and values from features [T, n * H] of positions
        0..T-1."""
        c = rms(features @ self.w["fc.weight"].T, self.w["hidden_norm.weight"], self.eps)
        positions = torch.arange(len(features))
        return [self.keys_values(layer, c, positions) for layer in self.layers]

    def visible(self, layer: int, start: int, count: int) -> Tensor:
        """Return which positions each slot of the block attends to, [count, start + count]."""
        types = self.config.get("layer_types") or ["full_attention"] * len(self.layers)
        sliding = self.swa or types[layer] == "sliding_attention"
        causal = self.config.get("is_causal", self.nested.get("causal", sliding and not self.swa))
        p = torch.arange(start, start + count)[:, None]
        j = torch.arange(start + count)[None]
        seen = j <= p if causal else torch.ones(count, start + count, dtype=torch.bool)
        window = self.value("swa_window_size" if self.swa else "sliding_window")
        return seen & ((p - j).abs() < window) if sliding else seen

    def convolved(self, name: str, side: int, x: Tensor, normed: Tensor) -> Tensor:
        """Return the block's rows x [count, H] after one of the sub-layer's two convolutions, whose
        kernels read its normed input; x if the layers have none."""
        if f"{name}.base_kernel" not in self.w:
            return x
        base = self.w[f"{name}.base_kernel"][side]
        kernels = self.linear(normed, f"{name}.kernel_projection").view(len(x), 2, len(base), -1)
        group = x.shape[1] // kernels.shape[3]
        y = torch.zeros_like(x)
        for row in range(len(x)):
            for tap in range(min(row + 1, len(base))):
                weights = base[tap] + kernels[row, side, tap].repeat_interleave(group)
                y[row] += weights * x[row - tap]
        return y

    @torch.no_grad()
    def draft_logits(self, tail: int, features: Tensor, count: int) -> Tensor:
        """Return logits [count - 1, V] of the positions after `tail`, with `features` as its
        context; [count, V] if the first slot predicts, too. Tokens that a reduced head lacks get
        -inf."""
        return self.spread(self.finished(self.raw(self.block_rows(tail, features, count))))

    def raw(self, rows: Tensor) -> Tensor:
        return rows @ self.w["lm_head.weight"].T

    def finished(self, raw: Tensor) -> Tensor:
        """Outputs of the head -> logits."""
        scale = self.value("logit_scale", 1.0) * self.value("output_multiplier", 1.0)
        cap = self.value("final_logit_softcapping")
        return cap * torch.tanh(raw * scale / cap) if cap else raw * scale

    def spread(self, logits: Tensor) -> Tensor:
        """Logits of the head's rows -> of all tokens."""
        if "d2t" not in self.w:
            return logits
        full = torch.full((len(logits), self.config["vocab_size"]), -math.inf)
        full[:, torch.arange(len(self.w["d2t"])) + self.w["d2t"]] = logits
        return full

    def drafts(self, tail: int, features: Tensor, count: int) -> list[int]:
        """Return the greedy drafts after `tail` of a block of `count` rows."""
        every = self.every_row(tail, features, count)
        rows = self.drafting(every)
        if "candidate_selector.hidden_projection.weight" in self.w:
            return self.selected(rows, tail)
        if "markov_head.markov_w1.weight" in self.w:
            return self.corrected(every, tail)[0]
        return self.spread(self.finished(self.raw(rows))).argmax(-1).tolist()

    def selected(self, rows: Tensor, tail: int) -> list[int]:
        """DFlash2's walk, one edge at a time."""
        part = "candidate_selector"
        named = {name.removesuffix(".weight"): tensor for name, tensor in self.w.items()}
        before = named[f"{part}.predecessor_codebook"]
        after = named[f"{part}.successor_codebook"]
        factors = self.linear(rows, f"{part}.hidden_projection")
        drafts = [tail]
        for row, factor in zip(self.raw(rows), factors, strict=True):
            best = row.sort(descending=True).indices[: self.value("selector_top_k")].tolist()
            scores = self.finished(row)
            edges = [float((before[drafts[-1]] * factor * after[token]).sum()) for token in best]
            sums = [float(scores[t]) + edge for t, edge in zip(best, edges, strict=True)]
            drafts.append(best[sums.index(max(sums))])
        return drafts[1:]

    def corrected(self, every: Tensor, tail: int) -> tuple[list[int], list[float]]:
        """DSpark's drafts, and the confidence head's probabilities of them, from all rows of a
        block. The recurrent state begins at the first, also where that drafts nothing."""
        first = self.w["markov_head.markov_w1.weight"]
        second = self.w["markov_head.markov_w2.weight"]
        state = torch.zeros(first.shape[1])
        count = self.value("dspark_draft_topk")
        drafts = [tail]
        probabilities = list[float]()
        skipped = len(every) - len(self.drafting(every))
        for row, (h, raw) in enumerate(zip(every, self.raw(every), strict=True)):
            e = first[drafts[-1]]
            x = torch.cat([h, e])
            if self.value("markov_head_type") == "gated":
                e = self.linear(x, "markov_head.gate_proj").sigmoid() * e
            elif self.value("markov_head_type") == "rnn":
                joint = self.linear(torch.cat([state, e, h]), "markov_head.joint_proj")
                gate, new, out = joint.view(3, -1)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh()
                e = out.tanh()
            if row < skipped:
                continue
            probabilities.append(float(self.linear(x, "confidence_head.proj").sigmoid()))
            logits = self.finished(raw + second @ e)
            if count:
                keep = raw.sort(descending=True).indices[:count]
                masked = torch.full_like(logits, -math.inf)
                masked[keep] = logits[keep]
                logits = masked
            drafts.append(int(self.spread(logits[None])[0].argmax()))
        return drafts[1:], probabilities

    def block_rows(self, tail: int, features: Tensor, count: int) -> Tensor:
        """Return the rows that predict, as the head reads them [count or count - 1, H]."""
        return self.drafting(self.every_row(tail, features, count))

    def drafting(self, every: Tensor) -> Tensor:
        """All rows of a block -> those that predict."""
        return every if self.anchor_first else every[1:]

    @torch.no_grad()
    def every_row(self, tail: int, features: Tensor, count: int) -> Tensor:
        """Return all rows of a block, as the head reads them [count, H]."""
        start = len(features)
        context = self.context(features)
        ids = torch.tensor([tail] + [self.value("mask_token_id")] * (count - 1))
        x = self.w["embed_tokens.weight"][ids] * self.value("input_embedding_scale", 1.0)
        positions = torch.arange(start, start + count)
        group = self.heads // self.kv_heads
        for layer in self.layers:
            name = f"layers.{layer}"
            normed = rms(x, self.w[f"{name}.input_layernorm.weight"], self.eps)
            h = self.convolved(f"{name}.attention_conv", 0, normed, normed)
            q = self.linear(h, f"{name}.self_attn.q_proj").view(count, self.heads, self.width)
            q = rms(q, self.w[f"{name}.self_attn.q_norm.weight"], self.eps)
            q = self.rotated(q, positions)
            k, v = self.keys_values(layer, h, positions)
            k = torch.cat([context[layer][0], k]).repeat_interleave(group, 1)
            v = torch.cat([context[layer][1], v]).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.width)
            scores[:, ~self.visible(layer, start, count)] = -math.inf
            weights = scores.exp()
            total = weights.sum(-1, keepdim=True)
            if self.sinks:
                total = total + self.w[f"{name}.self_attn.attention_sink_bias"].exp()[:, None, None]
            mixed = torch.einsum("hqk,khd->qhd", weights / total, v).reshape(count, -1)
            out = self.linear(mixed, f"{name}.self_attn.o_proj")
            x = x + self.convolved(f"{name}.attention_conv", 1, out, normed)
            normed = rms(x, self.w[f"{name}.post_attention_layernorm.weight"], self.eps)
            m = self.convolved(f"{name}.mlp_conv", 0, normed, normed)
            gate = self.linear(m, f"{name}.mlp.gate_proj")
            up = self.linear(m, f"{name}.mlp.up_proj")
            out = self.linear(gate * torch.sigmoid(gate) * up, f"{name}.mlp.down_proj")
            x = x + self.convolved(f"{name}.mlp_conv", 1, out, normed)
        return rms(x, self.w["norm.weight"], self.eps)

    def generate(self, prompt: list[int], max_length: int) -> list[list[int]]:
        """Run the greedy reference loop; return the tokens of the prefill and of each block."""
        tokens = list(prompt)
        logits, features = self.run_target(tokens)
        tokens.append(int(logits[-1].argmax()))
        produced = [tokens[-1:]]
        while len(tokens) < max_length:
            start = len(tokens) - 1
            count = min(self.block, max_length - start)
            drafts: list[int] = []
            if count > 1:
                logits = self.draft_logits(tokens[-1], features[:start], count)
                drafts = logits.argmax(-1).tolist()
            logits, features = self.run_target(tokens + drafts)
            sampled = logits[start:].argmax(-1).tolist()
            accepted = 0
            while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
                accepted += 1
            produced.append(sampled[: accepted + 1][: max_length - len(tokens)])
            tokens += produced[-1]
        return produced
