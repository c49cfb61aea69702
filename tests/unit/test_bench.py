"""`strobe bench` from the command line, on small shapes with few steps. No time is asserted."""

from __future__ import annotations

import json
import re
import shlex
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strobe import EngineConfig
from strobe.cli import bench as bench_command
from strobe.cli import main as cli
from strobe.config import DEMO_MODELS
from strobe.demo_models import FAMILIES, read_heldout
from strobe.engine.engine import Engine
from strobe.models.architectures import load_draft_config, load_target_config
from strobe.models.weight_loading import load_target
from strobe.ranks.leader import start_engine
from strobe.sampling_params import SamplingParams
from strobe.text.tokenizer import Tokenizer
from strobe.tools.bench import bench_prompts, bench_report, floor, offline, rates, timeline
from strobe.tools.bench import engine_step as step
from strobe.tools.bench.bench_settings import DECIDED, OfflineSettings, StepSettings, command_line
from tests.support.bookkeeping_checks import check_engine
from tests.support.text_pair import Pair

CPU = torch.device("cpu")
STEP_FLAGS = [
    "--shapes", "--concurrency", "--prompt-len", "--acceptance-length", "--steps", "--warmup",
    "--temperature", "--top-p", "--prefill", "--routing", "--load-format", "--profile", "--json",
]  # fmt: skip
OFFLINE_FLAGS = [
    "--data", "--prompts", "--concurrency", "--max-tokens", "--repeats", "--temperature", "--top-p",
    "--ignore-eos", "--thinking", "--json",
]  # fmt: skip
LOAD_FLAGS = [
    "--shapes", "--concurrency", "--rate", "--ways", "--traces", "--mix", "--acceptance-rate",
    "--load-format",
    "--repeats", "--answers", "--steady", "--prompt-len", "--max-tokens", "--temperature",
    "--json", "--plot", "--break-even", "--contexts",
]  # fmt: skip
RECORD_FLAGS = [
    "--data", "--prompts", "--at-once", "--max-tokens", "--temperature", "--top-p", "--ignore-eos",
    "--thinking", "--out",
]  # fmt: skip
QUICK = ["--device=cpu", "--concurrency=1,3", "--steps=8", "--warmup=2", "--prompt-len=20"]


@pytest.fixture(autouse=True)
def small_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the machine's rates with small buffers."""
    monkeypatch.setattr(rates, "_CPU", (1 << 20, 64))


# the command line


def test_help_lists_each_benchmarks_options(main: Callable[..., Any]):
    """`record` drafts every width at every token."""
    engine = [f"--{f.name.replace('_', '-')}" for f in fields(EngineConfig)]
    engine = [flag for flag in engine if flag[2:].replace("-", "_") not in DECIDED]
    benches = {"step": STEP_FLAGS, "offline": OFFLINE_FLAGS, "load": LOAD_FLAGS}
    for name, flags in {**benches, "record": RECORD_FLAGS}.items():
        status, out, err = main("bench", name, "--help")
        assert (status, err) == (0, "")
        rows = [line.strip("│| ") for line in out.splitlines()]
        rows = [row for row in rows if row[:1] == "-"]
        listed = {flag for row in rows for flag in re.findall(r"--[a-z][a-z0-9-]*", row)}
        negated = {flag for flag in listed if flag.startswith("--no-")}
        decided = {"--adaptive", "--overlap"} if name == "record" else set[str]()
        assert listed - negated == {"--help", *flags, *engine} - decided
        assert "which" not in out


