"""Other engines' options, in the API and on the command line."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from strobe import LLM, EngineConfig, SamplingParams
from strobe.compat import aliases
from strobe.compat.aliases import translate
from strobe.compat.arguments import split_options
from strobe.outputs import CompletionOutput, RequestOutput
from strobe.server.server_settings import ServerConfig
from tests.support.text_pair import Pair

ROOT = Path(__file__).parents[2]
DFLASH = {"method": "dflash", "model": "d", "num_speculative_tokens": 15}
Main = Callable[..., tuple[int, str, str]]


def sc(**keys: Any) -> list[str]:
    """Return the arguments of a speculative_config."""
    return ["--speculative-config", json.dumps(keys)]


@pytest.fixture
def llm_options(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace LLM with a stub that loads nothing and answers "fine"; return the options it gets."""
    options: dict[str, Any] = {}

    class Stub:
        def __init__(self, **arguments: Any):
            options.update(arguments)

        def get_default_sampling_params(self) -> SamplingParams:
            return SamplingParams()

        def generate(self, prompts: list[str], params: SamplingParams, **extra: Any) -> Any:
            return [RequestOutput("r", p, [1], [CompletionOutput(0, "fine")]) for p in prompts]

    monkeypatch.setattr("strobe.llm.LLM", Stub)
    return options


