"""Models that are not directories: none, a drafter that names its target, and `auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from strobe import EngineConfig
from strobe.hub.download import is_hub_name
from strobe.hub.locate import locate_models
from strobe.hub.pairs import METHODS, PAIRS, published_drafter
from strobe.hub.speculators_pair import Proposal, read_proposal
from strobe.models.architectures import load_draft_config
from strobe.models.weight_loading import check_draft_tensors
from tests.support.published_configs import checkpoint_of, published
from tests.support.text_pair import Pair

ENGINE = EngineConfig()


def speculators(verifier: str, **changes: Any) -> dict[str, Any]:
    """Return the config.json of RedHatAI's drafter for Qwen3-8B with another target."""
    method = {"proposal_type": "greedy", "speculative_tokens": 7, "verifier_accept_k": 1}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "block_size": 8,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        **changes,
    }


def written(directory: Path, config: dict[str, Any]) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def test_demo_models_are_the_default():
    located = locate_models(ENGINE)
    assert located.target.endswith("demo_models/target")
    for draft in (located.draft, locate_models(ENGINE.with_(draft="auto")).draft):
        assert str(draft).endswith("demo_models/draft")
    assert locate_models(ENGINE.with_(method="dflash")).draft == located.draft
    assert locate_models(ENGINE.with_(method="ngram")).draft is None
    assert locate_models(ENGINE.with_(method="none")).draft is None
    assert locate_models(ENGINE.with_(draft="mine")).draft == "mine"
    assert locate_models(ENGINE.with_(target="mine")) == ENGINE.with_(target="mine")
    with pytest.raises(ValueError, match="revision is 'v1', but no target is named"):
        locate_models(ENGINE.with_(revision="v1"))
    with pytest.raises(ValueError, match="draft_revision is 'v1', but no drafter is named"):
        locate_models(ENGINE.with_(target="mine", draft_revision="v1"))


# a drafter that names its target


def test_speculators_checkpoint_sets_target_method_and_drafts(pair: Pair, tmp_path: Path):
    own = written(tmp_path / "own", speculators(str(pair.target)))
    located = locate_models(ENGINE.with_(target=own))
    assert (located.target, located.draft) == (str(pair.target), own)
    assert (located.method, located.num_drafts) == ("dflash", 7)
    assert (
        locate_models(located) == located == locate_models(ENGINE.with_(target=own, draft="auto"))
    )
    chosen = locate_models(ENGINE.with_(target=own, num_drafts=3, method="dflash", max_num_seqs=2))
    assert (chosen.num_drafts, chosen.max_num_seqs) == (3, 2)


@pytest.mark.parametrize("change", [{"draft": "other"}, {"method": "ngram"}, {"method": "none"}])
def test_speculators_checkpoint_rejects_other_drafter_or_method(
    pair: Pair, tmp_path: Path, change: dict[str, Any]
):
    own = written(tmp_path / "own", speculators(str(pair.target)))
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}, but .* brings its own; leave"):
        locate_models(ENGINE.with_(target=own, **change))


@pytest.mark.parametrize("method", ["dflash2", "dspark"])
def test_speculators_heads_run_as_dflash(pair: Pair, tmp_path: Path, method: str):
    own = written(tmp_path / "own", speculators(str(pair.target), speculators_model_type=method))
    located = locate_models(ENGINE.with_(target=own))
    assert (located.method, located.num_drafts) == ("dflash", 7)


def test_other_methods_and_absent_targets_are_rejected(tmp_path: Path):
    other = written(tmp_path / "e", speculators("a/b", speculators_model_type="eagle3"))
    with pytest.raises(ValueError, match="drafts with 'eagle3', but only 'dflash', 'dflash2', "):
        locate_models(ENGINE.with_(target=other))
    moved = written(tmp_path / "m", speculators("/moved/away"))
    with pytest.raises(ValueError, match="drafts for /moved/away, which is not a directory here"):
        locate_models(ENGINE.with_(target=moved))


