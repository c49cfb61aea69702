"""`strobe eval` from the command line, on a random pair and files of a few rows."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from strobe import LLM, EngineConfig, SamplingParams
from strobe.cli import eval as eval_command
from strobe.counters import DraftCounts
from strobe.demo_models import FAMILIES
from strobe.outputs import CompletionOutput, SpeculationReport
from strobe.tools.bench import plot_style as bench_plots
from strobe.tools.bench.bench_settings import DECIDED
from strobe.tools.eval import datasets, eval_plots, latex, measures, sources
from strobe.tools.eval.answering import Answering
from strobe.tools.eval.datasets import Sample
from strobe.tools.eval.eval_settings import EvalSettings
from strobe.tools.eval.evaluate import Engines
from tests.support.text_pair import Pair

FLAGS = [
    "--dataset", "--data", "--shots", "--prompts", "--concurrency", "--max-tokens", "--repeats",
    "--temperature", "--top-p", "--thinking", "--allow-code-execution", "--code-seconds",
    "--expect", "--expect-acceptance-length", "--expect-accuracy", "--output", "--save-answers",
]  # fmt: skip
ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "How many?", "answer": "2 + 2\n#### 4"},
    "gsm8k-5shot": {"question": "How many?", "answer": "2 + 2\n#### 4"},
    "math500": {"problem": "What is $x$?", "answer": "7"},
    "humaneval": {
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "test": "def check(c):\n    assert c(1) == 2\n",
    },
    "mbpp": {"prompt": "Write a function f."},
    "mbpp-tests": {
        "prompt": "Write a function f.",
        "test_imports": [],
        "test_list": ["assert f(1) == 2"],
    },
    "mt-bench": {"prompt": ["Write a poem.", "Now without the letter e."]},
    "alpaca": {"instruction": "Sort.", "input": "b, a"},
}
REASON = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TURNS: dict[str, tuple[str, ...]] = {
    "gsm8k": ("How many?" + REASON,),
    "math500": ("What is $x$?" + REASON,),
    "humaneval": (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\ndef f(x):\n\n```",
    ),
    "mbpp": ("Write a function f.",),
    "mbpp-tests": ("Write a function f.\nThe code should pass these tests:\nassert f(1) == 2",),
    "mt-bench": ("Write a poem.", "Now without the letter e."),
    "alpaca": ("Sort.\n\nInput:\nb, a",),
}


@pytest.fixture
def lines(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes rows to a file of JSON lines."""

    def write(*rows: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        text = "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        return path

    return write


# the command line


def test_help_lists_each_evaluations_options(main: Callable[..., Any]):
    engine = [f"--{f.name.replace('_', '-')}" for f in fields(EngineConfig)]
    engine = [flag for flag in engine if flag[2:].replace("-", "_") not in DECIDED]
    for name in eval_command.KINDS:
        status, out, err = main("eval", name, "--help")
        assert (status, err) == (0, "")
        rows = [line.strip("│| ") for line in out.splitlines()]
        listed = {f for r in rows if r[:1] == "-" for f in re.findall(r"--[a-z][a-z0-9-]*", r)}
        negated = {flag for flag in listed if flag.startswith("--no-")}
        assert listed - negated == {"--help", *FLAGS, *engine}


def test_eval_alone_shows_its_help(main: Callable[..., Any]):
    status, out, err = main("eval")
    assert (status, err) == (0, "")
    for name in eval_command.KINDS:
        assert f"• {name}" in out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sped"], "'sped' is not an evaluation; there are acceptance, accuracy, speed."),
        (["speed", "--expct=3"], "strobe eval speed takes no '--expct=3'; did you mean --expect?"),
        (["speed", "--dataset=gsm9k"], "dataset is 'gsm9k'; name one of gsm8k, gsm8k-5shot, "),
        (["speed", "--dataset=mbpp,mbpp"], "dataset is 'mbpp,mbpp', which names one twice."),
        (["speed", "--data=/nowhere"], "data is '/nowhere', which is not a file; name a file of "),
        (["speed", "--data=x", "--dataset=demo"], "The demo models' tasks are generated; drop "),
        (["speed", "--data=x", "--dataset=mbpp,alpaca"], "data is one file, but dataset names 2;"),
        (["speed", "--data=x", "--dataset=gsm8k-5shot"], "gsm8k-5shot with --data needs --shots"),
        (["speed", "--shots=x"], "Only gsm8k-5shot shows shots; add --dataset gsm8k-5shot."),
        (["speed", "--concurrency=0"], "concurrency is '0', but must be whole numbers of at "),
        (["speed", "--prompts=4", "--concurrency=9"], "concurrency is 9, but a data set has 4 "),
        (["speed", "--prompts=-1"], "prompts is -1, but must be at least 0; "),
        (["speed", "--expect=foo"], "expect is 'foo'; name one of qwen3-4b-dflash-b16, "),
        (["speed", '--expect={"gsm8k"'], "expect is '{\"gsm8k\"', which is not JSON ("),
        (["speed", '--expect={"gsm8k": {"acc": 1}}'], "expect's 'gsm8k' holds 'acc'; it takes "),
        (["speed", '--expect={"gsm": {"accuracy": 1}}'], "expect holds 'gsm'; name one of gsm8k"),
        (["speed", "--expect-accuracy=90"], "expect_accuracy is 90, but must be at most 1; "),
        (["speed", "--save-answers"], "save_answers is on, but output is empty; name a directory"),
        (["speed", "--method=none"], "Nothing drafts; name a drafter with --draft, or --method "),
        (["speed", "--target=/x"], "A target is named but no data set, and the demo tasks suit "),
    ],
)
def test_error_is_one_sentence(main: Callable[..., Any], arguments: list[str], sentence: str):
    status, out, err = main("eval", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"strobe: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "which holds no row; give one or more."),
        ('{"turns": ["a"]}\n{"turns":\n', "line 2 is '{\"turns\":', but must be one JSON object."),
        ("[1]\n", "line 1 is [1], but must be one JSON object."),
        ('{"prompt": "a"}\n', "line 1 has no 'turns', only prompt; give {\"turns\": [text, ...]}."),
        ('{"turns": []}\n', "line 1: turns is [], but must be a list of texts."),
        ('{"turns": [""]}\n', "line 1: turns holds '', which is not text."),
        ('{"turns": ["a"], "answer": []}\n', "line 1: answer is [], but must be a string or a "),
    ],
)
def test_malformed_file_is_a_one_line_error(
    main: Callable[..., Any], lines: Callable[..., Path], text: str, sentence: str
):
    status, out, err = main("eval", "acceptance", "--data", lines(text))
    assert (status, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


# data sets


@pytest.mark.parametrize("name", TURNS)
def test_prompts_match_the_paper(lines: Callable[..., Path], name: str):
    data = datasets.load(name, EvalSettings(dataset=name, data=str(lines(ROWS[name]))))
    (sample,) = data.samples
    assert sample.turns == TURNS[name]
    assert (sample.grade is None) == (name in ("mbpp", "mt-bench", "alpaca"))
    assert sample.runs_code == (name in ("humaneval", "mbpp-tests"))
    assert bool(data.ungraded) == (sample.grade is None)


def test_five_shot_uses_first_five_questions_without_chat(lines: Callable[..., Path]):
    shots = [{"question": f"Q{i}?", "answer": f"#### {i}"} for i in range(7)]
    settings = EvalSettings(
        dataset="gsm8k-5shot",
        data=str(lines(ROWS["gsm8k-5shot"])),
        shots=str(lines(*shots, name="train.jsonl")),
    )
    (sample,) = datasets.load("gsm8k-5shot", settings).samples
    shown = "".join(f"Question: Q{i}?\nAnswer: #### {i}\n\n" for i in range(5))
    assert sample.turns == (f"{shown}Question: How many?\nAnswer:",)
    assert sample.raw
    assert sample.stop == ("Question:",)


def test_prompts_are_spread_over_the_data(lines: Callable[..., Path]):
    path = lines(*({"turns": [f"{i}"]} for i in range(10)))
    data = datasets.load("custom", EvalSettings(data=str(path), prompts=4))
    assert [sample.turns[0] for sample in data.samples] == ["0", "2", "5", "7"]
    assert data.total == 10
    assert len(datasets.load("custom", EvalSettings(data=str(path), prompts=0)).samples) == 10


def test_json_list_and_gzipped_lines_are_read(tmp_path: Path):
    import gzip

    (tmp_path / "a.json").write_text('[{"turns": ["a"]}]')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"turns": ["b"]}\n'))
    assert sources.read_rows(tmp_path / "a.json")[0].row == {"turns": ["a"]}
    assert sources.read_rows(tmp_path / "b.jsonl.gz")[0].row == {"turns": ["b"]}
    (tmp_path / "c.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"which cannot be read \("):
        sources.read_rows(tmp_path / "c.jsonl.gz")


def test_parquet_needs_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"no parquet")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
        with pytest.raises(ValueError, match=r"pip install 'strobe\[eval\]'"):
            sources.read_rows(path)
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        sources.read_rows(path)
    table = __import__("pyarrow").Table.from_pylist([{"turns": ["a", "b"]}])
    parquet.write_table(table, path)
    assert sources.read_rows(path)[0].row == {"turns": ["a", "b"]}


def test_without_math_verify_answers_are_ungraded(
    lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(latex, "find_spec", lambda name: None)
    settings = EvalSettings(dataset="math500", data=str(lines(ROWS["math500"])))
    loaded = datasets.load("math500", settings)
    assert [sample.grade for sample in loaded.samples] == [None]
    assert loaded.ungraded == (
        "answers are compared by math-verify; install it with pip install 'strobe[eval]'"
    )


def test_only_needed_files_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls: list[Any] = []

    def snapshot(repo: str, **options: Any) -> str:
        calls.append((repo, options))
        (tmp_path / "test.jsonl").write_text(json.dumps(ROWS["math500"]))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    data = datasets.load("math500", EvalSettings(dataset="math500"))
    assert (len(data.samples), data.source) == (1, "HuggingFaceH4/MATH-500")
    ((repo, options),) = calls
    assert repo == "HuggingFaceH4/MATH-500"
    assert options == {
        "repo_type": "dataset",
        "allow_patterns": ["test.jsonl", "data/test*.parquet"],
    }
    with pytest.raises(ValueError, match=r"openai/gsm8k has no file like main/test\*.parquet"):
        datasets.load("gsm8k", EvalSettings(dataset="gsm8k"))


def test_unavailable_data_set_is_a_one_line_error(main: Callable[..., Any]):
    status, _, err = main("eval", "accuracy", "--dataset", "gsm8k")  # tests are offline
    assert status == 2
    assert err.startswith("strobe: The data set openai/gsm8k could not be fetched from the hub (")
    assert err.endswith("or give a local copy: --dataset gsm8k --data FILE.\n")


def test_demo_tasks_come_from_all_families():
    data = datasets.load("demo", EvalSettings(prompts=4 * len(FAMILIES)))
    assert sum(sample.runs_code for sample in data.samples) == 4
    assert {sample.thinking for sample in data.samples} == {True, False}


# answering


def test_turns_carry_previous_answers_within_concurrency(pair: Pair):
    llm = LLM(pair.target, pair.draft, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=6)
    samples = [Sample(("Hello", "And then?", "Well")), Sample(("Hi",)), Sample(("A", "B"))]
    answering = Answering(llm.engine, llm.tokenizer, params, thinking=False)
    num_active, reported = list[int](), list[int]()

    def report(done: int) -> None:
        scheduler = llm.engine.scheduler
        num_active.append(len(scheduler.running) + len(scheduler.waiting))
        reported.append(done)

    run = answering.run(samples, 2, report)
    assert max(num_active) == 2
    assert reported[-1] == 3
    assert [len(talk.answers) for talk in run.conversations] == [3, 1, 2]
    for talk in run.conversations:
        messages: list[dict[str, Any]] = []
        for turn, answer in zip(talk.sample.turns, talk.answers, strict=True):
            messages.append({"role": "user", "content": turn})
            (output,) = llm.chat(
                messages, params, use_tqdm=False, chat_template_kwargs={"enable_thinking": False}
            )
            assert output.outputs[0].token_ids == answer.token_ids
            messages.append({"role": "assistant", "content": answer.text})


def test_too_long_prompt_fails_alone(pair: Pair):
    llm = LLM(pair.target, pair.draft, max_model_len=64)
    params = SamplingParams(temperature=0, max_tokens=4)
    answering = Answering(llm.engine, llm.tokenizer, params, thinking=False)
    run = answering.run([Sample(("word " * 100,)), Sample(("Hi",))], 1)
    assert "max_model_len is 64" in str(run.conversations[0].error)
    assert run.conversations[1].error is None
    data = datasets.DataSet("custom", (), "", 2)
    row = measures.row(data, run, run_code=False)
    assert (row["failed"], row["answers"]) == (1, 1)


def test_engine_is_freed_before_the_next_one(pair: Pair):
    ways = {name: EngineConfig(target=str(pair.target), method="none") for name in ("a", "b")}
    engines = Engines(ways, one_at_a_time=True)
    answering = Answering(
        engines.get("a", print).engine, engines.get("a", print).tokenizer, SamplingParams(), False
    )
    answering.run([Sample(("Hi",))], 1)
    engine = weakref.ref(engines.get("a", print).engine)
    del answering
    assert engine() is not None
    engines.get("b", print)
    assert engine() is None
    both = Engines(ways, one_at_a_time=False)
    engine = weakref.ref(both.get("a", print).engine)
    both.get("b", print)
    assert engine() is not None


# figures


def answer_of(tokens: int, per_position: list[int], steps: int) -> CompletionOutput:
    counts = DraftCounts(steps, steps * 3, sum(per_position), per_position)
    report = SpeculationReport("dflash", counts)
    return CompletionOutput(0, token_ids=[1] * tokens, speculation=report)


def test_acceptance_is_averaged_over_steps_and_over_answers():
    answers = [answer_of(8, [2, 1, 1], 3), answer_of(2, [1, 0, 0], 1), CompletionOutput(0)]
    figures = measures.acceptance(answers)
    assert figures is not None
    assert figures["acceptance_length"] == 1 + 5 / 4
    assert figures["mean_of_answers"] == round((1 + 4 / 3 + 2) / 2, 4)
    assert figures["tokens_per_step"] == (7 + 1) / 4
    assert figures["rate_by_position"] == [0.75, 0.25, 0.25]
    assert figures["histogram"] == [0.25, 0.5, 0.0, 0.25]
    assert figures["draft_acceptance_rate"] == round(5 / 12, 4)
    assert measures.acceptance([CompletionOutput(0)]) is None


def test_plots_need_matplotlib(
    main: Callable[..., Any],
    lines: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    acceptance = measures.acceptance([answer_of(8, [2, 1, 1], 3)])
    figures: dict[str, Any] = {
        "evaluation": "speed",
        "rows": [{"data_set": name, "acceptance": acceptance} for name in ("a", "b")],
        "pairs": [{"data_set": "a", "concurrency": c, "speedup": 2.0} for c in (1, 8)],
    }
    monkeypatch.setattr(bench_plots, "find_spec", lambda name: None)
    assert bench_plots.missing().endswith("install it with pip install 'strobe[eval]'.")
    monkeypatch.undo()
    pytest.importorskip("matplotlib")
    assert bench_plots.missing() == ""
    drawn = eval_plots.draw(tmp_path, figures)
    assert [name for name, _ in drawn] == ["histogram.png", "positions.png", "speedup.png"]
    for name, _ in drawn:
        data = (tmp_path / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 200_000