def changed(options: dict[str, Any]) -> dict[str, Any]:
    return {f.name: options[f.name] for f in fields(EngineConfig) if f.name in options
            and options[f.name] != f.default}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        (sc(**DFLASH), {"method": "dflash", "draft": "d", "num_drafts": 15}),
        (["-sc", '{"model": "d"}'], {"draft": "d"}),
        (sc(method="dspark", model="d"), {"method": "dflash", "draft": "d"}),
        (["--speculative-algorithm=DSPARK", "--draft=d"], {"method": "dflash", "draft": "d"}),
        (
            ["--speculative-config.model=d", "--speculative_config.num_speculative_tokens", "7"],
            {"draft": "d", "num_drafts": 7},
        ),
        (
            ["--spec-method=dflash", "--spec-model", "d", "--spec-tokens=7"],
            {"method": "dflash", "draft": "d", "num_drafts": 7},
        ),
        (["--spec-tokens=7", "--draft=d"], {"draft": "d", "num_drafts": 7}),
        (
            [*sc(**DFLASH), "--draft=d", "--num-drafts=15"],
            {"method": "dflash", "draft": "d", "num_drafts": 15},
        ),
        (
            sc(method="ngram", num_speculative_tokens=5, prompt_lookup_max=6, prompt_lookup_min=3),
            {"method": "ngram", "num_drafts": 5, "ngram_max": 6, "ngram_min": 3},
        ),
        (
            sc(model="[ngram]", prompt_lookup_max=3),
            {"method": "ngram", "ngram_max": 3, "ngram_min": 3},
        ),
        (
            sc(
                model="d",
                revision="v1",
                attention_backend="TRITON_ATTN",
                parallel_drafting=True,
                quantization=None,
            ),
            {"draft": "d", "draft_revision": "v1", "draft_attention_backend": "triton"},
        ),
        (sc(model="d", quantization="int8"), {"draft": "d", "draft_weight_dtype": "int8"}),
        (
            ["--quantization=awq", "--speculative-draft-model-quantization=fp8"],
            {"draft_weight_dtype": "fp8"},
        ),
        (
            [
                "--speculative-algorithm",
                "DFLASH",
                "--speculative-draft-model-path",
                "d",
                "--speculative-dflash-block-size",
                "16",
            ],
            {"method": "dflash", "draft": "d", "num_drafts": 15},
        ),
        (
            [
                "--speculative-algorithm=DFLASH",
                "--speculative-num-draft-tokens=8",
                "--speculative-dflash-block-size=8",
            ],
            {"method": "dflash", "num_drafts": 7},
        ),
        (["--dflash-draft-model-path", "d"], {"draft": "d"}),
        (
            [
                "--model-path",
                "t",
                "--context-length",
                "99",
                "--mem-fraction-static",
                "0.75",
                "--tp-size",
                "2",
            ],
            {
                "target": "t",
                "max_model_len": 99,
                "tensor_parallel_size": 2,
                "gpu_memory_utilization": 0.75,
            },
        ),
        (
            [
                "--model=t",
                "--gpu-memory-utilization=.5",
                "-tp",
                "2",
                "--enforce-eager",
                "--dtype",
                "half",
            ],
            {
                "target": "t",
                "gpu_memory_utilization": 0.5,
                "cuda_graphs": False,
                "tensor_parallel_size": 2,
                "dtype": "float16",
            },
        ),
        (
            ["--disable-radix-cache", "--disable-overlap-schedule", "--max-running-requests", "3"],
            {"enable_prefix_caching": False, "overlap": 1, "max_num_seqs": 3},
        ),
        (
            [
                "--no-async-scheduling",
                "--block-size=32",
                "--quantization=fp8",
                "--kv-cache-dtype=fp8_e4m3",
            ],
            {"overlap": 1, "page_size": 32, "weight_dtype": "fp8", "kv_cache_dtype": "fp8"},
        ),
    ],
)
def test_options_of_other_engines_reach_settings(
    main: Main, llm_options: dict[str, Any], arguments: list[str], settings: dict[str, Any]
):
    assert main("generate", "one", "--no-chat", *arguments) == (0, "fine\n", "")
    assert changed(llm_options) == settings


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--speculative-config={"], "speculative_config is '{', which is not JSON"),
        (["--speculative-config=3"], "speculative_config is 3, but must be an object"),
        (sc(mehtod="dflash"), "speculative_config's mehtod is 'dflash', which Strobe does not"),
        (
            sc(method="eagle3", model="d"),
            "speculative_config's method is 'eagle3', but Strobe drafts with",
        ),
        (
            sc(model="d", prompt_lookup_max=3),
            "prompt_lookup_max is 3, but is for method ngram only",
        ),
        (sc(method="ngram", model="d"), "model is 'd', but ngram has no model"),
        (
            sc(model="d", rejection_sample_method="synthetic"),
            "rejection_sample_method is 'synthetic'",
        ),
        (
            [*sc(model="d"), "--draft=e"],
            "draft is 'e', but speculative_config's model is 'd', and both",
        ),
        (
            [*sc(num_speculative_tokens=3), "--num-drafts=4"],
            "num_drafts is 4, but speculative_config's num_spec",
        ),
        (
            [*sc(model="d"), "--spec-model=e"],
            "speculative_config's model is 'd', but spec_model is 'e'",
        ),
        (
            [*sc(model="d"), "--speculative-config.model=d"],
            "--speculative-config is given together with --speculative-config.model",
        ),
        (
            ["--speculative-algorithm=EAGLE3"],
            "speculative_algorithm is 'EAGLE3', but Strobe drafts with dflash or ngram",
        ),
        (
            ["--speculative-dflash-block-size=1"],
            "speculative_dflash_block_size is 1, but must be a whole number of at",
        ),
        (
            ["--speculative-dflash-block-size=8", "--speculative-num-draft-tokens=16"],
            "speculative_dflash_block_size is 8, but speculative_num_draft_tokens is 16",
        ),
        (
            ["--pipeline-parallel-size=2"],
            "pipeline_parallel_size is 2, but only tensor_parallel_size splits a model; give 1.",
        ),
        (
            ["--calculate-kv-scales"],
            "calculate_kv_scales is True, but keys and values in FP8 have the scales of the",
        ),
        (
            ["--quantization=bitsandbytes"],
            "quantization is 'bitsandbytes', but weights are as in the checkpoint",
        ),
        (["--attention-backend=flash_attn"], "fine"),
        (
            ["--tokenizer=other", "--model=t"],
            "tokenizer is 'other', but Strobe reads the target's own",
        ),
        (["--model"], "--model needs a value after it."),
        (["--model=a", "--model=b"], "--model is given twice, with 'a' and 'b'."),
        (["--model=a", "--target=b"], "target is 'b', but model is 'a', and both set"),
        (["--enforce-eager=maybe"], "enforce_eager is 'maybe', but must be True or False"),
        (
            ["--speculative-num-steps=3"],
            "speculative_num_steps is 3, but DFlash drafts a block at once",
        ),
        (["--speculative-steps=3"], "strobe generate takes no '--speculative-steps=3'"),
        (
            ["--disable-uvicorn-access-log"],
            "strobe generate takes no disable_uvicorn_access_log; leave it out.",
        ),
    ],
)
def test_unsupported_alias_is_named(
    main: Main, llm_options: dict[str, Any], arguments: list[str], part: str
):
    status, out, err = main("generate", "one", "--no-chat", *arguments)
    if part == "fine":  # one of our own settings, which the engine itself rejects
        assert (status, out) == (0, "fine\n")
        return
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert part in err