@pytest.mark.parametrize(
    ("changes", "tokens", "drafts"),
    [
        ({}, 7, 7),
        ({}, 5, 5),
        ({}, 8, 7),  # an older exporter wrote the block size
        ({"block_size": 16}, 15, 15),
        ({"sample_from_anchor": True}, 8, 8),  # the first slot drafts, too
    ],
)
def test_num_drafts_fits_the_block(changes: dict[str, Any], tokens: int, drafts: int):
    config = speculators("Qwen/Qwen3-8B", **changes)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens
    assert read_proposal(config, Path("c")) == Proposal("Qwen/Qwen3-8B", "dflash", drafts)


@pytest.mark.parametrize(
    ("keys", "value", "part"),
    [
        ((), None, "speculators_config is None, but must be an object"),
        (("verifier",), "name", "speculators_config.verifier is 'name'"),
        (("verifier", "name_or_path"), None, "verifier.name_or_path is None, but must name the"),
        (("proposal_methods",), [], "proposal_methods is [], but must list at least one"),
        (("proposal_methods", 0, "speculative_tokens"), 0, "speculative_tokens is 0, but must be"),
        (("proposal_methods", 0, "speculative_tokens"), True, "speculative_tokens is True"),
    ],
)
def test_missing_speculators_field_is_named(keys: tuple[Any, ...], value: Any, part: str):
    config = speculators("Qwen/Qwen3-8B")
    *outer, last = ("speculators_config", *keys)
    inner: Any = config
    for key in outer:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(ValueError, match="the checkpoint was published with") as caught:
        read_proposal(config, Path("c"))
    assert part in str(caught.value)


def test_other_checkpoints_propose_nothing():
    assert read_proposal({"architectures": ["Qwen3ForCausalLM"]}, Path("c")) is None


# auto


def drafter_of(target: str, config: dict[str, Any] | None = None) -> str:
    """Return the drafter that auto takes once all methods run."""
    return published_drafter(target, config or {}, METHODS).drafter.name


def test_published_pairs_are_matched_by_hub_name():
    assert drafter_of("Qwen/Qwen3.5-9B") == "z-lab/Qwen3.5-9B-DFlash"
    assert drafter_of("qwen/qwen3.5-9b@main") == "z-lab/Qwen3.5-9B-DFlash"
    for target, drafters in PAIRS.items():
        assert is_hub_name(target)
        assert all(is_hub_name(drafter.name) for drafter in drafters)
        first = next(drafter for drafter in drafters if drafter.method in METHODS)
        assert drafter_of(target) == first.name


def test_pairs_list_the_best_method_first():
    for drafters in PAIRS.values():
        ranks = [
            METHODS.index(drafter.method)
            for drafter in drafters
            if drafter.compared and drafter.method in METHODS
        ]
        assert ranks == sorted(ranks)


CONFIGS = {
    "DFlash": "z-lab__Qwen3.5-4B-DFlash",
    "DFlash2": "z-lab__Qwen3.8-27B-DFlash2",
    "DSpark": "SpecForge__qwen3-8b-dspark",
}


@pytest.mark.parametrize("method", METHODS)
def test_auto_takes_methods_that_run(tmp_path: Path, method: str):
    assert set(CONFIGS) == set(METHODS)
    checkpoint_of(published("drafters", CONFIGS[method]), tmp_path, {})
    check_draft_tensors(tmp_path, load_draft_config(tmp_path), open=None)


