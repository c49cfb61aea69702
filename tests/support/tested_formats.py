"""The formats of weights that tests run, and where: tests are parametrized with these names, and
docs/checkpoints.md has a table of them."""

from __future__ import annotations

from dataclasses import dataclass

DRAFTERS = (
    "FP8", "FP8 with one scale", "FP8 by blocks", "native FP8", "Ministral's FP8", "int8",
    "NVFP4", "MXFP4", "MXFP8", "int4", "int4 with zeros", "GPTQ", "GPTQ by activations",
    "AutoRound", "AWQ",
)  # fmt: skip
"""Formats of `stored_weights` in which a target and its drafter run on a CPU."""
WITH_RANKS = tuple(name for name in DRAFTERS if name != "GPTQ by activations")
"""Those that several ranks share."""
EXPERTS = ("FP8", "NVFP4", "int4", "GPTQ", "AutoRound", "AWQ", "MXFP4")
"""Those in which experts are kept as stored."""
GPU_FORMATS = ("FP8", "NVFP4", "int4", "GPTQ", "GPTQ by activations", "AutoRound", "AWQ")
"""Those in which a target and its drafter run on a GPU."""
GPU_EXPERTS = ("FP8", "NVFP4", "int4", "GPTQ", "AWQ", "MXFP4")
"""Those in which experts of a target run on a GPU."""
STORED_FAMILIES = ("gpt_oss in MXFP4", "experts in FP8")
"""Tiny targets of `target_families` whose experts are stored in a family's own format: they run on
a CPU, on several ranks and on a GPU."""
IN_KERNELS = (
    "int4", "int4 of 128", "int4 with zeros", "int4 with scales in float16",
    "int4 by activations", "int8 with zeros", "NVFP4", "NVFP4 with a divisor", "MXFP4",
    "FP8 by rows", "FP8 by blocks", "FP8 with one scale", "int8 by rows",
)  # fmt: skip
"""Forms of a weight that the kernels of products multiply, on a GPU or in Triton's interpreter."""

GGUF_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS",
    "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
"""Types of tensors in which a target's and a drafter's GGUF files run on a CPU and on several
ranks."""
GGUF_EXPERTS = ("Q8_0", "MXFP4")
"""Those in which gpt-oss's experts run."""


@dataclass(frozen=True)
class TestedFormat:
    """recorded: checkpoints of tests/recorded, which the library that owns the format wrote.
    written: formats of `stored_weights`. families: names in STORED_FAMILIES. kernels: the forms in
    IN_KERNELS. gguf: types in GGUF_TYPES."""

    recorded: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    gguf: tuple[str, ...] = ()


FORMATS = {
    "FP8 with one scale": TestedFormat(
        recorded=("compressed-tensors-fp8-static", "modelopt-fp8"),
        written=("FP8 with one scale",),
        kernels=("FP8 with one scale",),
    ),
    "FP8 with a scale per row": TestedFormat(
        recorded=("compressed-tensors-fp8-dynamic",),
        written=("FP8",),
        kernels=("FP8 by rows",),
    ),
    "FP8 by blocks, compressed-tensors'": TestedFormat(
        recorded=("compressed-tensors-fp8-block",),
        written=("FP8 by blocks",),
        kernels=("FP8 by blocks",),
    ),
    "FP8 by blocks, Qwen's and DeepSeek's": TestedFormat(
        written=("native FP8",),
        families=("experts in FP8",),
        kernels=("FP8 by blocks",),
    ),
    "FP8 with one scale, Ministral 3's": TestedFormat(
        written=("Ministral's FP8",),
        kernels=("FP8 with one scale",),
    ),
    "MXFP8": TestedFormat(
        recorded=("compressed-tensors-mxfp8",),
        written=("MXFP8",),
    ),
    "NVFP4": TestedFormat(
        recorded=(
            "compressed-tensors-nvfp4",
            "compressed-tensors-nvfp4-head",
            "llmcompressor-nvfp4a16",
            "modelopt-nvfp4",
        ),
        written=("NVFP4",),
        kernels=("NVFP4", "NVFP4 with a divisor"),
    ),
    "FP8 and NVFP4 in one checkpoint": TestedFormat(
        recorded=("compressed-tensors-mixed",),
    ),
    "MXFP4": TestedFormat(
        recorded=("compressed-tensors-mxfp4",),
        written=("MXFP4",),
        kernels=("MXFP4",),
    ),
    "MXFP4 of gpt-oss's experts": TestedFormat(
        families=("gpt_oss in MXFP4",),
    ),
    "int8 with a scale per row": TestedFormat(
        recorded=("compressed-tensors-int8",),
        written=("int8",),
        kernels=("int8 by rows",),
    ),
    "int8, packed": TestedFormat(
        recorded=("compressed-tensors-int8-packed",),
        kernels=("int8 with zeros",),
    ),
    "int4, symmetric": TestedFormat(
        recorded=("compressed-tensors-int4-g32", "compressed-tensors-int4-g128"),
        written=("int4",),
        kernels=("int4", "int4 of 128"),
    ),
    "int4 with zeros": TestedFormat(
        recorded=(
            "compressed-tensors-int4-g32-asymmetric",
            "llmcompressor-w4a16-asymmetric",
        ),
        written=("int4 with zeros",),
        kernels=("int4 with zeros",),
    ),
    "GPTQ": TestedFormat(
        recorded=("autoround-gptq",),
        written=("GPTQ",),
        kernels=("int4 with scales in float16",),
    ),
    "GPTQ by activations (`desc_act`)": TestedFormat(
        written=("GPTQ by activations",),
        kernels=("int4 by activations",),
    ),
    "AutoRound": TestedFormat(
        recorded=("autoround-auto-round-asymmetric", "autoround-auto-round-int8"),
        written=("AutoRound",),
        kernels=("int4", "int8 with zeros"),
    ),
    "AWQ": TestedFormat(
        recorded=("autoawq-gemm", "autoround-awq"),
        written=("AWQ",),
        kernels=("int4 with scales in float16",),
    ),
    "GGUF: F32, F16, BF16": TestedFormat(gguf=("F32", "F16", "BF16")),
    "GGUF: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1": TestedFormat(
        gguf=("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    ),
    "GGUF: Q2_K to Q6_K": TestedFormat(gguf=("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")),
    "GGUF: IQ1 to IQ4": TestedFormat(
        gguf=(
            "IQ1_S",
            "IQ1_M",
            "IQ2_XXS",
            "IQ2_XS",
            "IQ2_S",
            "IQ3_XXS",
            "IQ3_S",
            "IQ4_NL",
            "IQ4_XS",
        ),
    ),
    "GGUF: TQ1_0, TQ2_0": TestedFormat(gguf=("TQ1_0", "TQ2_0")),
    "GGUF: MXFP4": TestedFormat(gguf=("MXFP4",)),
    "GGUF: NVFP4": TestedFormat(gguf=("NVFP4",)),
}
"""Rows of the table."""
RECORDED = sorted(name for row in FORMATS.values() for name in row.recorded)
LIBRARIES = {
    "autoawq": "AutoAWQ",
    "autoround": "AutoRound",
    "compressed-tensors": "compressed-tensors",
    "llmcompressor": "llm-compressor",
    "modelopt": "ModelOpt",
}
"""Libraries by the beginning of the names of what they recorded."""
