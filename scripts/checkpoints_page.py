"""Write the tables of docs/checkpoints.md: published checkpoints from tests/corpus, and formats
and heads from the parameters of tests; and the table of pairs in docs/command-line.md from
strobe/hub/pairs.py.

    python scripts/checkpoints_page.py [--write | --check]

Without an option it prints the tables. A test compares each answer with what the readers say.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from strobe.hub.pairs import PAIRS
from strobe.models.quantization.published import format_name

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import head_dialects, tested_formats  # noqa: E402
from tests.support.tested_formats import TestedFormat  # noqa: E402

PAGES = (ROOT / "docs" / "checkpoints.md", ROOT / "docs" / "command-line.md")
CORPUS = ROOT / "tests" / "corpus"
INFERRED = ("inferred", "does not name the repository", "no such repository")
"""Words of notes and sources whose checkpoint's name is not certain."""
NATIVE = {"fp8": "FP8 with scales by blocks", "mxfp4": "experts in MXFP4"}
YES = "yes"
UNTESTED = "not tested"
INCOMPLETE = "recognized; its config was seen in part"

Entry = dict[str, Any]


def checkpoint_name(stem: str, entry: Entry) -> str:
    """Return the name of a checkpoint as its users write it."""
    owner, _, name = stem.partition("__")
    text = f"{entry.get('note', '')} {entry['source']}"
    suffix = " (name inferred)" if any(words in text for words in INFERRED) else ""
    if owner == "SpecForge":
        return f"{owner}'s `{name}`"
    return f"`{owner}/{name}`{suffix}"


def verdict(answer: Entry, entry: Entry) -> str:
    """Return what happens to the checkpoint, in a few words."""
    if answer["answer"] == "rejected":
        return f"rejected by {rejecting(answer, entry)}"
    if answer["answer"] == "incomplete":
        return INCOMPLETE
    return "loads" + (", as far as its config was seen" if entry["partial"] else "")


def rejecting(answer: Entry, entry: Entry) -> str:
    """Return what a rejected checkpoint's error names."""
    reason = answer["reason"]
    if reason == answer.get("method"):
        return "its method"
    if reason in (entry["config"].get("architectures") or ()):
        return "its architecture"
    return "its format of weights" if "quantized" in answer["sentence"] else f"`{reason}`"


def weights(entry: Entry) -> str:
    """Return the format or the dtype of a target's weights."""
    config = entry["config"]
    method = (config.get("quantization_config") or {}).get("quant_method")
    name = format_name(config, entry.get("quant"), NATIVE)
    if name is not None:
        return name
    text = config.get("text_config") or config
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
    return NATIVE.get(str(method), dtype or "not seen")


def tables() -> dict[str, str]:
    """Return the tables by name."""
    answers = json.loads((CORPUS / "answers.json").read_text(encoding="utf-8"))
    rows: dict[str, list[tuple[str, ...]]] = {"drafters": [], "targets": []}
    for kind, by_name in answers.items():
        for stem, answer in by_name.items():
            text = (CORPUS / kind / f"{stem}.json").read_text(encoding="utf-8")
            entry = json.loads(text)
            name = checkpoint_name(stem, entry)
            if kind == "drafters":
                details = answer["method"] or "not seen", answer["format"] or ""
            else:
                names = entry["config"].get("architectures")
                details = f"`{names[0]}`" if names else "not seen", weights(entry)
            rows[kind].append((*details, name, verdict(answer, entry)))
    heads = {
        "drafters": ("method", "format", "checkpoint", "answer"),
        "targets": ("architecture", "weights", "checkpoint", "answer"),
    }
    new_tables = {kind: as_table(heads[kind], sorted(rows[kind])) for kind in heads}
    return {
        **new_tables,
        "pairs": pairs_table(),
        "formats": formats_table(),
        "heads": heads_table(),
    }


def heads_table() -> str:
    """Return the dialects in which each head is tested."""
    dialects = (*head_dialects.CHANGES, head_dialects.GGUF)
    rows = [
        (head, *[YES if (head, dialect) in head_dialects.PAIRS else "-" for dialect in dialects])
        for head in head_dialects.HEADS
    ]
    return as_table(("head", *dialects), rows)


def formats_table() -> str:
    """Return how each format of weights is tested."""
    rows: list[tuple[str, ...]] = []
    for name, row in tested_formats.FORMATS.items():
        cells = (checked_target(row), checked_drafter(row), checked_experts(row))
        rows.append((name, *cells, checked_on_cpu(row), checked_on_gpu(row)))
    return as_table(("format", "target", "drafter", "experts", "CPU", "GPU"), rows)


def checked_target(row: TestedFormat) -> str:
    """Return what a target's weights or logits are compared with."""
    names = tested_formats.LIBRARIES.items()
    if row.gguf:
        return "`gguf` package"
    libraries = [
        library for start, library in names if any(name.startswith(start) for name in row.recorded)
    ]
    if libraries:
        return ", ".join(libraries)
    return "transformers" if row.families else "transcription"


def checked_drafter(row: TestedFormat) -> str:
    is_tested = row.gguf or set(row.written) & set(tested_formats.DRAFTERS)
    return YES if is_tested else UNTESTED


def checked_experts(row: TestedFormat) -> str:
    in_gguf = set(row.gguf) & set(tested_formats.GGUF_EXPERTS)
    if in_gguf:
        return f"gpt-oss's: {', '.join(sorted(in_gguf))}"
    is_tested = row.families or set(row.written) & set(tested_formats.EXPERTS)
    return YES if is_tested else UNTESTED


def checked_on_cpu(row: TestedFormat) -> str:
    """Return how answers on a CPU are tested."""
    if row.families or row.gguf or set(row.written) & set(tested_formats.WITH_RANKS):
        return "lossless, ranks"
    return "lossless"


def checked_on_gpu(row: TestedFormat) -> str:
    """Return how answers, or only the kernels of products, are tested on a GPU."""
    if set(row.written) & set(tested_formats.GPU_FORMATS):
        return "lossless, captured"
    cells: list[str] = []
    if set(row.written) & set(tested_formats.GPU_EXPERTS):
        cells.append("experts lossless, captured")
    elif row.families:
        cells.append("experts captured")
    if set(row.kernels) & set(tested_formats.IN_KERNELS):
        cells.append("kernels")
    return "; ".join(cells) or UNTESTED


def pairs_table() -> str:
    """Return the published drafters of each target, best first."""
    rows: list[tuple[str, ...]] = []
    for target, drafters in PAIRS.items():
        names = [f"`{drafter.name}` ({drafter.method})" for drafter in drafters]
        rows.append((f"`{target}`", ", ".join(names)))
    return as_table(("target", "drafters, best first"), rows)


def as_table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the page with its tables renewed."""
    new_tables = tables()

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{new_tables[match[2]]}\n{match[3]}"

    return re.sub(r"(<!-- table (\S+) -->)\n.*?(<!-- end -->)", table, page, flags=re.DOTALL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="renew the pages")
    group.add_argument("--check", action="store_true", help="fail if a page is not current")
    options = parser.parse_args()
    old_pages = [page.read_text(encoding="utf-8") for page in PAGES]
    new_pages = [with_tables(text) for text in old_pages]
    if options.check:
        is_old = old_pages != new_pages
        if is_old:
            print("a table is old; run python scripts/checkpoints_page.py --write")
        return int(is_old)
    if options.write:
        for page, text in zip(PAGES, new_pages, strict=True):
            page.write_text(text, encoding="utf-8")
    else:
        print("\n\n".join(tables().values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
