"""Compile kernels for a GPU that need not be there.

    python -m tests.support.compile_kernels CAPABILITY SHARED

SHARED is the bytes of shared memory that a program may use, such as 101376 for capability 89.

Prints a line of JSON for each compiled kernel: its name and its bytes of shared memory. Wrappers
run as they are, on CPU tensors whose contents nobody reads; instead of launching a kernel, they
only compile it, as Triton's `warmup` does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from scripts.tuning import Target

Call = Callable[[], object]
CPU = torch.device("cpu")


def compile_instead() -> None:
    """Let launches only compile and print."""
    run, seen = JITFunction.run, set[str]()

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            print(json.dumps({"kernel": self.__name__, "shared": kernel.metadata.shared}))
        return kernel

    JITFunction.run = compiled  # type: ignore[method-assign]


def attention(capability: int, shared: int) -> Iterator[Call]:
    """Every configuration that a GPU with so much shared memory chooses; on 8.9 in all dtypes."""
    from strobe.attention.mask import LayerMask
    from strobe.kernels.attention import AttentionWorkspace, paged_attention
    from strobe.kernels.attention_table import CONFIGS

    workspace, spans = AttentionWorkspace(CPU, 512, 132), torch.zeros(2, dtype=torch.int64)
    workspace.shared_memory = shared
    kinds = {4: (torch.float32, torch.float32), 2: (torch.bfloat16, torch.bfloat16)}
    kinds[1] = torch.bfloat16, torch.float8_e4m3fn
    for dim, pairs, item in CONFIGS:
        if item != 2 and capability != 89:  # below 8.9 there is no FP8
            continue
        dtype, kv_dtype = kinds[item]
        yield partial(
            paged_attention,
            torch.empty(2 * pairs // 4, 8, dim, dtype=dtype),
            torch.zeros(64, 2, 2, dim).to(kv_dtype),
            starts=spans,
            sizes=spans + pairs // 4,
            row_starts=spans,
            tables=torch.zeros(2, 128, dtype=torch.int64),
            table_rows=spans,
            page_size=16,
            mask=LayerMask(True, None),
            longest=pairs // 4,
            workspace=workspace,
        )


def gemms(capability: int, shared: int) -> Iterator[Call]:
    """Guesses for each fusion and bucket; on 8.9 in all dtypes."""
    from strobe.kernels.gemm_table import BUCKETS, GemmTable, Weight
    from strobe.kernels.linear import Gemms
    from strobe.kernels.operands import Epilogue, Input, RowNorm

    for dtype in (torch.bfloat16, torch.float32)[: 1 + (capability == 89)]:
        table = GemmTable({})
        table.shared_memory = shared
        layers, gain = Gemms(CPU, dtype, table=table), torch.ones(1024, dtype=dtype)
        weights = [Weight(torch.empty(rows, 1024, dtype=dtype)) for rows in (1024, 1536, 4096)]
        add, qkv, wide = weights
        for rows in BUCKETS:
            x = torch.empty(rows, 1024, dtype=dtype)
            normed = Input(x, RowNorm(gain, 1e-6))
            yield partial(layers.linear, normed, qkv)
            yield partial(layers.linear, Input(x), wide, Epilogue(activation="silu"))
            stream = Epilogue(residual=x.clone(), next_norm=gain)
            yield partial(layers.add, Input(x), add, stream)
            yield partial(layers.head_argmax, normed, wide)


def grouped(_: int, shared: int) -> Iterator[Call]:
    """Experts in bfloat16, packed and in codes, in each bucket."""
    from strobe.kernels.coded import CodedExperts, Codes
    from strobe.kernels.experts import KernelExperts, PackedWeight, Projection, experts
    from strobe.kernels.experts_table import BUCKETS, guess
    from strobe.kernels.gemm_table import Weight
    from strobe.kernels.reference_experts import Gate, Routing

    def weight(kind: str, n: int, k: int) -> Any:
        if kind == "e2m1":
            words = torch.zeros(8, k // 128, n, dtype=torch.int32)
            return PackedWeight(torch.empty(8, n, k // 2, dtype=torch.uint8), words, k, 32)
        if kind == "e4m3":
            scale = torch.ones(8, k // 128, n)
            return PackedWeight(torch.empty(8, n, k, dtype=torch.uint8), scale, k, 128)
        if kind == "int4":
            codes = torch.empty(8 * n, k // 2, dtype=torch.uint8)
            scale = torch.empty(8 * n, k // 32, dtype=torch.bfloat16)
            zero = torch.empty(8 * n, k // 32, dtype=torch.uint8)
            return CodedExperts(Codes(kind, codes, scale, k, 32, zero=zero), 8)
        if kind == "NVFP4":
            codes = torch.empty(8 * n, k // 2, dtype=torch.uint8)
            scale = torch.empty(8 * n, k // 16, dtype=torch.uint8)
            return CodedExperts(Codes("e2m1", codes, scale, k, 16, factor=torch.empty(16)), 8)
        return Weight(torch.empty(8, n, k, dtype=torch.bfloat16))

    for kind in ("", "e2m1", "e4m3", "int4", "NVFP4"):
        up, down = weight(kind, 1024, 256), weight(kind, 256, 512)
        for bucket in BUCKETS:
            x = torch.empty(bucket, 256, dtype=torch.bfloat16)
            config = guess(bucket, tuple(up.shape), x.dtype, getattr(up, "kind", ""), shared)
            routing = Routing(2, shared=not kind)
            layer = KernelExperts(routing, Projection(up), Projection(down), Gate("silu"))
            logits = torch.empty(bucket, 8)
            yield partial(experts, x, logits, layer, torch.empty_like(x), config=config)


def coded(capability: int, shared: int) -> Iterator[Call]:
    """Products with weights in codes, by the rows of x; on 8.9 in all dtypes."""
    from strobe.kernels import coded
    from strobe.kernels.operands import Epilogue
    from strobe.kernels.workspace import Workspace

    coded.shared_memory = lambda device: shared  # pyright: ignore[reportAttributeAccessIssue]
    codes = torch.zeros(512, 512, dtype=torch.uint8)
    scale = torch.ones(512, 32, dtype=torch.bfloat16)
    forms = [
        coded.Codes("int4", codes, scale, inputs=1024, group=32, middle=8),
        coded.Codes("int4", codes, scale[:, :8].clone(), inputs=1024, group=128, middle=8),
        coded.Codes("e2m1", codes, codes[:, :64].clone(), inputs=1024, group=16),
        coded.Codes("e4m3", codes, torch.ones(4, 4), inputs=512, group=128, rows=128),
    ]
    for dtype in (torch.bfloat16, torch.float32)[: 1 + (capability == 89)]:
        for form in forms:
            weight = coded.CodedWeight((form,))
            for rows in (8, 16, 32, 64, 128):
                x = torch.empty(rows, form.inputs, dtype=dtype)
                gate = Epilogue(activation="silu")
                yield partial(coded.coded_gemm, x, weight, gate, Workspace(CPU))
            yield partial(coded.dequantized, form, dtype)


def others(*_: int) -> Iterator[Call]:
    """Gates, recurrent layers, sampling, norms and rope, and exchanges between ranks."""
    from strobe.kernels import gates, recurrent, rowwise, sampling
    from strobe.kernels.operands import RowNorm
    from strobe.kernels.ranks import RankMemory
    from strobe.kernels.reference_recurrent import DeltaInput, DeltaSpans
    from strobe.kernels.step_bookkeeping import cover, gather_rows
    from strobe.models.model_config import StateSpec
    from tests.support.reference_sampling import params

    wide = torch.empty(8, 4096, dtype=torch.bfloat16)
    few, rows = torch.zeros(8), torch.zeros(8, dtype=torch.int64)
    yield partial(gates.gate, wide, wide)
    yield partial(gates.add_norm, wide, wide.clone(), wide[0], 1e-6, None)
    yield partial(gates.softcapped, wide, 30.0)
    norm = SimpleNamespace(weight=wide[0], eps=1e-6)
    yield partial(gates.add_norm_twice, wide, wide, norm, norm)
    yield partial(gates.add_norms, wide, wide, wide, (norm,) * 3, wide[0, :1])
    spec = StateSpec(1, 32, 16, 128, 128, 4)
    stored = [
        torch.zeros(2, 32, 128, 128),
        torch.zeros(2, 19, spec.channels, dtype=torch.bfloat16),
        torch.zeros(2, 16, 2, 32),
        torch.zeros(2, 16, 16, 128),
        torch.zeros(2, 16, 32, 128),
    ]
    spans = DeltaSpans(*(torch.zeros(1, dtype=torch.int64) for _ in range(5)))
    projected = torch.empty(16, spec.channels + 4096 + 64, dtype=torch.bfloat16)
    parts = projected.split([spec.channels, 4096, 64], 1)
    conv = torch.empty(spec.channels, 4, dtype=torch.bfloat16)
    layer = DeltaInput(*parts, conv, wide[0, :32], wide[0, :32], wide[0, :128], 1e-6)
    for longest in (1, 16, 64):
        yield partial(recurrent.mix, layer, spans, stored, longest, spec)
    yield partial(cover, SimpleNamespace(slots=rows, starts=rows, sizes=rows), rows, 16)
    logits = torch.empty(8, 151936)
    yield partial(sampling.argmax, logits)
    yield partial(sampling.argmax, logits, torch.empty(8))
    yield partial(sampling.sample_rows, logits, params(8))
    yield partial(gather_rows, wide, rows)
    yield partial(rowwise.rms_norm, wide, wide[0], 1e-6)
    yield partial(rowwise.silu_mul, wide)
    memory = RankMemory(0, rows[:4], rows)
    yield partial(memory.add, wide, wide.clone(), next_norm=RowNorm(wide[0], 1e-6))
    yield partial(memory.sum, wide.repeat(64, 1))  # by their owners
    yield partial(memory.swap, logits)
    yield partial(memory.embed, rows, wide, 0)
    yield partial(memory.best, few, rows, few, 0)
    angles, gain = torch.empty(64, 128), wide[0, :128]
    yield partial(
        rowwise.qk_norm_rope_store, wide, gain, gain, 1e-6, angles, angles, rows, rows,
        torch.empty(64, 2, 8, 128, dtype=torch.bfloat16), 16, 8,
    )  # fmt: skip


def main() -> int:
    capability, shared = int(sys.argv[1]), int(sys.argv[2])
    triton.runtime.driver.set_active(Target(GPUTarget("cuda", capability, 32)))  # type: ignore[arg-type]
    compile_instead()
    failed = 0
    for group in (attention, gemms, grouped, coded, others):
        for call in group(capability, shared):
            try:
                call()
            except Exception as error:
                failed += 1
                print(group.__name__, type(error).__name__, str(error)[-600:], file=sys.stderr)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