@pytest.mark.parametrize(
    ("target", "drafter"),
    [
        ("Qwen/Qwen3.8-27B", "z-lab/Qwen3.8-27B-DFlash2"),
        ("Qwen/Qwen3.8-27B-FP8", "z-lab/Qwen3.8-27B-DFlash2"),
        ("unsloth/Qwen3.8-27B-NVFP4", "z-lab/Qwen3.8-27B-DFlash2"),
        ("Qwen/Qwen3.6-27B", "z-lab/Qwen3.6-27B-DFlash"),
        ("Qwen/Qwen3.6-35B-A3B", "RedHatAI/Qwen3.6-35B-A3B-speculator.dspark"),
        ("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2"),
        ("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7"),
        ("google/gemma-4-12B-it", "z-lab/gemma4-12B-it-DFlash"),
        ("google/gemma-4-31B-it", "RedHatAI/gemma-4-31B-it-speculator.dspark"),
        ("openai/gpt-oss-20b", "z-lab/gpt-oss-20b-DFlash"),
    ],
)
def test_auto_takes_the_best_published_drafter(target: str, drafter: str):
    assert drafter_of(target) == drafter


def test_auto_passes_over_methods_that_do_not_run():
    def drafter(*running: str) -> str:
        return published_drafter("Qwen/Qwen3-8B", {}, running).drafter.name

    assert drafter("DSpark", "DFlash") == "deepseek-ai/dspark_qwen3_8b_block7"
    assert drafter("DFlash") == "z-lab/Qwen3-8B-DFlash-b16"
    with pytest.raises(ValueError, match=r"no published drafter is known for Qwen/Qwen3-14B; .*"):
        published_drafter("Qwen/Qwen3-14B", {}, ["DFlash"])


def test_choice_says_why():
    def reason(target: str) -> str:
        return published_drafter(target, {}, METHODS).reason

    assert reason("Qwen/Qwen3-14B") == "the only published one, for DSpark"
    assert reason("Qwen/Qwen3.8-27B").startswith(
        "for DFlash2, the method with the most accepted tokens; also published: "
        "incoai/Qwen3.8-27B-DFlash2 (DFlash2), RadixArk/Qwen3.8-27B-DSpark (DSpark)"
    )
    assert reason("Qwen/Qwen3.6-27B").startswith(
        "for DFlash, the best method whose authors published its acceptance; also published: "
        "satgeze/Qwen3.6-27B-DSpark (DSpark)"
    )
    assert reason("google/gemma-4-12B-it") == (
        "for DFlash, the only one that runs; also published: "
        "deepseek-ai/dspark_gemma4_12b_block7 (DSpark with Gemma 4's layers: does not run)"
    )


def test_hub_name_without_drafter_is_rejected_before_download(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    downloads: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **_: downloads.append(name)
    )
    with pytest.raises(ValueError, match="no published drafter is known for me/mine"):
        locate_models(ENGINE.with_(target="me/mine", draft="auto"))
    assert not downloads
    locate_models(ENGINE.with_(target="Qwen/Qwen3.5-9B", draft="auto"))
    assert downloads == ["z-lab/Qwen3.5-9B-DFlash", "Qwen/Qwen3.5-9B"]
    assert "z-lab/Qwen3.5-9B-DFlash drafts for Qwen/Qwen3.5-9B: the only published" in caplog.text


def test_local_target_is_recognized_by_cache_config_or_size():
    expected = "RedHatAI/Qwen3-4B-speculator.dflash2"
    cached = "/c/hub/models--Qwen--Qwen3-4B/snapshots/1234"
    assert drafter_of(cached) == expected
    assert drafter_of("/m/q", {"_name_or_path": "Qwen/Qwen3-4B"}) == expected
    size = {"model_type": "qwen3", "hidden_size": 2560, "num_hidden_layers": 36}
    assert drafter_of("/m/q", {**size, "max_position_embeddings": 40960}) == expected
    for longer in (32768, 262144):  # Qwen3-4B-Base, and the models of July 2025
        with pytest.raises(ValueError, match="no published drafter is known for /m/q"):
            published_drafter("/m/q", {**size, "max_position_embeddings": longer})


def test_unknown_target_error_lists_known_ones(pair: Pair, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ValueError, match=r"^draft is auto, but no") as caught:
        locate_models(ENGINE.with_(target=str(pair.target), draft="auto"))
    assert all(target in str(caught.value) for target in ("Qwen/Qwen3-4B", "openai/gpt-oss-20b"))
    assert not caplog.records