def test_bench_alone_shows_its_help(main: Callable[..., Any]):
    status, out, err = main("bench")
    assert (status, err) == (0, "")
    for name in bench_command.KINDS:
        assert f"• {name}" in out


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("stepp", [], "'stepp' is not a benchmark; there are step, offline, load, "),
        ("step", ["--step=3"], "strobe bench step takes no '--step=3'; did you mean --steps?"),
        ("step", ["--shapes=qwen9"], "shapes is 'qwen9'; name one of demo, qwen3-0.6b, qwen3-4b, "),
        ("step", ["--shapes=demo", "--target=x"], "shapes is 'demo', but directories are given "),
        ("step", ["--draft=x"], "A drafter is named but no target; give --target as well"),
        ("step", ["--target=/nowhere"], "/nowhere does not exist; name a directory that holds"),
        ("step", ["--concurrency=1,0"], "concurrency is '1,0', but must be whole numbers of at "),
        ("step", ["--prompt-len=a"], "prompt_len is 'a', but must be whole numbers of at least 1"),
        ("step", ["--prefill=8"], "prefill is '8', but must be prompts x tokens, such as 8x2048."),
        ("step", ["--prefill=2x9000"], "prefill asks for 2 prompts of 9000 tokens, but "),
        ("step", ["--steps=0"], "steps is 0, but must be at least 1; "),
        ("step", ["--steps=900"], "20 + 900 steps of 6 tokens after a prompt of 256 do not fit "
                                  "max_model_len 2048; ask for at most 273 steps."),
        ("step", ["--prompt-len=2040"], "ask for shorter prompts or a smaller warmup."),
        ("step", ["--acceptance-length=17"], "but a step verifies 15 drafts; ask for 1 to 16."),
        ("step", ["--acceptance-length=0.5"], "acceptance_length is 0.5, but must be at least 1; "),
        ("step", ["--method=ngram"], "method is 'ngram', but random tokens repeat nothing; "),
        ("step", ["--method=dflash+ngram"], "method is 'dflash+ngram', but random tokens repeat "),
        ("step", ["--top-p=2"], "top_p is 2, but must"),
        ("step", ["--kv-cache-memory=100MB"], "tokens need 960 pages, but the KV cache has"),
        ("step", ["--json=/nowhere/x"], "json is '/nowhere/x', but /nowhere is not a directory; "),
        ("step", ["--json=/"], "json is '/', but / is a directory; name a file in one that "),
        ("offline", ["--concurrency=40"], "concurrency is 40, but there are 32 prompts; lower it "),
        ("offline", ["--repeats=0"], "repeats is 0, but must be at least 1; ask for "),
        ("offline", ["--data=/nowhere"], "data is '/nowhere', which cannot be read ("),
        ("offline", ["--method=none"], "Nothing drafts; name a drafter with --draft, or --method"),
        ("offline", ["--max-model-len=20"], "but max_model_len is 20, the answer included; raise"),
        ("offline", ["--temperature=-1"], "temperature is -1, but must be at least 0"),
    ],
)  # fmt: skip
def test_bad_input_is_a_one_line_error(
    main: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    arguments: list[str],
    sentence: str,
):
    def measure(*arguments: Any) -> None:
        raise AssertionError("the device's rates were measured")

    if "kv-cache" not in str(arguments):  # that error needs the engine's page pool
        monkeypatch.setattr(bench_report, "measure", measure)
    status, out, err = main("bench", name, "--device=cpu", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("strobe: ")
    assert sentence in err
    assert err.count("\n") == 1


def test_recorded_command_line_gives_the_same_settings(monkeypatch: pytest.MonkeyPatch):
    received: list[Any] = []
    for module, name in ((step, "run_step"), (offline, "run_offline")):
        monkeypatch.setattr(module, name, lambda *settings: received.extend(settings) or 0)
    engine = EngineConfig(target="a b", num_drafts=3, overlap=2)
    for settings in (
        StepSettings(concurrency="4", prefill="2x8", load_format="uniform"),
        OfflineSettings(data="x y", thinking=True, repeats=1),
    ):
        name = "step" if isinstance(settings, StepSettings) else "offline"
        words = shlex.split(command_line(f"bench {name}", settings, engine))
        assert words[0] == "strobe"
        assert cli.main(words[1:]) == 0
        assert received[-2:] == [settings, engine]
    assert command_line("bench step", StepSettings(), EngineConfig()) == "strobe bench step"


# runs


def test_random_weights_are_drawn_as_asked():
    """Uniform ones are those of vLLM's dummy weights, which also give norms values near 0."""
    options: dict[str, Any] = {"max_positions": 16, "dtype": torch.float32, "device": CPU}
    directory = DEMO_MODELS / "target"
    config = load_target_config(directory)
    for uniform in (False, True):
        model = load_target(directory, config, **options, open=None, uniform=uniform)
        largest = {name: float(p.abs().max()) for name, p in model.named_parameters()}
        if uniform:
            assert all(5e-4 < value <= 1e-3 for value in largest.values())
        else:
            assert largest["norm.weight"] == 1 < 100 * largest["embed_tokens.weight"]


def test_step_times_demo_shapes_and_reports_forced_acceptance(
    main: Callable[..., Any], tmp_path: Path
):
    file = tmp_path / "figures.json"
    status, out, err = main(
        "bench", "step", *QUICK, "--acceptance-length=3", "--prefill=2x30", f"--json={file}",
        "--load-format=uniform",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "acceptance length forced to 3.0: speed only, not quality" in out
    for heading in ("Milliseconds per step", "(forced 3)", "x floor", "Work of a step",
                    "Prefill", "TFLOP/s, linear layers"):  # fmt: skip
        assert heading in out
    assert "…" not in out
    figures = json.loads(file.read_text())
    assert figures["acceptance_length_forced"] == 3
    assert figures["device"]
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["command"].startswith("strobe bench step --load-format uniform --concurrency")
    assert figures["config"]["dflash"]["load_format"] == "uniform"
    assert figures["config"]["plain"]["draft"] is None
    rows = {(row["method"], row["concurrency"]): row for row in figures["rows"]}
    assert list(rows) == [("plain", 1), ("plain", 3), ("dflash", 1), ("dflash", 3)]
    for (method, count), row in rows.items():
        assert row["steps"] == 8
        assert row["tokens_per_step"] == pytest.approx(3 if method == "dflash" else 1, abs=1)
        assert row["context_tokens"] > 20
        whole = row["draft_ms"] + row["verify_ms"] + row["rest_ms"]
        assert whole > 0
        assert row["ratio_to_floor"] == pytest.approx(row["ms"] / row["floor"]["ms"], rel=0.01)
        counts = floor.Shapes(
            load_target_config(DEMO_MODELS / "target"),
            load_draft_config(DEMO_MODELS / "draft") if method == "dflash" else None,
            rows=16 if method == "dflash" else 1,
            widths=floor.Widths(2, 2, 4, 4),  # stored in bfloat16
        )
        work = counts.verify(count, row["context_tokens"])
        assert row["floor"]["verify"]["bytes"] == pytest.approx(work.bytes, rel=1e-3)
        assert row["floor"]["verify"]["operations"] == pytest.approx(work.operations, rel=1e-3)
    assert all(rows["plain", n]["floor"]["drafting"]["bytes"] == 0 for n in (1, 3))
    assert [(p["method"], p["prompts"], p["prompt_tokens"]) for p in figures["prefill"]] == [
        ("plain", 2, 30), ("dflash", 2, 30)
    ]  # fmt: skip
    for row in figures["prefill"]:
        assert row["tokens_per_s"] == pytest.approx(60 / row["seconds"], rel=0.01)


@pytest.mark.parametrize(("method", "names"), [("none", ["plain"]), ("dflash", ["dflash"])])
def test_step_measures_one_method_when_selected(
    main: Callable[..., Any], tmp_path: Path, method: str, names: list[str]
):
    file = tmp_path / "figures.json"
    flags = [*QUICK[:1], "--concurrency=2", "--steps=2", "--warmup=0", "--overlap=2"]
    status, out, _ = main("bench", "step", *flags, f"--method={method}", f"--json={file}")
    assert status == 0
    figures = json.loads(file.read_text())
    assert [row["method"] for row in figures["rows"]] == names
    assert ("forced" in out) == (method == "dflash")


def test_step_accepts_directories_with_only_a_config(
    main: Callable[..., Any], pair: Pair, tmp_path: Path
):
    for part in ("target", "draft"):
        (tmp_path / part).mkdir()
        text = (getattr(pair, part) / "config.json").read_text()
        (tmp_path / part / "config.json").write_text(text)
    flags = [f"--target={tmp_path / 'target'}", f"--draft={tmp_path / 'draft'}"]
    quick = [*QUICK[:1], "--concurrency=2", "--steps=2", "--acceptance-length=2"]
    status, out, _ = main("bench", "step", *quick, *flags)
    assert status == 0
    assert "dflash" in out
    status, out, _ = main("bench", "step", *quick, *flags[:1])
    assert status == 0
    assert "dflash" not in out


def test_step_holds_one_engine_at_a_time(main: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    """Two would not fit into a GPU's memory next to each other."""
    engines: list[weakref.ref[Engine]] = []
    alive: list[int] = []

    def make_engine(*arguments: Any, **options: Any) -> Engine:
        engine = start_engine(*arguments, **options)
        engines.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(step, "start_engine", make_engine)
    monkeypatch.setattr(
        step, "release", lambda _: alive.append(sum(ref() is not None for ref in engines))
    )
    flags = [*QUICK[:1], "--concurrency=1", "--steps=2", "--warmup=0"]
    assert main("bench", "step", *flags)[0] == 0
    assert (len(engines), alive) == (2, [0, 0])


def test_decode_leaves_the_engine_idle_and_unmarked(pair: Pair):
    config = EngineConfig(target=str(pair.target), draft=str(pair.draft), overlap=2)
    engine = Engine(replace(config, max_num_seqs=3, enable_prefix_caching=False))
    random_prompts = step.random_prompts(engine, 3, 20)
    assert random_prompts == step.random_prompts(engine, 3, 20)
    assert len({tuple(prompt) for prompt in random_prompts}) == 3
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    mark = engine.on_phase
    line = timeline.Timeline(CPU)
    window = step.decode(engine, random_prompts, params, 2, 5, line)
    assert len(line) == 5 + 1
    assert window.tokens >= 5 * 3
    assert engine.on_phase == mark
    assert not engine.has_work
    check_engine(engine)
    short = replace(params, max_tokens=4)
    with pytest.raises(ValueError, match="did not run to the last step; ask for fewer steps"):
        step.decode(engine, random_prompts, short, 0, 9)
    assert not engine.has_work
    check_engine(engine)


def test_offline_compares_real_answers(main: Callable[..., Any], pair: Pair, tmp_path: Path):
    data, file = tmp_path / "data.jsonl", tmp_path / "figures.json"
    lines = [{"prompt": "hello"}, {"turns": ["and now?", "then?"]},
             {"messages": [{"role": "user", "content": "bye"}]}]  # fmt: skip
    data.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    status, out, err = main(
        "bench", "offline", "--device=cpu", f"--target={pair.target}", f"--draft={pair.draft}",
        f"--data={data}", "--prompts=3", "--concurrency=1,2", "--max-tokens=9", "--repeats=1",
        "--ignore-eos", f"--json={file}",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "c = 2: 3 of 3 answers identical." in out
    assert "forced" not in out
    figures = json.loads(file.read_text())
    rows = figures["rows"]
    assert [(row["method"], row["concurrency"]) for row in rows] == [
        ("plain", 1), ("dflash", 1), ("plain", 2), ("dflash", 2)
    ]  # fmt: skip
    for row in rows:
        assert row["tokens"] == 27
        assert row["full_steps"] > 0
        assert row["ratio_to_floor"] > 0
        assert (row["acceptance_length"] is None) == (row["method"] == "plain")
    assert [pair["identical"] for pair in figures["pairs"]] == [3, 3]
    assert figures["config"]["plain"]["method"] == "none"


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_offline_reports_the_first_difference(
    main: Callable[..., Any], pair: Pair, monkeypatch: pytest.MonkeyPatch, dtype: str, status: int
):
    answer = offline.answer

    def wrong(engine: Engine, *rest: Any) -> offline.OfflineRun:
        run = answer(engine, *rest)
        if engine.resolved.draft is not None and len(run.requests) > 1:
            run.requests[1].tokens[-2] += 1
        return run

    monkeypatch.setattr(offline, "answer", wrong)
    exit_status, out, _ = main(
        "bench", "offline", "--device=cpu", f"--target={pair.target}", f"--draft={pair.draft}",
        "--prompts=2", "--concurrency=1", "--max-tokens=6", "--repeats=1", "--ignore-eos",
        f"--dtype={dtype}",
    )  # fmt: skip
    assert exit_status == status
    if dtype == "float32":
        assert "1 of 2 answers identical; prompt 1 differs first, from token 4 on" in out
    else:
        assert "lower precision rounds differently" in out


def test_offline_answers_match_with_sampled_drafts(main: Callable[..., Any], pair: Pair):
    status, out, _ = main(
        "bench", "offline", "--device=cpu", f"--target={pair.target}", f"--draft={pair.draft}",
        "--prompts=2", "--concurrency=2", "--max-tokens=12", "--repeats=1", "--ignore-eos",
        "--temperature=9", "--draft-sample-method=probabilistic",
    )  # fmt: skip
    assert status == 0
    assert "c = 2: 2 of 2 answers identical." in out


def test_offline_drafts_by_prompt_lookup(main: Callable[..., Any], pair: Pair):
    status, out, _ = main(
        "bench", "offline", "--device=cpu", f"--target={pair.target}", "--method=ngram",
        "--prompts=2", "--concurrency=2", "--max-tokens=6", "--repeats=1",
    )  # fmt: skip
    assert status == 0
    assert " ngram " in out


def test_prompts_go_through_the_chat_template(tmp_path: Path):
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    data = tmp_path / "data.jsonl"
    messages = [{"role": "system", "content": "Brief!"}, {"role": "user", "content": "hello"}]
    lines = [{"messages": messages}, {"turns": ["hello", "more"]}, {"prompt": "hello"}]
    data.write_text("\n".join(map(json.dumps, lines)))
    settings = OfflineSettings(data=str(data), prompts=3, concurrency="1")
    first, second, third = bench_prompts.read_prompts(settings, DEMO_MODELS / "target")
    assert first == tokenizer.render_chat(messages, enable_thinking=False)
    assert second == third == tokenizer.render_chat(messages[1:], enable_thinking=False)
    with pytest.raises(ValueError, match="holds 3 prompts, but prompts is 4; ask for at most 3"):
        bench_prompts.read_prompts(replace(settings, prompts=4), DEMO_MODELS / "target")
    for line, wrong in [
        ("{", r"line 1 is '\{', but must be"),
        ("[]", "but must be"),
        ('{"turns": []}', "but must be"),
        ('{"messages": [{"role": 3}]}', "line 1: "),
        ("", "holds no prompt"),
    ]:
        data.write_text(line)
        with pytest.raises(ValueError, match=wrong):
            bench_prompts.read_prompts(settings, DEMO_MODELS / "target")


def test_prompts_may_contain_unicode_line_ends(tmp_path: Path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a\u2028b\x85c"}\n')
    settings = OfflineSettings(data=str(data), prompts=1, concurrency="1")
    assert len(bench_prompts.read_prompts(settings, DEMO_MODELS / "target")) == 1


def test_demo_prompts_are_heldout_examples_of_all_families():
    prompt_ids = bench_prompts.read_prompts(
        OfflineSettings(prompts=7, concurrency="1"), DEMO_MODELS / "target"
    )
    tokenizer = Tokenizer(DEMO_MODELS / "target")
    examples = read_heldout(7)
    assert {example.family for example in examples} == set(FAMILIES)
    assert prompt_ids == [
        tokenizer.render_chat(e.messages, tools=e.tools or None, enable_thinking=e.thinking)
        for e in examples
    ]