def test_options_without_effect_are_accepted_and_reported(caplog: pytest.LogCaptureFixture):
    options = {
        "trust_remote_code": True, "limit_mm_per_prompt": {"image": 5}, "swap_space": 4,
        "enable_chunked_prefill": False, "disable_log_stats": False, "pipeline_parallel_size": 1,
        "cpu_offload_gb": 0, "quantization": "modelopt_fp4",
        "speculative_config": None, "max_num_seqs": None, "enforce_eager": False,
        "seed": 0,
    }  # fmt: skip
    with caplog.at_level(logging.INFO, "strobe"):
        assert translate(options).values == {"seed": 0}
    logged = [record.getMessage().split()[0] for record in caplog.records]
    assert logged == [
        "trust_remote_code", "limit_mm_per_prompt", "swap_space", "enable_chunked_prefill",
        "quantization",
    ]  # fmt: skip


def test_host_memory_is_in_gibibytes_or_in_gigabytes_of_each_rank():
    assert translate({"kv_offloading_size": 1.5, "kv_offloading_backend": "native"}).values == {
        "kv_offload_memory": 3 << 29
    }
    options = {"enable_hierarchical_cache": True, "hicache_size": 30, "tp_size": 2}
    assert translate(options).values == {
        "kv_offload_memory": 60 * 10**9,
        "tensor_parallel_size": 2,
    }
    assert translate({"kv_offloading_size": 0}).values == {}
    with pytest.raises(ValueError, match=r"^kv_offloading_size is 'all', but must be a number of"):
        translate({"kv_offloading_size": "all"})
    with pytest.raises(ValueError, match=r"^hicache_ratio is 2.0, but kv_offload_memory names"):
        translate({"hicache_ratio": 2.0})


def test_only_foreign_options_leave_the_command_line():
    own = ["generate", "model", "tp", "--draft", "d", "--no-chat", "-x", "--", "--model", "m"]
    assert split_options(own) == (own, {})
    assert split_options(["serve", "--tp=1", "m", "--trust-remote-code", "--port", "1"]) == (
        ["serve", "m", "--port", "1"],
        {"tp": 1, "trust_remote_code": True},
    )


def test_server_accepts_aliases_for_model_and_options(main: Main, monkeypatch: pytest.MonkeyPatch):
    served: list[Any] = []
    monkeypatch.setattr(
        "strobe.server.launch.serve", lambda *arguments: served.extend(arguments) or 0
    )
    monkeypatch.setattr("os._exit", lambda status: None)
    main(
        "serve", "--model-path=t", "--speculative-draft-model-path=d", "--tp=1", "--port=1",
        "--disable-uvicorn-access-log", "--uvicorn-log-level=debug", "--enable-auto-tool-choice",
        "--served-model-name=a", '--allowed-origins=["https://a.example", "https://b.example"]',
        "--disable-log-requests",
    )  # fmt: skip
    assert served[0] == EngineConfig(target="t", draft="d")
    assert served[1] == ServerConfig(
        port=1, access_log=False, log_level="debug", served_model_name=("a",),
        cors_origin=("https://a.example", "https://b.example"),
    )  # fmt: skip
    status, _, err = main("serve", "t", "--allowed-origins=[1]")
    assert (status, err.count("\n")) == (2, 1)
    assert "allowed_origins is '[1]', but must be texts" in err
    status, _, err = main("serve", "t", "--model=u")
    assert (status, err.count("\n")) == (2, 1)
    assert "target is 't', but model is 'u'" in err


