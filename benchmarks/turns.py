"""Compare the step times of two versions of Strobe on one GPU.

    python benchmarks/turns.py BEFORE [--turns 3] [--json FILE] -- --shapes qwen3-8b --steps 40

BEFORE is a checkout of the earlier version; the later one is this. Arguments after -- go to `strobe
bench step` of both. The versions alternate (after, before, before, after, ...), so that drift of
the GPU affects both. The figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

AFTER = Path(__file__).parents[1]


def measured(tree: Path, arguments: list[str]) -> dict[str, float]:
    """Run `strobe bench step` and return the milliseconds by cell."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "figures.json"
        command = "import sys; from strobe.cli%s import main; sys.exit(main())"
        module = ".main" if (tree / "strobe" / "cli").is_dir() else ""
        subprocess.run(
            [sys.executable, "-c", command % module, "bench", "step", *arguments, "--json", file],
            check=True,
            cwd=tree,
            env={**os.environ, "PYTHONPATH": f"{tree}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=subprocess.DEVNULL,
        )
        rows = json.loads(file.read_text())["rows"]
    return {f"{row['method']}, c = {row['concurrency']}": row["ms"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments, bench_arguments = sys.argv[1:], list[str]()
    if "--" in arguments:
        end = arguments.index("--")
        arguments, bench_arguments = arguments[:end], arguments[end + 1 :]
    options = parser.parse_args(arguments)
    ms_by_cell: dict[str, dict[str, list[float]]] = defaultdict(lambda: {"before": [], "after": []})
    trees = {"before": options.before.resolve(), "after": AFTER}
    for turn in range(options.turns):
        for name in list(trees)[:: -1 if turn % 2 == 0 else 1]:
            for cell, ms in measured(trees[name], bench_arguments).items():
                ms_by_cell[cell][name].append(ms)
    for cell, times in ms_by_cell.items():
        before, after = median(times["before"]), median(times["after"])
        print(f"{cell}: {before:.3f} -> {after:.3f} ms, {100 * (after / before - 1):+.1f} %")
    if options.json:
        result = {"arguments": bench_arguments, "ms": ms_by_cell}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
