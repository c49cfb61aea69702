"""Record tiny checkpoints that AutoRound, AutoAWQ, llm-compressor and ModelOpt write, with the
logits of the library's own dequantized weights in float32, as the files of tests/recorded.

    pip install auto-round==0.16.1 transformers; python -m scripts.record_quantizers autoround
    pip install autoawq==0.2.9 datasets transformers; python -m scripts.record_quantizers autoawq
    pip install llmcompressor==0.14.0.1; python -m scripts.record_quantizers llmcompressor
    pip install nvidia-modelopt==0.47.0 transformers; python -m scripts.record_quantizers modelopt

Each library needs an environment of its own. AutoRound also writes GPTQ's and AWQ's layouts.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.recorded_models import (
    IDS,
    SHAPE,
    TARGET,
    logits_of,
    make_model,
    write_config,
    write_expected,
)

AUTOROUND = {
    "gptq": {"format": "auto_gptq", "sym": True},
    "auto-round-asymmetric": {"format": "auto_round", "sym": False},
    "awq": {"format": "auto_awq", "sym": False},
    "auto-round-int8": {"format": "auto_round", "sym": True, "bits": 8},
}
"""Formats and settings by the names of the directories."""
MODELOPT = {"fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG"}
"""ModelOpt's settings by the names of the directories."""


def save(name: str, source: Path, logits: torch.Tensor) -> None:
    """Save a written checkpoint under tests/recorded with what describes its weights."""
    directory = TARGET / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    files = sorted(source.rglob("*.safetensors"))
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((files[0].parent / "config.json").read_text(encoding="utf-8"))
    further = {"quantization_config": config["quantization_config"]}
    write_config(directory, make_model(), **further)
    description = files[0].parent / "hf_quant_config.json"
    if description.exists():
        shutil.copy(description, directory)
    write_expected(directory, logits)


def record_autoround() -> None:
    from auto_round import AutoRound
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(SHAPE["vocab_size"])}
    tokens = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens)

    def rounded(model: Any, sym: bool, bits: int) -> Any:
        return AutoRound(
            model,
            tokenizer,
            bits=bits,
            group_size=32,
            sym=sym,
            iters=0,  # rounded to the nearest, which needs no texts
            disable_opt_rtn=True,
            device_map="cpu",
            amp=False,
        )

    for name, options in AUTOROUND.items():
        settings = {"bits": 4, **options}
        kind = settings.pop("format")
        model = make_model()
        rounded(model, **settings).quantize()
        with tempfile.TemporaryDirectory() as directory:
            rounded(make_model(), **settings).quantize_and_save(directory, format=kind)
            save(f"autoround-{name}", Path(directory), logits_of(model))
        print(name)


def record_autoawq() -> None:
    """Round to the nearest with the library's own quantizer and layers."""
    from awq.models._config import AwqConfig
    from awq.modules.linear import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    config = AwqConfig(q_group_size=32, w_bit=4, zero_point=True, version="GEMM")
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.w_bit = config.w_bit
    quantizer.group_size = config.q_group_size
    quantizer.zero_point = config.zero_point
    model = make_model()
    tensors = dict(model.state_dict())
    for name, linear in list(model.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
            continue
        values, scales, zeros = quantizer.pseudo_quantize_tensor(linear.weight.data)
        linear.weight.data = values
        packed = WQLinear_GEMM.from_linear(
            linear,
            w_bit=config.w_bit,
            group_size=config.q_group_size,
            scales=scales.t().contiguous(),
            zeros=zeros.t().contiguous(),
        )
        del tensors[f"{name}.weight"]
        stored = {leaf: getattr(packed, leaf) for leaf in ("qweight", "qzeros", "scales")}
        tensors |= {f"{name}.{leaf}": value.contiguous() for leaf, value in stored.items()}
        weight = dequantize_gemm(
            packed.qweight,
            packed.qzeros,
            packed.scales.float(),  # else products are rounded to float16
            bits=config.w_bit,
            group_size=config.q_group_size,
        )
        linear.weight.data = weight.t()
    with tempfile.TemporaryDirectory() as directory:
        save_file(tensors, Path(directory) / "model.safetensors")
        text = json.dumps({"quantization_config": config.to_transformers_dict()})
        (Path(directory) / "config.json").write_text(text, encoding="utf-8")
        save("autoawq-gemm", Path(directory), logits_of(model))


def record_llmcompressor() -> None:
    """Record schemes without quantized activations, whose logits are those of the weights."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    int4 = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=32, symmetric=False
    )
    schemes: dict[str, dict[str, Any]] = {
        "w4a16-asymmetric": {
            "config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=int4)}
        },
        "nvfp4a16": {"targets": "Linear", "scheme": "NVFP4A16"},
    }
    for name, scheme in schemes.items():
        with tempfile.TemporaryDirectory() as root:
            make_model().save_pretrained(f"{root}/plain")  # the library looks for its files
            model = AutoModelForCausalLM.from_pretrained(f"{root}/plain", dtype=torch.float32)
            oneshot(model=model, recipe=QuantizationModifier(ignore=["lm_head"], **scheme))
            logits = logits_of(model)
            model.save_pretrained(f"{root}/quantized", save_compressed=True)
            save(f"llmcompressor-{name}", Path(root) / "quantized", logits)
        print(name)


def record_modelopt() -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    for name, settings in MODELOPT.items():
        model = make_model()
        settings = copy.deepcopy(getattr(mtq, settings))
        mtq.quantize(model, settings, lambda model: model(IDS))
        with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
            export_hf_checkpoint(model, export_dir=directory)
            tensors = load_file(Path(directory) / "model.safetensors")
            plain = make_model()
            plain.load_state_dict(dequantized(tensors))
            save(f"modelopt-{name}", Path(directory), logits_of(plain))
        print(name)


def dequantized(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return an exported checkpoint's weights as ModelOpt reads them."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    values: dict[str, torch.Tensor] = {}
    for name, stored in tensors.items():
        if name.endswith(("scale", "scale_2")):
            continue
        scale = tensors.get(f"{name}_scale")
        if scale is None:
            values[name] = stored.float()
        elif stored.dtype == torch.uint8:
            shape = torch.Size((stored.shape[0], 2 * stored.shape[1]))
            packed = NVFP4QTensor(shape, torch.float32, stored)
            values[name] = packed.dequantize(
                scale=scale, double_scale=tensors[f"{name}_scale_2"], block_sizes={-1: 16}
            )
        else:
            packed = FP8QTensor(stored.shape, torch.float32, stored)
            values[name] = packed.dequantize(scale=scale)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    recorders = {
        "autoawq": record_autoawq,
        "autoround": record_autoround,
        "llmcompressor": record_llmcompressor,
        "modelopt": record_modelopt,
    }
    parser.add_argument("library", choices=recorders)
    recorders[parser.parse_args().library]()


if __name__ == "__main__":
    main()
