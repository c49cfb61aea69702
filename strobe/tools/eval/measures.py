"""Compute a run's acceptance, accuracy and rates."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import mean

from strobe.counters import DraftCounts
from strobe.outputs import CompletionOutput
from strobe.terminal.wording import counted
from strobe.tools.eval.answering import Conversation, Run
from strobe.tools.eval.datasets import DataSet
from strobe.tools.report import Figures

DEFINITIONS = {
    "acceptance_length": "1 + accepted drafts / verify steps with drafts, over all answers "
    "together: counts the target's own token but not the prefill's first one (vLLM's counters)",
    "mean_of_answers": "the mean of the answers' own acceptance lengths, as in the DFlash paper "
    "and vLLM's test; each turn of a conversation is an answer",
    "tokens_per_step": "tokens of the answers without each one's first, per verify step, as "
    "`strobe bench offline` and `strobe demo` count: tokens after an answer's end do not count",
    "draft_acceptance_rate": "accepted drafts / verified drafts",
    "rate_by_position": "share of verify steps that accepted the draft at this position (and all "
    "before it)",
    "histogram": "share of verify steps that accepted exactly this many drafts, from 0",
    "tokens_per_s": "tokens of all answers / seconds from the first request to the last answer, "
    "prompts included",
    "speedup": "tokens_per_s with speculation / without, on the same prompts",
}


def acceptance(answers: Sequence[CompletionOutput]) -> Figures | None:
    """Return the acceptance figures, None if nothing was drafted."""
    counts = DraftCounts()
    lengths = list[float]()
    num_tokens = 0
    for answer in answers:
        report = answer.speculation
        if report is None or report.counts.acceptance_length is None:
            continue
        counts.merge(report.counts)
        lengths.append(report.counts.acceptance_length)
        num_tokens += len(answer.token_ids) - 1
    if not counts.steps:
        return None
    reached = [counts.steps, *counts.accepted_per_position, 0]
    return {
        "acceptance_length": round(1 + counts.num_accepted / counts.steps, 4),
        "mean_of_answers": round(mean(lengths), 4),
        "tokens_per_step": round(num_tokens / counts.steps, 4),
        "draft_acceptance_rate": round(counts.num_accepted / max(1, counts.num_verified), 4),
        "steps": counts.steps,
        "drafted": counts.num_verified,
        "accepted": counts.num_accepted,
        "rate_by_position": [round(n / counts.steps, 4) for n in counts.accepted_per_position],
        "histogram": [round((n - after) / counts.steps, 4) for n, after in pairwise(reached)],
    }


def accuracy(data: DataSet, run: Run, *, run_code: bool) -> Figures:
    """Grade the answers; a failed one is wrong. note: which are not graded and why, empty if all
    are."""
    graded = [
        talk
        for talk in run.conversations
        if talk.sample.grade is not None and (run_code or not talk.sample.runs_code)
    ]
    code = sum(talk.sample.runs_code for talk in run.conversations)
    note = data.ungraded
    if not note and code and not run_code:
        suffix = "" if code == len(run.conversations) else f" of {code} of them"
        note = f"accuracy{suffix} is not measured without --allow-code-execution"
    elif not note and len(graded) < len(run.conversations):
        num_prompts = counted(len(run.conversations), "prompt")
        note = f"{len(graded)} of {num_prompts} can be graded; no answer is known to the others"
    with ThreadPoolExecutor(4) as pool:  # programs run in processes of their own
        right = sum(pool.map(_right, graded))
    share = round(right / len(graded), 4) if graded else None
    return {"right": right, "graded": len(graded), "accuracy": share, "note": note}


def _right(talk: Conversation) -> bool:
    grade = talk.sample.grade
    is_complete = talk.error is None and len(talk.answers) == len(talk.sample.turns)
    return is_complete and grade is not None and grade(talk.answers[-1].text)


def row(data: DataSet, run: Run, *, run_code: bool) -> Figures:
    """Return all figures of one way at one concurrency."""
    answers = run.answers
    return {
        "prompts": len(run.conversations),
        "answers": len(answers),
        "tokens": run.tokens,
        "seconds": round(run.seconds, 4),
        "tokens_per_s": round(run.tokens / run.seconds, 2),
        "cut_at_max_tokens": sum(answer.finish_reason == "length" for answer in answers),
        "errors": sorted({talk.error for talk in run.conversations if talk.error is not None}),
        "failed": sum(talk.error is not None for talk in run.conversations),
        "acceptance": acceptance(answers),
        "accuracy": accuracy(data, run, run_code=run_code),
    }


def compare(plain: Run, drafted: Run) -> Figures:
    """Compare runs without and with speculation. identical: conversations with equal tokens."""
    same = sum(
        [x.token_ids for x in a.answers] == [y.token_ids for y in b.answers]
        for a, b in zip(plain.conversations, drafted.conversations, strict=True)
    )
    rates = [run.tokens / run.seconds for run in (plain, drafted)]
    return {
        "speedup": round(rates[1] / rates[0], 3) if rates[0] else None,
        "identical": same,
        "prompts": len(plain.conversations),
    }
