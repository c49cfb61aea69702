"""The pair trained on source text: its corpus, its tokenizer, and a tiny run."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.text_pair import corpus
from scripts.text_pair.train import ROOT, main
from strobe import LLM, SamplingParams

HELDOUT = ["graphlib.py", "functools.py"]
TRAINED = ["bisect.py", "colorsys.py", "heapq.py"]
MODEL = "gpt2/configuration_gpt2.py"
KINDS = ("held-out library", "trained library", "trained models")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output directory of a run of a few steps."""
    folder = tmp_path_factory.mktemp("text_pair")
    sizes = ["--small", "--steps", "4", "--sequences", "16", "--max-tokens", "24", "--measure", "6"]
    main([*sizes, "--out", str(folder), "--files", *HELDOUT, *TRAINED, MODEL])
    return folder


def test_split_is_by_file_and_deterministic() -> None:
    assert [name for name in (*TRAINED, *HELDOUT) if corpus.is_heldout(name)] == HELDOUT
    kinds = corpus.files([*HELDOUT, MODEL, *TRAINED])
    library, models = corpus.ROOTS.values()
    assert kinds == {
        "held-out library": [(library / name).read_text("utf-8") for name in sorted(HELDOUT)],
        "trained library": [(library / name).read_text("utf-8") for name in sorted(TRAINED)],
        "trained models": [(models / MODEL).read_text("utf-8")],
    }
    assert corpus.files([*TRAINED, *HELDOUT, MODEL]) == kinds
    assert corpus.side(kinds, "trained") == kinds["trained library"] + kinds["trained models"]


def test_heldout_text_is_a_small_share() -> None:
    kinds = {kind: sum(map(len, texts)) for kind, texts in corpus.files().items()}
    for source in corpus.ROOTS:
        heldout, trained = kinds[f"held-out {source}"], kinds[f"trained {source}"]
        assert 0.005 < heldout / (heldout + trained) < 0.08


def test_documentation_is_text_instead_of_a_literal() -> None:
    (text,) = corpus.files([corpus.TOPICS, *HELDOUT])["trained library"]
    assert "\n\n" in text
    assert "\\n" not in text[:2000]


@pytest.mark.parametrize("files", [TRAINED, HELDOUT, [*TRAINED, "no_such_module.py"]])
def test_one_sided_files_are_rejected(files: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--files is .*, which leaves one side .* name more"):
        corpus.files(files)


def test_trained_tokenizer_round_trips_any_text() -> None:
    texts = corpus.files([*HELDOUT, *TRAINED])["trained library"]
    tokenizer = corpus.train_tokenizer(texts, 512)
    odd = "\tif x:\r\n\t\treturn 'ü → 漢字 🙂'  # \x00\n\n\n    \r\n  end \t"
    for text in (odd, *texts):
        (ids,) = corpus.encode(tokenizer, [text])
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert max(ids) < tokenizer.get_vocab_size() == 512
    with pytest.raises(ValueError, match="--vocabulary is 262, but the text gives 264; ask for"):
        corpus.train_tokenizer(texts, 262)


def test_trained_pair_answers_equally_with_and_without_drafts(out: Path) -> None:
    llm = LLM(out / "target", out / "draft", device="cpu", adaptive=False)
    prompts = ["def main(argv):\n    ", "import os\r\n\tfor"]
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=32, seed=3)
        on, off = (
            [o.outputs[0] for o in llm.generate(prompts, params.clone(speculation=choice))]
            for choice in (True, False)
        )
        assert [o.token_ids for o in on] == [o.token_ids for o in off]
        assert all(o.speculation is not None and o.speculation.used for o in on)
    assert llm.chat([{"role": "user", "content": "hello"}], params)[0].outputs[0].token_ids


def test_prompts_cover_all_kinds(out: Path) -> None:
    lines = [json.loads(line) for line in (out / "prompts.jsonl").read_text("utf-8").splitlines()]
    assert Counter(line["kind"] for line in lines) == dict.fromkeys(KINDS, 85)
    kinds = corpus.files([*HELDOUT, *TRAINED, MODEL])
    tokenizer = LLM(out / "target", method="none", device="cpu").tokenizer
    for line in lines:
        assert any(line["prompt"] in text for text in kinds[line["kind"]])
        assert corpus.SHORTEST <= len(tokenizer.encode(line["prompt"])) <= corpus.LONGEST


def test_log_reports_steps_and_acceptance(out: Path) -> None:
    log = json.loads((out / "log.json").read_text())
    assert list(log["seconds"]) == ["corpus", "target", "answers", "draft", "acceptance"]
    assert (log["target"]["steps"], log["training"]["steps"]) == (4, 4)
    for name in ("greedy", "temperature 1"):
        for kind in KINDS:
            result = log["acceptance"][name][kind]
            assert len(result["of_each_answer"]) == 2
            assert 1 <= result["acceptance_length"] <= 16


def test_output_inside_the_package_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    inside = ROOT / "strobe" / "demo_models" / "target"
    with pytest.raises(SystemExit):
        main(["--small", "--out", str(inside)])
    assert capsys.readouterr().err == (
        f"error: --out is {inside}, which lies in the package; name a directory outside "
        f"{ROOT / 'strobe'}.\n"
    )
