"""Run lm-eval against the server, with and without speculation, and against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from client import HERE, MODEL, SPECULATION, TARGET, Client, environment, origin, serving, table
from examples import write_evaluation

CHOICES, ANSWERS, CHAT = "strobe_choices", "strobe_answers", "strobe_chat"
TOLERANCE = 1e-3
"""Maximum difference of a log likelihood, in nats, between server and transformers."""

Score = dict[str, float]
Samples = dict[str, list[Any]]
"""The model's answers to each question, by task."""


class Way(NamedTuple):
    """lm-eval's model type, the model's arguments, other options, and the tasks."""

    model: str
    arguments: dict[str, object]
    options: Sequence[object]
    tasks: Sequence[str]

    def at(self, url: str) -> Way:
        """Return the same way with the server at `url`."""
        path = "chat/completions" if "chat" in self.model else "completions"
        place = {"model": MODEL, "base_url": f"{url}/v1/{path}"}
        return self._replace(arguments=place | self.arguments)


BOTH = (CHOICES, ANSWERS)
TEXT: dict[str, object] = {"tokenizer": TARGET, "tokenized_requests": False}
IDS: dict[str, object] = {"tokenizer": TARGET, "tokenized_requests": True}
FOUR: dict[str, object] = {"num_concurrent": 4}
TRUTH = Way("hf", {"pretrained": TARGET, "dtype": "float32"}, ("--device", "cpu"), BOTH)
WAYS = {
    "completions, token ids, 4 prompts in each": Way(
        "local-completions", IDS, ("--batch_size", 4), BOTH
    ),
    "completions, text, 4 at once": Way("local-completions", TEXT | FOUR, (), BOTH),
    "chat, 4 at once": Way("local-chat-completions", FOUR, ("--apply_chat_template",), (CHAT,)),
}
METRIC = {CHOICES: "acc,none", ANSWERS: "exact_match,last-answer", CHAT: "exact_match,last-answer"}


def evaluate(directory: Path, count: int) -> list[str]:
    """Print scores as a Markdown table; return sentences on failures."""
    client = environment(directory / "lm_eval", ["-r", "lm_eval.txt"])
    write_evaluation(client.folder, count)
    truth, truth_samples = _lm_eval(client, "transformers", TRUTH)
    results: dict[tuple[str, str], tuple[Score, Samples]] = {}
    for speculation, options in SPECULATION.items():
        with serving(client.folder / f"server_{speculation}.log", options) as url:
            for i, (name, way) in enumerate(WAYS.items()):
                out = f"way_{i}_{speculation}"
                results[name, speculation] = _lm_eval(client, out, way.at(url))

    rows, problems = [], []
    for name, way in WAYS.items():
        (on, on_samples), (off, off_samples) = results[name, "on"], results[name, "off"]
        for task in way.tasks:
            if on[task] != off[task]:
                problems.append(
                    f"{name}, {task}: {on[task]} with speculation, {off[task]} without."
                )
            if task == CHOICES:
                to_transformers = _apart(on_samples[task], truth_samples[task])
                on_to_off = _apart(on_samples[task], off_samples[task])
                note = (
                    f"log likelihoods: {to_transformers:.1e} from transformers, {on_to_off:.1e} "
                    "on to off"
                )
                if not max(to_transformers, on_to_off) <= TOLERANCE:
                    problems.append(f"{name}: {note}, but {TOLERANCE} is allowed.")
            else:
                same = sum(a == b for a, b in zip(on_samples[task], off_samples[task], strict=True))
                note = f"{same} of {len(off_samples[task])} texts equal on and off"
                if same < len(off_samples[task]):
                    problems.append(f"{name}: {note}.")
            truth_score = truth[ANSWERS if task == CHAT else task]
            scores = [f"{score:.3f}" for score in (on[task], off[task], truth_score)]
            rows.append([name, task, *scores, note])
    print(origin(client.versions("lm_eval", "transformers", "torch")), end="\n\n")
    head = ["requests", "task", "speculation on", "off", "transformers", "comparison"]
    print(table(head, rows))
    return problems


def _lm_eval(client: Client, name: str, way: Way) -> tuple[Score, Samples]:
    """Run the tasks once; return each task's score, and its samples in the order of questions."""
    out = client.folder / name
    shutil.rmtree(out, ignore_errors=True)
    words: list[object] = ["--model", way.model, "--tasks", ",".join(way.tasks), *way.options]
    words += ["--model_args", ",".join(f"{key}={value}" for key, value in way.arguments.items())]
    words += ["--include_path", HERE / "tasks", "--log_samples", "--output_path", out]
    client.run("lm_eval", words, client.folder / f"{name}.log")
    (results,) = out.glob("*/results_*.json")
    scores = json.loads(results.read_text(encoding="utf-8"))["results"]
    samples = {task: _samples(next(out.glob(f"*/samples_{task}_*.jsonl"))) for task in way.tasks}
    return {task: scores[task][METRIC[task]] for task in way.tasks}, samples


def _samples(path: Path) -> list[Any]:
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line["resps"] for line in sorted(lines, key=lambda line: line["doc_id"])]


def _apart(first_samples: list[Any], second_samples: list[Any]) -> float:
    """Return the largest difference between log likelihoods of the same choices."""
    pairs = [
        (float(a[0][0]), float(b[0][0]))
        for first, second in zip(first_samples, second_samples, strict=True)
        for a, b in zip(first, second, strict=True)
    ]
    return max(abs(a - b) for a, b in pairs)