def test_only_servers_and_batches_have_replicas(
    main: Main, monkeypatch: pytest.MonkeyPatch, llm_options: dict[str, Any]
):
    sizes: list[int] = []
    monkeypatch.setattr(
        "strobe.server.launch.serve",
        lambda config, settings: sizes.append(settings.data_parallel_size) or 0,
    )
    monkeypatch.setattr("os._exit", lambda status: None)
    for options in (["-dp", "2"], ["--dp=2"], ["--dp-size=2"], ["--data-parallel-size=2"], []):
        main("serve", *options)
    assert sizes == [2, 2, 2, 2, 1]
    status, _, err = main("serve", "--data-parallel-size=0")
    assert (status, err) == (2, "strobe: data_parallel_size is 0, but must be at least 1.\n")
    status, _, err = main("serve", "--dp", "100000")
    assert (status, err) == (2, "strobe: data_parallel_size is 100000, but must be at most 256.\n")
    status, _, err = main("generate", "--data-parallel-size=2")
    assert (status, err) == (
        2, "strobe: strobe generate takes no data_parallel_size; leave it out.\n",
    )  # fmt: skip
    assert main("generate", "hello", "--no-chat", "--data-parallel-size=1")[0] == 0
    assert "data_parallel_size" not in llm_options


def test_info_reads_pair_from_speculative_config(main: Main, pair: Pair):
    speculative = json.dumps({**DFLASH, "model": str(pair.draft), "num_speculative_tokens": 7})
    status, out, _ = main(
        "info", f"--model={pair.target}", f"--speculative-config={speculative}", "--json"
    )
    assert status == 0
    assert json.loads(out)["pair"] == "fits"
    status, _, err = main("info", str(pair.target), "--max-running-requests=3")
    assert (status, err) == (
        2,
        "strobe: strobe info takes no max_running_requests; leave it out.\n",
    )


def test_benchmarks_accept_aliases_except_fixed_ones(main: Main):
    status, _, err = main("bench", "step", "--max-running-requests=3")
    assert (status, err) == (
        2,
        "strobe: strobe bench step takes no max_running_requests; leave it out.\n",
    )
    status, _, err = main("bench", "offline", "--spec-model=/nowhere", "--spec-tokens=0")
    assert (status, err) == (
        2,
        "strobe: num_drafts is 0, but must be at least 1.\n",
    )


def test_llm_accepts_aliases(pair: Pair):
    llm = LLM(
        model=str(pair.target),
        speculative_config={
            "method": "dflash",
            "model": str(pair.draft),
            "num_speculative_tokens": 5,
        },
        max_model_len=64,
        enforce_eager=True,
        tokenizer=str(pair.target),
        device="cpu",
    )
    assert (llm.engine.config.draft, llm.engine.limits.num_drafts) == (str(pair.draft), 5)
    assert llm.engine.config.cuda_graphs is False
    with pytest.raises(ValueError, match="max_seq_len is not an engine option; there are"):
        LLM(model=str(pair.target), max_seq_len=64)


def test_alias_tables_match_settings_and_docs():
    known = {f.name for config in (EngineConfig, ServerConfig) for f in fields(config)}
    targets = {*aliases.RENAMED.values(), *(entry[0] for entry in aliases.SWITCHES.values())}
    assert targets <= known
    assert not aliases.ALIASES & {f.name for f in fields(EngineConfig)}
    assert aliases.FLAGS <= aliases.ALIASES
    docs = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    names = {*aliases.ALIASES, *aliases.SPECULATIVE, *aliases.SPECULATIVE_ONLY}
    missing = {
        n for n in names if f"`{n}`" not in docs and f"`--{n.replace('_', '-')}`" not in docs
    }
    assert not missing
