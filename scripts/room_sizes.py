"""Print the number of code lines in each room of the package, and in the core.

    python scripts/room_sizes.py [--write]

A room is a folder of `strobe/`, or the files at its root. Blank lines, comments and docstrings do
not count. `--write` renews the table in docs/architecture.md and the core's size in README.md.
"""

from __future__ import annotations

import argparse
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "strobe"
ROOT_FILES = "files at the root"
CORE = (
    "engine",
    "speculation",
    "runner",
    "kv",
    "sampling",
    "models",
    "step.py",
    "request.py",
    "counters.py",
    "sampling_params.py",
    "config.py",
)
"""What a step passes through, without attention and kernels."""

VARIANTS = ("models/families", "models/config_readers", "models/quantization")
"""Folders of the core with a file per model or format, of which the core counts one family."""
FIRST_FAMILY = "models/families/qwen3.py"

BEGIN = "<!-- room sizes: python scripts/room_sizes.py --write -->\n"
END = "<!-- end of room sizes -->\n"
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_STATEMENT_ENDS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def code_lines(path: Path) -> int:
    """Return the number of lines with code: no blank lines, comments or docstrings."""
    rows: set[int] = set()
    starts_statement = True
    with path.open(encoding="utf-8") as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type in _STATEMENT_ENDS:
                starts_statement = True
                continue
            if token.type in _NO_CODE:
                continue
            if token.type == tokenize.STRING and starts_statement:
                continue
            rows.update(range(token.start[0], token.end[0] + 1))
            starts_statement = False
    return len(rows)


def room_sizes(package: Path = PACKAGE) -> dict[str, tuple[int, int]]:
    """Return the files and the lines of code of each room, largest first."""
    sizes: dict[str, tuple[int, int]] = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        room = f"{parts[0]}/" if len(parts) > 1 else ROOT_FILES
        files, lines = sizes.get(room, (0, 0))
        sizes[room] = (files + 1, lines + code_lines(path))
    return dict(sorted(sizes.items(), key=lambda item: -item[1][1]))


def core_files(package: Path = PACKAGE) -> list[Path]:
    """Return the files of the core. Raises ValueError for a room or a file that does not exist."""
    files: list[Path] = []
    for name in (*CORE, *VARIANTS, FIRST_FAMILY):
        if not (package / name).exists():
            raise ValueError(f"strobe/{name} does not exist; correct CORE in room_sizes.py.")
    for name in CORE:
        path = package / name
        files += [path] if path.is_file() else sorted(path.rglob("*.py"))
    return [path for path in files if _counts(path.relative_to(package).as_posix())]


def _counts(name: str) -> bool:
    """Whether the core counts this file: all but config readers, formats and other families."""
    is_variant = any(name.startswith(f"{folder}/") for folder in VARIANTS)
    return name == FIRST_FAMILY or not is_variant


def core_lines(package: Path = PACKAGE) -> int:
    """Return the lines of code of the core."""
    return sum(code_lines(path) for path in core_files(package))


def table() -> str:
    """Return the rooms as a Markdown table, with the core and the whole package below."""
    sizes = room_sizes()
    rows = ["| room | files | lines of code |", "|---|---|---|"]
    rows += [f"| `{room}` | {files} | {lines:,} |" for room, (files, lines) in sizes.items()]
    files = sum(files for files, _ in sizes.values())
    lines = sum(lines for _, lines in sizes.values())
    rows.append(f"| all | {files} | {lines:,} |")
    rows.append(f"| of which the core | {len(core_files())} | {core_lines():,} |")
    return "\n".join(rows).replace(f"`{ROOT_FILES}`", ROOT_FILES) + "\n"


def with_table(page: str, new_table: str) -> str:
    """Return the page with the table between its two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"The page has no marks {BEGIN.strip()} and {END.strip()}.")
    return f"{before}{begin}\n{new_table}\n{end}{after}"


def with_core_size(readme: str, lines: int) -> str:
    """Return the README with the core's size, rounded to hundreds."""
    size = f"{round(lines, -2):,} lines of code"
    text, count = re.subn(r"[\d,]+ lines of code", size, readme, count=1)
    if not count:
        raise ValueError("README.md does not say how many lines of code the core has.")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="renew the two pages")
    options = parser.parse_args()
    print(table(), end="")
    if options.write:
        page = ROOT / "docs" / "architecture.md"
        page.write_text(with_table(page.read_text(encoding="utf-8"), table()), encoding="utf-8")
        readme = ROOT / "README.md"
        text = with_core_size(readme.read_text(encoding="utf-8"), core_lines())
        readme.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
