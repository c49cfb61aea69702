"""`strobe info CONFIG.json` says what a lone config describes and whether it loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafter_configs import QWEN3_8B_DFLASH
from tests.support.published_configs import ANSWERS, published

Main = Callable[..., tuple[int, str, str]]
QWEN3_8B = published("targets", "Qwen__Qwen3-8B")["config"]


def written(path: Path, config: dict[str, Any]) -> Path:
    path.write_text(json.dumps(config))
    return path


def info(main: Main, *arguments: object) -> tuple[int, dict[str, Any]]:
    status, out, err = main("info", *arguments, "--json")
    assert not err
    return status, json.loads(out)


@pytest.fixture(autouse=True)
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if anything is downloaded."""

    def download(*args: object, **kwargs: object) -> None:
        raise AssertionError("a config alone needs no download")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def test_lone_target_config_is_described(main: Main, tmp_path: Path):
    status, facts = info(main, written(tmp_path / "qwen.json", QWEN3_8B))
    assert status == 0
    assert facts["loads"] is True
    assert (facts["kind"], facts["architecture"]) == ("target", "Qwen3ForCausalLM")
    assert facts["parameters"] == 8_190_735_360  # as on its card
    assert facts["layers"] == 36


def test_bill_of_a_lone_config_or_the_sentence_that_refuses_it(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path / "qwen.json", QWEN3_8B)
    monkeypatch.setattr("strobe.runner.memory.free_memory", lambda device: 200 * 10**9)
    _, facts = info(main, path)
    bill = facts["memory"]
    assert bill.pop("device") == "cpu"
    assert bill.pop("tokens in the KV cache") == 40_960, "one context"
    assert bill.pop("together") == sum(bill.values())
    assert bill["keys and values of target"] == (40_960 + 16) * 2 * 36 * 8 * 128 * 4
    monkeypatch.setattr("strobe.runner.memory.free_memory", lambda device: 10**9)
    _, facts = info(main, path)
    refused = facts["memory"]["refused"]
    weights = bill["weights of target"]
    assert refused.startswith(f"The weights take {weights} bytes, but cpu has 1000000000 ")


def test_lone_drafter_config_is_described(main: Main, tmp_path: Path):
    status, facts = info(main, written(tmp_path / "d.json", QWEN3_8B_DFLASH))
    assert (status, facts["loads"]) == (0, True)
    assert (facts["kind"], facts["format"]) == ("DFlash drafter", "z-lab")
    assert facts["drafts_per_block"].startswith("15, ")
    config = published("drafters", "RedHatAI__Qwen3.6-35B-A3B-speculator.dspark")["config"]
    _, facts = info(main, written(tmp_path / "s.json", config))
    assert (facts["kind"], facts["format"]) == ("DSpark drafter", "speculators")
    assert facts["head"]["rank"] == 256
    assert facts["draft_vocabulary"] == 32000


@pytest.mark.parametrize(
    ("kind", "name", "named"),
    [
        ("drafters", "SpecForge__qwen3.6-27b-domino-full-attention", "Domino drafter"),
        ("drafters", "poolside__Laguna-XS-2.1-DFlash", "Laguna's DFlash drafter"),
        ("drafters", "deepseek-ai__dspark_qwen3_14b_block7-mlx-4bit", "DSpark drafter"),
        ("targets", "mlx-community__Qwen3.8-27B-4bit", "target"),
        ("targets", "zai-org__GLM-5.3-Flash", "target"),
    ],
)
def test_rejected_config_gets_its_reason(
    main: Main, tmp_path: Path, kind: str, name: str, named: str
):
    path = written(tmp_path / "c.json", published(kind, name)["config"])
    status, facts = info(main, path)
    assert (status, facts["loads"], facts["kind"]) == (1, False, named)
    assert ANSWERS[kind][name]["reason"] in facts["reason"]
    assert str(path) in facts["reason"]
    if "quantized" in facts["reason"]:
        assert facts["weights"] == f"quantized by {ANSWERS[kind][name]['reason']}"


def test_pair_of_lone_configs_is_checked(main: Main, tmp_path: Path):
    target = written(tmp_path / "t.json", QWEN3_8B)
    draft = written(tmp_path / "d.json", QWEN3_8B_DFLASH)
    status, facts = info(main, target, "--draft", draft)
    assert (status, facts["draft"]["loads"]) == (0, True)
    written(draft, {**QWEN3_8B_DFLASH, "num_target_layers": 40})
    status, facts = info(main, target, "--draft", draft)
    assert (status, facts["loads"], facts["draft"]["loads"]) == (1, True, False)
    assert facts["draft"]["reason"].startswith(f"{draft}: num_target_layers is 40")
    status, _, err = main("info", draft, "--draft", target)
    assert status == 2
    assert "is a drafter itself" in err


def test_only_a_file_named_config_json_has_neighbours(main: Main, tmp_path: Path):
    quant = {"quantization": {"quant_algo": "NVFP4"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    status, facts = info(main, written(tmp_path / "config.json", QWEN3_8B))
    assert status == 0
    assert "ModelOpt in NVFP4" in facts["quantization"]
    assert "quantization" not in info(main, written(tmp_path / "other.json", QWEN3_8B))[1]


def test_lone_config_prints_a_table(main: Main, tmp_path: Path):
    config = published("targets", "mlx-community__Qwen3.8-27B-4bit")["config"]
    status, out, _ = main("info", written(tmp_path / "c.json", config))
    assert status == 1
    assert "MLX in 4 bits" in out
    assert "no" in out.split()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "auto"], "draft is 'auto', but"),
        (["--draft", "z-lab/Qwen3-8B-DFlash-b16"], "name the drafter's config.json or directory"),
        (["--tensor-parallel-size=2"], "tensor_parallel_size is 2, but"),
    ],
)
def test_options_of_whole_checkpoints_are_rejected(
    main: Main, tmp_path: Path, options: list[str], message: str
):
    status, _, err = main("info", written(tmp_path / "c.json", QWEN3_8B), *options)
    assert status == 2
    assert message in err


def test_damaged_config_is_one_sentence(main: Main, tmp_path: Path):
    path = tmp_path / "c.json"
    path.write_text("{")
    status, _, err = main("info", path)
    assert status == 2
    assert f"{path} is damaged" in err
